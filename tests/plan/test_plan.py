"""The plan: known privacy of a real run, what a wrong wiring would print, and what a resumed run must share."""

from __future__ import annotations

import dataclasses
import json
import math
import time
import warnings

import pytest

from hf_dpopt.accounting.delta import default_delta
from hf_dpopt.accounting.events import NonPrivateDpEvent
from hf_dpopt.clipping.thresholds import CLIPPINGS
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise import NoiseMechanism
from hf_dpopt.plan.choose import make_plan
from hf_dpopt.plan.config import PrivacyConfig, PrivacyWarning
from hf_dpopt.plan.record import PlanRecord
from hf_dpopt.sampling import SAMPLERS

# Three epochs of SST-2 in batches of 1024.
NUM_EXAMPLES, NUM_STEPS, DELTA = 67349, 198, 1 / (2 * 67349)


def plan_for(*, num_examples=NUM_EXAMPLES, num_steps=NUM_STEPS, noise_of_record=None, **changes):
    changes = {"expected_batch_size": 1024, "target_delta": DELTA, **changes}
    if "target_epsilon" not in changes:
        changes.setdefault("noise_multiplier", 0.7)
    config, sizes = PrivacyConfig(**changes), {"num_examples": num_examples, "num_steps": num_steps}
    recorded = None
    if noise_of_record is not None:
        recorded = dataclasses.replace(make_plan(config, **sizes).record, noise_multiplier=noise_of_record)
    return make_plan(config, **sizes, recorded=recorded)


@pytest.mark.parametrize("noise", [-0.7, math.nan, math.inf, "0.7"])
def test_the_noise_of_a_record_is_checked_like_that_of_the_options(noise):
    """It comes from a ledger: of a negative one only the square would be seen."""
    with pytest.raises(DPConfigError, match="noise_multiplier=.*finite number > 0"):
        plan_for(target_epsilon=3.0, noise_of_record=noise)


# --- numbers ---


@pytest.mark.parametrize("noise, epsilon", [(0.5, 10.3136), (0.6, 6.0650), (0.7, 3.8773), (1.0, 1.4348)])
@pytest.mark.parametrize("sampling", ["auto", "poisson"])
def test_known_epsilon(noise, epsilon, sampling):
    assert plan_for(noise_multiplier=noise, sampling=sampling).epsilon() == pytest.approx(epsilon, rel=5e-4)


def test_the_reference_run_and_what_must_never_be_printed_for_it():
    plan = plan_for()
    assert round(plan.epsilon(), 3) == 3.877
    for wrong in (0.795, 3.229):  # the rate of one of 8 devices; the second half of a resumed run alone
        assert plan.epsilon() != pytest.approx(wrong, rel=0.1)
    assert plan.sampler.sample_rate == 1024 / NUM_EXAMPLES
    assert plan.epsilon((99, 99)) == plan.epsilon()  # resumed half-way, under another key


@pytest.mark.parametrize(
    "adjacency, noise_multiplier, epsilon", [("zero_out", 0.7, 13.20), ("replace_one", 0.35, 32.96)]
)
def test_any_order(adjacency, noise_multiplier, epsilon):
    """Noise of 0.7 clips in both; under replace_one the sensitivity is two clips, so the noise multiplier is half."""
    plan = plan_for(sampling="fixed_order", adjacency=adjacency, noise_multiplier=noise_multiplier)
    assert plan.epsilon() == pytest.approx(epsilon, abs=0.006)
    assert plan.noise_multiplier * plan.clipper.sensitivity(adjacency) == pytest.approx(0.7)
    assert plan.epsilon_replace_one() == pytest.approx(32.96, abs=0.006)


@pytest.mark.parametrize("sampling", ["poisson", "truncated_poisson"])
def test_replace_one_has_the_same_noise_in_both_notations(sampling):
    """0.7 clips of noise: 4.389 under replace_one, as the plan's adjacency or as the report's second line."""
    assert plan_for(sampling=sampling).epsilon_replace_one() == pytest.approx(4.3888, rel=5e-4)
    direct = plan_for(sampling=sampling, adjacency="replace_one", noise_multiplier=0.35)
    assert direct.epsilon() == pytest.approx(4.3888, rel=5e-4)
    assert direct.epsilon_replace_one() == direct.epsilon()


def test_replace_one_has_no_number_where_there_is_no_proof():
    plan = plan_for(target_delta=1e-12, sampling="poisson")
    assert plan.epsilon_replace_one() is None
    assert plan.epsilon() > 5


@pytest.mark.parametrize("target, noise", [(8.0, 0.5456), (3.0, 0.7649)])
def test_calibration_spends_the_budget_and_not_more(target, noise):
    plan = plan_for(target_epsilon=target)
    assert plan.noise_multiplier == pytest.approx(noise, rel=0.01)
    assert 0.995 * target <= plan.epsilon() <= target
    assert plan.epsilon(NUM_STEPS) == plan.epsilon()


@pytest.mark.slow_but(4)
@pytest.mark.parametrize("sampling", SAMPLERS)
@pytest.mark.parametrize("adjacency", ["add_or_remove_one", "zero_out", "replace_one"])
def test_every_pair_calibrates_or_is_refused(sampling, adjacency):
    arguments = {"target_epsilon": 2.0, "sampling": sampling, "adjacency": adjacency, "target_delta": 1e-4}
    arguments |= {"num_examples": 300, "num_steps": 40, "expected_batch_size": 20}
    if sampling == "capped_poisson":
        arguments |= {"privacy_unit": "user", "records_per_user": 3}
    if adjacency not in SAMPLERS[sampling].adjacencies:
        with pytest.raises(
            DPConfigError,
            match="Use adjacency='zero_out' or adjacency='replace_one'|Use .*'zero_out', or sampling='auto'",
        ):
            plan_for(**arguments)
    else:
        assert 1.99 <= plan_for(**arguments).epsilon() <= 2.0


# --- epsilon along the run ---


@pytest.mark.parametrize("arguments", [{}, {"sampling": "fixed_order", "adjacency": "zero_out"}])
def test_epsilon_never_falls_along_the_run_and_ends_at_the_planned_value(arguments):
    plan = plan_for(**arguments)
    steps = [0, 1, 2, 50, 100, 190, 195, 196, 197, 198, 199, 200, 205, 300, 1000]
    values = [plan.epsilon(t) for t in steps]
    assert values[0] == 0.0
    assert all(a <= b for a, b in zip(values, values[1:], strict=False)), values
    assert values[steps.index(198)] == plan.epsilon()
    assert values[-1] > plan.epsilon()


def test_epsilon_along_the_run_is_close_to_the_fine_value_and_above_it():
    for steps in (20, 100, 400):
        fine = plan_for(num_steps=steps).epsilon()
        rough = plan_for(num_steps=198).epsilon(steps)
        assert fine * (1 - 1e-6) <= rough <= 1.01 * fine


def test_epsilon_along_the_run_is_cheap():
    """0.03 to 0.1 s of CPU time for the first value at a step, on an idle core; nothing when it is asked for again."""
    plan = plan_for(num_steps=2000)
    plan.epsilon()
    start = time.process_time()
    for steps in range(100, 1100, 100):
        plan.epsilon(steps)
    first = time.process_time() - start
    assert first < 10
    start = time.process_time()
    for steps in range(100, 1100, 100):
        plan.epsilon(steps)
    assert time.process_time() - start < first / 10


def test_chains_of_a_fixed_order_add_up():
    """198 steps in one chain show a record three times; in eleven chains of 18, each with its order, eleven times."""
    plan = plan_for(sampling="fixed_order", adjacency="zero_out")
    assert plan.epsilon((198,)) == plan.epsilon()
    assert plan.epsilon([18] * 11) > 2 * plan.epsilon()
    assert plan.epsilon((66, 132)) == plan.epsilon()
    assert plan.epsilon((65, 133)) > plan.epsilon()


# --- no privacy ---


@pytest.mark.parametrize("changes", [{"noise_multiplier": 0.0}, {"unsafe_fixed_noise_key": "ab" * 32}])
def test_without_privacy_epsilon_is_infinite(changes):
    plan = plan_for(**changes)
    assert isinstance(plan.event, NonPrivateDpEvent)
    assert plan.epsilon() == plan.epsilon(1) == plan.epsilon(1000) == plan.epsilon_replace_one() == math.inf
    assert plan.epsilon(0) == 0.0
    assert plan.record.to_json()["epsilon"] == "inf" and plan.record.to_json()["is_private"] is False
    assert "ab" * 32 not in json.dumps(plan.record.to_json())


def test_a_fixed_key_changes_no_noise():
    """A test under a fixed key runs with the noise that the real run would have."""
    assert plan_for(target_epsilon=8.0, unsafe_fixed_noise_key="00" * 32).noise_multiplier == pytest.approx(
        plan_for(target_epsilon=8.0).noise_multiplier
    )


# --- wiring ---


@pytest.mark.parametrize("adjacency, clips", [("add_or_remove_one", 1), ("zero_out", 1), ("replace_one", 2)])
@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_event_noise_and_sensitivity_agree(adjacency, clips, clipping):
    """The noise the event is told of, times one record's bound, is the noise the mechanism adds."""
    plan = plan_for(adjacency=adjacency, clipping=clipping, clipping_norm=0.3, noise_multiplier=0.8)
    assert plan.event == plan.sampler.event(0.8 * clips, NUM_STEPS)
    told = plan.event.event.noise_multiplier * plan.config.clipping_norm
    stream = plan.mechanism.stream(None, plan.clipper.sensitivity(plan.adjacency))
    assert stream.draw_stddev == pytest.approx(told)
    assert plan.unit == "example" and plan.adjacency == adjacency
    assert isinstance(plan.mechanism, NoiseMechanism)


def test_noise_of_a_resumed_run_is_kept():
    plan = plan_for(target_epsilon=3.0, noise_of_record=0.7)
    assert plan.noise_multiplier == 0.7 and plan.mechanism.noise_multiplier == 0.7
    assert plan.config.target_epsilon == 3.0
    assert round(plan.epsilon(), 3) == 3.877  # above the budget: the run will stop before it
    with pytest.raises(DPConfigError, match="Use a finite number > 0"):
        plan_for(target_epsilon=3.0, noise_of_record=-1.0)
    assert plan_for(target_epsilon=3.0, noise_of_record=0.0).record.to_json()["is_private"] is False


def test_a_record_is_json_and_names_what_a_resume_must_share():
    plan = plan_for(target_epsilon=8.0)
    public = json.loads(json.dumps(plan.record.to_json(), allow_nan=False))
    assert public == plan.record.to_json()
    assert public["epsilon"] == plan.epsilon() and public["accountant"] == "pld"
    assert public["dp_accounting"].count(".") >= 1
    assert public["sampler"] == {
        "name": "truncated_poisson", "num_examples": NUM_EXAMPLES, "expected_batch_size": 1024, "cap": 1255
    }  # fmt: skip
    # What continues this run has the same law, whatever its length and budget; anything else has another.
    longer = plan_for(target_epsilon=9.0, num_steps=500, noise_of_record=plan.noise_multiplier).record.to_json()
    assert {key: longer.get(key) for key in PlanRecord.mechanism_fields()} == {
        key: public.get(key) for key in PlanRecord.mechanism_fields()
    }
    assert set(PlanRecord.mechanism_fields()) - set(public) == {
        "earlier_runs", "noise_at_changes", "opening_noise", "private_metrics", "tuned"
    }  # fmt: skip
    for changes in (
        {"expected_batch_size": 1023},
        {"num_examples": NUM_EXAMPLES - 1},
        {"clipping_norm": 0.9},
        {"clipping": "automatic"},
        {"adjacency": "zero_out"},
        {"target_delta": 1e-6},
        {"sampling": "poisson"},
        {"noise_of_record": 0.9},
        {"unsafe_fixed_noise_key": "00" * 32},
    ):
        other = plan_for(
            **{"target_epsilon": 8.0, "noise_of_record": plan.noise_multiplier, **changes}
        ).record.to_json()
        assert any(other.get(key) != public.get(key) for key in PlanRecord.mechanism_fields()), changes


# --- delta and refusals ---


def test_default_delta_is_used_and_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plan_for(target_delta=None).delta == default_delta(NUM_EXAMPLES) == 1e-6
        assert plan_for(target_delta=0.9 / NUM_EXAMPLES).delta == 0.9 / NUM_EXAMPLES


def test_a_delta_of_one_over_n_warns_and_a_larger_one_is_refused():
    with pytest.warns(PrivacyWarning, match="exactly 1/n.*Use target_delta <= 1e-06"):
        plan_for(target_delta=1 / NUM_EXAMPLES)
    with pytest.raises(DPConfigError, match="delta=0.0001 is above 1/n = 1.48e-05.*<= 1e-06.*set allow_large_delta"):
        plan_for(target_delta=1e-4)


def test_a_large_delta_that_is_allowed_is_recorded_and_warned_of():
    with pytest.warns(PrivacyWarning, match="above 1/n"):
        plan = plan_for(target_delta=1e-4, allow_large_delta=True)
    assert plan.delta == 1e-4 and plan.record.to_json()["allow_large_delta"] is True
    assert plan_for().record.to_json()["allow_large_delta"] is False


@pytest.mark.parametrize("sampling, num_examples", [("auto", 1000), ("capped_poisson", 8000)])
def test_where_users_are_protected_n_is_their_number(sampling, num_examples):
    """Eight places each for the records of 1,000 users; an eighth of them may not be taken for n."""
    options = dict(privacy_unit="user", records_per_user=8, sampling=sampling, expected_batch_size=100)
    assert plan_for(num_examples=num_examples, target_delta=None, **options).delta == default_delta(1000) == 1e-4
    plan_for(num_examples=num_examples, target_delta=0.9e-3, **options)
    with pytest.raises(DPConfigError, match="1/n = 0.001 for n = 1000 users"):
        plan_for(num_examples=num_examples, target_delta=1.1e-3, **options)


def test_a_run_that_goes_on_keeps_its_delta():
    """Also the default of another release, here 1/n; one that is asked for is the one that is compared."""
    plan = plan_for(num_examples=1000, expected_batch_size=10, target_delta=1e-4)
    recorded = dataclasses.replace(plan.record, delta=1e-3)
    options = dict(noise_multiplier=0.7, expected_batch_size=10)
    sizes = dict(num_examples=1000, num_steps=NUM_STEPS, recorded=recorded)
    with pytest.warns(PrivacyWarning, match="exactly 1/n"):
        assert make_plan(PrivacyConfig(**options), **sizes).delta == 1e-3
    assert make_plan(PrivacyConfig(**options, target_delta=1e-5), **sizes).delta == 1e-5


@pytest.mark.parametrize(
    "arguments, mend",
    [
        ({"num_examples": 1000}, "outside \\[1, 1000\\].*Use a smaller batch"),
        ({"num_examples": 0}, "num_examples=0.*Use an integer >= 1"),
        ({"num_steps": 0}, "num_steps=0.*Use an integer >= 1"),
        ({"num_steps": 2.5}, "num_steps=2.5.*Use an integer >= 1"),
        (
            {"sampling": "fixed_order", "adjacency": "add_or_remove_one"},
            "shifts the blocks.*Use adjacency='zero_out' or adjacency='replace_one'",
        ),
        ({"target_delta": 1e-12, "adjacency": "replace_one", "target_epsilon": 8.0}, "Use delta >= 1e-10"),
    ],
)
def test_refuses(arguments, mend):
    with pytest.raises(DPConfigError, match=mend):
        plan_for(**arguments)


def test_full_batch():
    plan = plan_for(num_examples=64, expected_batch_size=64, num_steps=20, target_epsilon=4.0, target_delta=1e-3)
    assert 3.98 <= plan.epsilon() <= 4.0
    assert plan.record.to_json()["accountant"] == "gaussian"
