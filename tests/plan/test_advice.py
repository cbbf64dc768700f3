"""The advisor: reviewed outputs, what it may not do, and rough noise beside the accountant's."""

from __future__ import annotations

import dataclasses
import json
import pickle

import pytest

from hf_dpopt import DPConfigError, PrivacyConfig, make_plan
from hf_dpopt.accounting.calibrate import rough_epsilon, rough_noise_multiplier
from hf_dpopt.plan.advice import (
    HEAD_PASSES,
    LARGEST_BATCH,
    LONGEST,
    SHORTEST,
    TrainingJob,
    advise,
    head_instead,
)
from hf_dpopt.plan.outlook import SIGNAL, outlook_of
from tests.plan.advice_table import PATH, facts, jobs, row


@pytest.mark.slow_but(4)
@pytest.mark.parametrize("frozen", json.loads(PATH.read_text()), ids=lambda r: "-".join(map(str, r["job"].values())))
def test_reviewed_advice(frozen):
    """Rows of tests/plan/advice.json, which `python -m tests.plan.advice_table --write` writes for review."""
    assert row(TrainingJob(**frozen["job"])) == frozen


def test_every_job_was_reviewed():
    assert [r["job"] for r in json.loads(PATH.read_text())] == [facts(job) for job in jobs()]
    assert len(jobs()) >= 30


@pytest.mark.slow_but(5)
@pytest.mark.parametrize("job", jobs(), ids=str)
def test_no_more_records_than_can_be_paid(job):
    advice = advise(job)
    assert 1 <= advice.batch <= min(LARGEST_BATCH, job.num_units)
    per_epoch = -(-job.num_units // advice.batch) * advice.batch  # an epoch ends with a whole batch
    assert advice.batch * advice.outlook.num_steps <= job.passes * per_epoch + advice.batch
    assert 1e-5 < advice.learning_rate < 0.2


@pytest.mark.slow_but(7)
@pytest.mark.parametrize("job", [j for j in jobs() if j.num_units >= 1000], ids=str)
def test_no_other_batch_is_much_better(job):
    """By trying all powers of two, which the search never looked at, in as many steps as it may take."""
    most = max(LONGEST, 1.3 * job.passes * job.num_units / LARGEST_BATCH)
    few = [2**i for i in range(14) if 2**i <= job.num_units and job.passes * job.num_units <= most * 2**i]
    sizes = [size for size in few if job.steps_of(size) >= SHORTEST]
    assert advise(job).outlook.useful_steps >= 0.93 * max(job.outlook(size).useful_steps for size in sizes)


def test_advice_travels_between_processes():
    """Rank 0 chooses for all; a run of two processes with a target_epsilon could not start otherwise."""
    advice = advise(TrainingJob(num_units=10_000, target_epsilon=8.0))
    again = pickle.loads(pickle.dumps(advice))
    assert again == advice
    again.reasons["learning_rate"] = "another"  # of a copy: `advise` remembers its answers
    assert again.reasons == advice.reasons


@pytest.mark.parametrize(
    "changes, mend",
    [
        ({"num_units": 0}, "num_units"),
        ({"target_epsilon": 0.0}, "target_epsilon=0.0 is not > 0"),
        ({"target_epsilon": float("nan")}, "target_epsilon"),
        ({"passes": -1.0}, "passes=-1.0 is not > 0"),
        ({"passes": float("inf")}, "passes"),
        ({"passes": 1e9}, "passes"),
        ({"target_delta": 0.0}, "target_delta"),
        ({"target_delta": 2.0}, "target_delta"),
        ({"kind": "qlora"}, "kind"),
        ({"objective": "regression"}, "objective"),
        ({"model_size": 0}, "model_size"),
        ({"has_trained_head": "yes"}, "has_trained_head"),
    ],
)
def test_bad_input(changes, mend):
    with pytest.raises(DPConfigError, match=mend):
        TrainingJob(**{"num_units": 100, "target_epsilon": 8.0, **changes})


@pytest.mark.parametrize(
    "num, epsilon, is_head", [(5_000, 3.0, True), (10_000, 8.0, True), (67_349, 8.0, False), (67_349, 3.0, False)]
)
def test_few_records_are_advised_a_linear_head(num, epsilon, is_head):
    """LoRA makes nine steps of 5,000 records; a head sees more signal, and passes over its features cost nothing."""
    job = TrainingJob(num_units=num, target_epsilon=epsilon)
    head = head_instead(job)
    assert (head is not None) == is_head
    if head is not None:
        assert advise(job).outlook.verdict in ("weak", "poor") and head.outlook.verdict == "good"
        assert (head.job.kind, head.job.passes) == ("head", HEAD_PASSES)
        assert head_instead(head.job) is None
    assert head_instead(dataclasses.replace(job, objective="generation")) is None


# --- rough noise ---


@pytest.mark.slow_but(1)
@pytest.mark.parametrize(
    "n, batch, steps, epsilon, delta",
    [(67_349, 1032, 198, 8.0, 1e-5), (67_349, 1032, 198, 1.0, 1e-5), (3_668, 1_000, 12, 8.0, 1e-5),
     (10**6, 2_500, 1_200, 3.0, 1e-7), (42_061, 1_024, 410, 8.0, 1e-5), (67_349, 67_349, 30, 3.0, 1e-6)],
)  # fmt: skip
def test_rough_noise_is_a_little_more_than_what_is_calibrated(n, batch, steps, epsilon, delta):
    config = PrivacyConfig(
        target_epsilon=epsilon, target_delta=delta, expected_batch_size=batch, sampling="poisson"
    )  # fmt: skip
    exact = make_plan(config, num_examples=n, num_steps=steps).noise_multiplier
    assert exact < rough_noise_multiplier(batch / n, steps, epsilon, delta) < 1.2 * exact


def test_rough_epsilon_of_one_full_step_is_that_of_the_gaussian_mechanism():
    """The conversion of arXiv:2004.00010 of alpha / (2 sigma^2), in closed form at a single order by hand."""
    import math

    sigma, delta = 2.0, 1e-5
    by_hand = min(
        a / (2 * sigma**2) + math.log1p(-1 / a) - (math.log(delta) + math.log(a)) / (a - 1) for a in range(2, 65)
    )
    assert rough_epsilon(1.0, sigma, 1, delta) == pytest.approx(by_hand, rel=1e-12)
    assert rough_epsilon(0.999999, sigma, 1, delta) == pytest.approx(by_hand, rel=1e-3)


@pytest.mark.parametrize("epsilon, delta", [(0.01, 1e-8), (0.001, 1e-12), (1e-4, 1e-6), (1e4, 1e-5)])
def test_rough_noise_has_no_floor(epsilon, delta):
    """Integer orders alone end at 0.04 with delta 1e-12."""
    noise = rough_noise_multiplier(0.1, 10, epsilon, delta)
    assert rough_epsilon(0.1, noise, 10, delta) == pytest.approx(epsilon, rel=0.05)


# --- outlook ---


def test_a_language_model_with_adapters_is_not_judged_like_a_new_head():
    """SmolLM2 by label words on SST-2: 78.4 % untrained, 84.3 % after 12 private steps of 1,200 records (one run)."""
    config = PrivacyConfig(target_epsilon=8.0, expected_batch_size=1200)
    plan = make_plan(config, num_examples=67_349, num_steps=12)
    assert outlook_of(plan, "lora").verdict == "poor"
    assert outlook_of(plan, "lora", has_trained_head=True).verdict == "weak"
    new_head = TrainingJob(num_units=67_349, target_epsilon=8.0, passes=12 * 1200 / 67_349)
    writes = dataclasses.replace(new_head, objective="generation")
    assert (new_head.outlook(1200).verdict, writes.outlook(1200).verdict) == ("poor", "weak")
    assert not dataclasses.replace(writes, kind="full").starts_trained, "its weights may be new ones"


def plan_of(**changes):
    asked = {"target_epsilon": 8.0, "expected_batch_size": 200, "target_delta": 1e-5, **changes}
    return make_plan(PrivacyConfig(**asked), num_examples=20_000, num_steps=300)


def test_outlook_of_a_plan_is_its_noise_over_its_batch():
    plan = plan_of()
    made = outlook_of(plan, "lora")
    assert made.noise == pytest.approx(plan.noise_multiplier / 200)
    assert made.run_noise == pytest.approx(made.noise / 300**0.5) and made.signal == SIGNAL["lora"]
    other = plan_of(adjacency="replace_one")  # the sum moves by two clips
    assert outlook_of(other, "lora").noise == pytest.approx(2 * other.noise_multiplier / 200)
