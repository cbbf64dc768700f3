"""A budget that includes earlier runs on the same records: what it costs, what is refused, what is written down."""

from __future__ import annotations

import json

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant
from transformers import TrainerCallback

from hf_dpopt import DPConfigError, PrivacyConfig, make_plan
from hf_dpopt.convex import HeadTrainingArguments, check_convex_arguments
from hf_dpopt.plan.record import earlier_runs_of
from hf_dpopt.plan.release import EarlierRun
from hf_dpopt.run.earlier import read_earlier_runs
from hf_dpopt.run.keys import private_dir
from hf_dpopt.run.run_log import RunLog
from tests.helpers.tiny import records, trainer

N, DELTA = 10_000, 1e-5


def plan(epsilon=8.0, batch=500, steps=60, earlier=(), **options):
    config = PrivacyConfig(target_epsilon=epsilon, target_delta=DELTA, expected_batch_size=batch, **options)
    return make_plan(config, num_examples=N, num_steps=steps, earlier=earlier)


def as_earlier(made, charged=None, digest="a" * 64):
    recorded = json.loads(json.dumps(made.record.to_json()))
    (*_, run) = earlier_runs_of(recorded, charged or (made.num_steps,), digest, where="runs/a")
    return run


def by_hand(*parts):
    """Epsilon of sampled Gaussians, composed by dp_accounting itself: (rate, noise over one record's norm, steps)."""
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, 1e-4)
    for rate, noise, steps in parts:
        gaussian = dp_accounting.GaussianDpEvent(noise)
        accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, gaussian), steps)
    return accountant.get_epsilon(DELTA)


def test_epsilon_is_that_of_both_runs_composed():
    first = plan(2.0, batch=2000, steps=30, sampling="poisson")
    both = plan(4.0, sampling="poisson", earlier=[as_earlier(first)])
    expected = by_hand((0.2, first.noise_multiplier, 30), (0.05, both.noise_multiplier, 60))
    assert both.epsilon() == pytest.approx(expected, rel=2e-3)
    assert 4.0 * 0.995 < both.epsilon() <= 4.0
    assert both.epsilon(0) == pytest.approx(first.epsilon(), rel=1e-3), "the first run is spent before the first step"
    alone = plan(4.0, sampling="poisson")
    assert both.noise_multiplier > alone.noise_multiplier
    assert both.noise_multiplier < plan(2.0, sampling="poisson").noise_multiplier, "less than the sum of epsilons"


def test_plain_gaussians_add_their_precisions():
    options = dict(sampling="fixed_order", adjacency="zero_out")
    first = plan(1.0, batch=N // 10, steps=20, **options)
    both = plan(3.0, batch=N // 10, steps=40, earlier=[as_earlier(first)], **options)
    precision = 2 * first.noise_multiplier**-2 + 4 * both.noise_multiplier**-2  # every record: once in 10 steps
    expected = dp_accounting.get_epsilon_gaussian(precision**-0.5, DELTA)
    assert both.epsilon() == pytest.approx(expected, rel=1e-6)
    assert both.epsilon() == pytest.approx(3.0, rel=5e-3)


def test_what_an_earlier_run_charged_beyond_its_plan_counts():
    first = plan(2.0)
    once = as_earlier(first)
    twice = as_earlier(first, charged=(60, 60))
    assert plan(8.0, earlier=[twice]).noise_multiplier > plan(8.0, earlier=[once]).noise_multiplier


def test_correlated_noise_of_either_run_is_composed():
    first = plan(2.0, noise_mechanism="nu_dpftrl", sampling="fixed_order", adjacency="zero_out", steps=40)
    both = plan(4.0, earlier=[as_earlier(first)], adjacency="zero_out")
    assert 4.0 * 0.99 < both.epsilon() <= 4.0
    again = plan(6.0, noise_mechanism="auto", adjacency="zero_out", earlier=[as_earlier(first)])
    assert again.epsilon() <= 6.0 and again.earlier


def test_runs_before_the_earlier_run_count_too(tmp_path):
    first = plan(1.0)
    second = plan(2.0, earlier=[as_earlier(first)])
    recorded = json.loads(json.dumps(second.record.to_json()))
    runs = earlier_runs_of(recorded, (60,), "b" * 64, where="runs/b")
    assert [run.ledger_digest[0] for run in runs] == ["a", "b"]
    assert all(EarlierRun.from_json(run.to_json()) == run for run in runs)
    third = plan(3.0, earlier=runs)
    assert third.epsilon(0) == pytest.approx(second.epsilon(), rel=1e-2)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(adjacency="zero_out", sampling="poisson"), "--adjacency add_or_remove_one"),
        (dict(privacy_unit="user", records_per_user=4, user_id_column="who"), "user by who"),
        (dict(epsilon=0.9), "Raise target_epsilon"),
    ],
)
def test_another_promise_or_no_budget_left_is_refused(changes, words):
    with pytest.raises(DPConfigError, match=words):
        plan(**{"epsilon": 4.0, **changes}, earlier=[as_earlier(plan(1.0))])


def test_a_training_set_of_another_size_is_refused():
    config = PrivacyConfig(target_epsilon=4.0, target_delta=DELTA, expected_batch_size=100)
    with pytest.raises(DPConfigError, match="10,000 units.*9,999"):
        make_plan(config, num_examples=N - 1, num_steps=10, earlier=[as_earlier(plan(1.0))])


def test_runs_whose_cost_is_not_known_are_refused():
    recorded = plan(1.0).record.to_json()
    for changed, charged, words in (
        (None, (1,), "no private run"),
        (recorded, (0,), "no private run"),
        ({"kind": "convex_head", "epsilon": 1.0}, (1,), "convex head"),
        ({**recorded, "is_private": False}, (1,), "was not private"),
    ):
        with pytest.raises(DPConfigError, match=words):
            earlier_runs_of(changed, charged, "a" * 64, where="runs/a")


# --- with the trainer ------------------------------------------------------------------------------------------------

BOTH = dict(noise_multiplier=None, expected_batch_size=8, target_delta=1e-3, advisor="none")


class Stop(TrainerCallback):
    """Ends a run after its first step, as an evaluation may."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = True


def test_a_run_pays_for_all_planned_steps_of_one_that_stopped_early(tmp_path):
    """When it stops may depend on its releases, and then the steps that it took are no bound."""
    data, noise = records(64), []
    for callbacks in ([], [Stop()]):
        first, folder = dict(target_epsilon=2.0, max_steps=8, callbacks=callbacks), tmp_path / str(len(callbacks))
        trainer(folder / "a", train_dataset=data, **first, **BOTH).train()
        second = dict(target_epsilon=3.0, earlier_runs=[str(folder / "a")])
        noise.append(trainer(folder / "b", train_dataset=data, **second, **BOTH).plan.noise_multiplier)
    assert noise[0] == noise[1]


def test_a_run_that_builds_on_another_pays_for_both(tmp_path):
    data = records(64)
    first = trainer(tmp_path / "a", train_dataset=data, target_epsilon=2.0, **BOTH)
    first.train()
    second = trainer(
        tmp_path / "b", train_dataset=data, target_epsilon=3.0, earlier_runs=[str(tmp_path / "a")], **BOTH
    )
    second.train()
    assert 2.9 < second.privacy_spent().epsilon <= 3.0
    alone = trainer(tmp_path / "c", train_dataset=data, target_epsilon=3.0, **BOTH)
    assert second.plan.noise_multiplier > alone.plan.noise_multiplier
    statement = (tmp_path / "b" / "privacy" / "statement.md").read_text()
    (run,) = json.loads((tmp_path / "b" / "privacy" / "report.json").read_text())["plan"]["earlier_runs"]
    assert f"1 earlier run on these records had released by then: {first.plan.num_steps} steps" in statement
    assert run["ledger_digest"][:16] in statement and "or later steps of the runs that are named above" in statement
    assert "earlier run" not in (tmp_path / "a" / "privacy" / "statement.md").read_text()


def both(tmp_path):
    """A run of epsilon 2 in the folder a, and options of one in b that builds on it."""
    data = records(64)
    trainer(tmp_path / "a", train_dataset=data, target_epsilon=2.0, **BOTH).train()
    return dict(train_dataset=data, target_epsilon=3.0, save_strategy="steps", save_steps=1, **BOTH)


def test_a_run_that_goes_on_keeps_its_earlier_runs(tmp_path):
    options = both(tmp_path)
    first = trainer(tmp_path / "b", earlier_runs=[str(tmp_path / "a")], **options)
    first.train()
    checkpoint = str(sorted((tmp_path / "b").glob("checkpoint-*"))[0])
    again = trainer(tmp_path / "b", **{**options, "target_epsilon": 50.0})
    again.train(resume_from_checkpoint=checkpoint)
    assert again.plan.earlier == first.plan.earlier and again.privacy_spent().epsilon > 3.0
    trainer(tmp_path / "c", **options).train()
    with pytest.raises(DPConfigError, match="names others now"):
        trainer(tmp_path / "b", earlier_runs=[str(tmp_path / "c")], **options)
    with pytest.raises(DPConfigError, match="began with 0 earlier runs"):
        trainer(tmp_path / "c", earlier_runs=[str(tmp_path / "a")], **options)


def test_a_trainer_that_only_publishes_does_not_forget_them(tmp_path):
    options = both(tmp_path)
    trainer(tmp_path / "b", earlier_runs=[str(tmp_path / "a")], **options).train()
    before = (tmp_path / "b" / "privacy" / "statement.md").read_text()
    later = trainer(tmp_path / "b", **options)
    assert 2.9 < later.privacy_spent().epsilon <= 3.0
    later._release.write_report()
    after = (tmp_path / "b" / "privacy" / "statement.md").read_text()
    assert "1 earlier run" in after and before.splitlines()[0] == after.splitlines()[0]


def test_a_trainer_of_another_mechanism_publishes_nothing_here(tmp_path):
    options = both(tmp_path)
    before = (tmp_path / "a" / "privacy" / "report.json").read_bytes()
    other = trainer(tmp_path / "a", **{**options, "target_epsilon": 2.0, "clipping_norm": 0.5})
    with pytest.raises(DPConfigError, match="another private mechanism"):
        other._release.write_report()
    assert (tmp_path / "a" / "privacy" / "report.json").read_bytes() == before


def test_a_run_that_is_going_on_is_refused(tmp_path):
    both(tmp_path)
    with RunLog.open(tmp_path / "a", private_dir(None, tmp_path / "a")):
        with pytest.raises(DPConfigError, match="still going on"):
            read_earlier_runs([str(tmp_path / "a")], str(tmp_path / "b"))
    assert read_earlier_runs([str(tmp_path / "a")], str(tmp_path / "b"))


def test_a_last_line_without_its_newline_is_counted(tmp_path):
    both(tmp_path)
    path = tmp_path / "a" / "privacy" / "ledger.jsonl"
    (whole,) = read_earlier_runs([str(tmp_path / "a")], str(tmp_path / "b"))
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    assert read_earlier_runs([str(tmp_path / "a")], str(tmp_path / "b")) == (whole,)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DPConfigError, match="put back to an earlier state"):  # the keys know the step
        read_earlier_runs([str(tmp_path / "a")], str(tmp_path / "b"))


def test_units_are_compared_and_not_places_for_records():
    options = dict(privacy_unit="user", user_id_column="who", adjacency="add_or_remove_one")

    def of_users(records_per_user, sampling):
        return PrivacyConfig(
            target_epsilon=8.0, target_delta=DELTA, expected_batch_size=100, sampling=sampling,
            records_per_user=records_per_user, **options,
        )  # fmt: skip

    capped = make_plan(of_users(4, "capped_poisson"), num_examples=4000, num_steps=10)
    run = as_earlier(capped)
    assert run.num_units == 1000
    both = make_plan(of_users(2, "capped_poisson"), num_examples=2000, num_steps=10, earlier=[run])
    assert both.epsilon() <= 8.0


def test_balls_in_bins_are_not_composed_with_sampled_batches():
    first = plan(2.0, sampling="balls_in_bins", noise_mechanism="gaussian")
    with pytest.raises(DPConfigError, match="no common analysis"):
        plan(8.0, earlier=[as_earlier(first)], adjacency=first.adjacency)


def test_a_sampler_that_is_not_known_here_is_refused():
    recorded = {**plan(1.0).record.to_json(), "sampler": {"name": "mine"}}
    with pytest.raises(DPConfigError, match="'mine', is not registered"):
        earlier_runs_of(recorded, (1,), "a" * 64, where="runs/a")


def test_a_convex_head_refuses_them(tmp_path):
    args = HeadTrainingArguments(output_dir=str(tmp_path), target_epsilon=1.0, earlier_runs=["a"], use_cpu=True)
    with pytest.raises(DPConfigError, match="not composed with other runs"):
        check_convex_arguments(args)


def test_folders_are_read_once_and_never_the_own_one(tmp_path):
    data = records(64)
    trainer(tmp_path / "a", train_dataset=data, target_epsilon=2.0, **BOTH).train()
    folder = str(tmp_path / "a")
    assert len(read_earlier_runs([folder, folder + "/"], str(tmp_path / "b"))) == 1
    assert read_earlier_runs(folder, str(tmp_path / "b")) == read_earlier_runs([folder], str(tmp_path / "b"))
    with pytest.raises(DPConfigError, match="own output_dir"):
        read_earlier_runs([folder], folder)
    with pytest.raises(DPConfigError, match="no ledger"):
        read_earlier_runs([str(tmp_path / "nowhere")], folder)
