"""The audit passes what is exact, in every setting, and finds faults that are planted; the rest of them is a command."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from scipy import stats

from hf_dpopt import DPConfigError
from hf_dpopt.audit import audit, law
from hf_dpopt.audit.auditing import CLAIM, FALSE_ALARM, judge, log_likelihood_ratios
from hf_dpopt.audit.observe import observe
from tests.audit import guard
from tests.audit.guard import AUDITED, SETTINGS
from tests.audit.page import PAGE, RESULTS, page
from tests.faults import plant
from tests.faults.table import CLOSE


@pytest.mark.slow_but(2)
@pytest.mark.parametrize("name", SETTINGS)
def test_an_exact_run_passes(name):
    found = audit(SETTINGS[name])
    assert found.has_passed, found.verdict
    assert found.claimed_epsilon == pytest.approx(4, abs=0.02)
    ins, outs = found.scores[found.included], found.scores[~found.included]
    seen = stats.mannwhitneyu(ins, outs, alternative="greater").pvalue
    assert seen < 0.01, "the attack sees that canaries are there: 5 to 14 standard deviations, here 2.3 are asked for"
    assert json.dumps(found.public_dict())


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> plant.Copy:
    return plant.Copy(tmp_path_factory.mktemp("checkout"))


@pytest.mark.slow_but(3)
@pytest.mark.parametrize("fault", [one for one in AUDITED if one.num_ranks == 1], ids=lambda fault: fault.what)
def test_a_fault_is_found(fault, checkout):
    found = guard.find(fault, checkout)
    assert found["found"] and found["p"] < 1e-6, found


def test_the_tests_of_the_law_have_the_p_values_they_say(tmp_path):
    """Of one run's shapes, 60 times with fresh normals: each test is below 0.05 as often as it should be, or less."""
    settings = {"target_epsilon": 4.0, "target_delta": 1e-5, "expected_batch_size": 50, "use_cpu": True,
                "per_device_train_batch_size": 50}  # fmt: skip
    seen = observe(settings, tmp_path, num_canaries=200, num_quiet=800, num_steps=12)
    generator, low = np.random.default_rng(0), dict[str, int]()  # nothing below is the run's: no false alarm is left
    seen = dataclasses.replace(seen, included=generator.random(200) < 0.5)
    whitened = law.Whitened(seen)
    for _ in range(60):
        noise = {name: whitened.stddev * generator.standard_normal(v.shape) for name, v in seen.quiet_TQ.items()}
        drawn = generator.random(seen.drawn_TM.shape) < 0.25
        own = whitened.stddev * generator.standard_normal(seen.canaries_TM.shape) + drawn * seen.included
        fresh = type(seen)(seen.plan, seen.epsilon, seen.included, drawn, own, noise)
        for finding in law.test_all(fresh):
            low[finding.name] = low.get(finding.name, 0) + (finding.p_value < 0.05)
    most = stats.binom.isf(1e-4, 60, 0.05)
    assert all(count <= most for count in low.values()), low


def test_a_score_is_the_likelihood_ratio_of_all_that_may_have_been_drawn(tmp_path):
    """Against a sum over all sets of steps that Poisson sampling may draw, by hand, with six steps."""
    settings = {"noise_multiplier": 0.8, "target_delta": 1e-5, "expected_batch_size": 10, "use_cpu": True,
                "per_device_train_batch_size": 10}  # fmt: skip
    whitened = law.Whitened(observe(settings, tmp_path, num_canaries=40, num_quiet=80, num_steps=6))
    found, rate = log_likelihood_ratios(whitened), 0.25
    for j in range(5):
        total = 0.0
        for drawn in range(2**6):
            b = np.array([drawn >> t & 1 for t in range(6)])
            moved = whitened.columns @ b
            density = stats.norm.pdf(whitened.canaries_TM[:, j] - moved) / stats.norm.pdf(whitened.canaries_TM[:, j])
            total += np.prod(np.where(b, rate, 1 - rate)) * np.prod(density)
        assert found[j] == pytest.approx(np.log(total), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(
    ("settings", "options", "match"),
    [
        ({}, {"num_canaries": 3}, "num_canaries=3"),
        ({"max_steps": 4}, {}, "max_steps: the audit sets this itself"),
        ({"preconditioner": "subspace"}, {}, "public"),
        ({"preconditioner": "dp2_rmsprop", "noise_mechanism": "nu_dpftrl"}, {}, "one of the two"),
        ({"preconditioner": "dp2_rmsprop", "preconditioner_kwargs": {"delay": 4, "variant": "noise_first"}}, {},
         "weights do not tell"),
        ({"noise_mechanism": "dp"}, {}, "is unknown"),
        ({"privacy_unit": "user", "sampling": "capped_poisson"}, {}, "draws the records of a user one by one"),
    ],
)  # fmt: skip
def test_what_cannot_be_audited_is_refused(settings, options, match):
    with pytest.raises(DPConfigError, match=match):
        audit(settings, **options)


def test_the_page_has_the_tables_of_its_results():
    text = PAGE.read_text(encoding="utf-8")
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert page(text, results) == text, "python -m tests.audit.page --write"
    assert all(row["found"] for row in results["faults"])
    assert [row["what"] for row in results["faults"]] == [fault.what for fault in AUDITED] and len(AUDITED) >= 20
    assert set(results["bounds"]) == set(SETTINGS)


def test_false_alarms_add_up_to_what_is_stated(monkeypatch, tmp_path):
    """Of one audit: what its tests are given. Of the guard: all audits of exact code."""
    given = []
    finding = law._finding
    monkeypatch.setattr(law, "_finding", lambda *found: given.append(found[2]) or finding(*found))
    settings = {"noise_multiplier": 1.0, "target_delta": 1e-5, "expected_batch_size": 10, "use_cpu": True,
                "per_device_train_batch_size": 10}  # fmt: skip
    observed = observe(settings, tmp_path, num_canaries=40, num_quiet=80, num_steps=6)
    found = judge(observed, {})
    assert len(given) == 7 and found.findings[-1].name == CLAIM, "seven tests of the law, and the bound"
    assert sum(given) + FALSE_ALARM / 2 == pytest.approx(FALSE_ALARM)
    assert (len(guard.EXACT) + guard.RANKS) * FALSE_ALARM <= guard.TOTAL_FALSE_ALARM


def test_a_tree_draws_more_normals_than_there_are_steps():
    """Its noise has the law of a square matrix, by which it is whitened."""
    found = audit({"noise_mechanism": "honaker"})
    assert found.has_passed, found.verdict


def test_hardly_any_noise_shows_what_a_record_adds_to_a_thousandth():
    found = audit(CLOSE)
    assert found.has_passed, found.verdict
    one = next(finding for finding in found.findings if finding.name == "a record adds one clip")
    assert float(one.seen.split()[0]) == pytest.approx(1, abs=1e-3)
