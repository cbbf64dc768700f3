"""Noisy numbers of whole runs: the law of their noise, once a step, what the log shows, and runs that go on."""

from __future__ import annotations

import json
import math
from unittest import mock

import pytest
import scipy.stats
import torch

from hf_dpopt import DPConfigError, PrivateRun
from hf_dpopt.clipping.measures import MEASURES
from hf_dpopt.noise.streams import NoiseStream
from hf_dpopt.run.metrics import MetricsAtWork
from hf_dpopt.verify import verify
from tests.helpers import tiny
from tests.preclip.loop import CLIP_SGD, EXPECTED, Loop
from tests.preclip.loop import plan as loop_plan
from tests.run import preempted

ALPHA = 1e-6  # false-alarm probability of each random test
NUMBERS = {"log_private_metrics": 0.3, "private_metrics_kwargs": {"loss_bound": 3.0, "norm_thresholds": [0.5, 1, 2]}}
NAMES = {"private_loss", "private_clip_fraction", "private_norm_p50", "private_norm_p90"}


class Watched(Loop):
    """A loop that keeps what is released, and the sums it was made of."""

    def __init__(self, folder, plan, **options):
        super().__init__(folder, plan, **options)
        self.released: list[dict[str, torch.Tensor]] = []
        release = self.run.release

        def kept(sums, step, **more):
            self.released.append({name: value.clone() for name, value in release(sums, step, **more).items()})
            return self.released[-1]

        self.run.release = kept


def _noise_of_numbers(folder, num_steps=40, **config):
    """Noise of the numbers in a run, in planned stddevs, (steps, K)."""
    plan = loop_plan(num_steps, **{**NUMBERS, "sampling": "poisson", "adjacency": "add_or_remove_one", **config})
    loop = Watched(folder, plan)
    for step in range(1, num_steps + 1):
        loop.step(step)
    stddev = plan.noise_multiplier * plan.sensitivity
    noise = [
        r[MEASURES].double() * EXPECTED - s[MEASURES].double() for r, s in zip(loop.released, loop.sums, strict=True)
    ]
    return torch.stack(noise) / stddev


def _is_standard_normal(noise: torch.Tensor) -> None:
    total, count = float(noise.square().sum()), noise.numel()
    low, high = (scipy.stats.chi2.ppf(p, count) for p in (ALPHA / 2, 1 - ALPHA / 2))
    assert low < total < high, f"mean square {total / count:.3f} of {count} numbers"
    distinct = set(map(tuple, noise.tolist()))  # single float32 values may be equal by chance
    assert len(distinct) == len(noise), "noise that was used twice"


def test_numbers_have_the_noise_that_was_planned(tmp_path):
    _is_standard_normal(_noise_of_numbers(tmp_path))


def test_correlated_noise_of_numbers_is_that_of_the_mechanism(tmp_path):
    """Later steps take back what earlier ones added, in the numbers as in the gradient: C times the noise is white."""
    noise = _noise_of_numbers(tmp_path, num_steps=12, noise_mechanism="nu_dpftrl", sampling="fixed_order",
                              adjacency="zero_out", expected_batch_size=EXPECTED)  # fmt: skip
    made = loop_plan(12, **NUMBERS, noise_mechanism="nu_dpftrl", sampling="fixed_order", adjacency="zero_out")
    white = torch.tensor(made.strategy.strategy_matrix(12)) @ noise / made.mechanism.sensitivity()
    _is_standard_normal(white)


def test_a_step_is_counted_once_with_two_queries_and_never_without_a_start(tmp_path):
    options = {"delay": 1, "variant": "extra_query", "clipping_norm": 5.0}
    loop = Watched(tmp_path, loop_plan(3, preconditioner="dp2_rmsprop", preconditioner_kwargs=options, **NUMBERS))
    for step in (1, 2, 3):
        loop.step(step)
    weight = loop.run.metrics.measures().norm_weight
    for sums, drawn in zip(loop.sums, loop.batches, strict=True):
        assert [name for name in sums if MEASURES in name] == [MEASURES]
        assert sums[MEASURES][1:].sum().item() / weight == pytest.approx(len(drawn), rel=1e-5)


def test_numbers_that_move_further_than_was_paid_for_are_refused_before_the_charge(tmp_path):
    loop = Loop(tmp_path, loop_plan(3, **NUMBERS))
    at_work = loop.run.metrics
    loop.run.metrics = MetricsAtWork(
        at_work._spec, total=1.01 * at_work._total, clipping_norm=CLIP_SGD, has_one_norm=True
    )
    with pytest.raises(DPConfigError, match="One unit moves the sums of a step by up to"):
        loop.step(1)
    assert loop.run.charged == [0]
    plain = Loop(tmp_path / "plain", loop_plan(3))
    plain.run.metrics = at_work  # of a run that paid for them
    with pytest.raises(DPConfigError, match="One unit moves the sums of a step by up to"):
        plain.step(1)


def test_without_noise_the_log_has_the_exact_numbers(tmp_path):
    """The means are over the steps since the last line, and over units: expected and realised batch are the same."""
    exact = tiny.trainer(tmp_path / "run", private_state_dir=str(tmp_path / "keys"), noise_multiplier=0.0, max_steps=4,
                         sampling="fixed_order", logging_steps=2, log_private_metrics=0.02, learning_rate=0.0,
                         model=tiny.model(dropout=0.0), private_metrics_kwargs={"loss_bound": 50.0})  # fmt: skip
    exact.train()
    lines = [line for line in exact.state.log_history if "private_loss" in line]
    assert len(lines) == 2 and all(NAMES <= line.keys() for line in lines)
    batch = tiny.collate(tiny.records())
    losses = torch.nn.functional.cross_entropy(
        exact.model.eval()(**{k: v for k, v in batch.items() if k != "labels"}).logits,
        batch["labels"],
        reduction="none",
    )
    # four batches of 16 are the whole set: the mean of the two lines is the mean of all
    assert sum(line["private_loss"] for line in lines) / 2 == pytest.approx(losses.mean().item(), rel=1e-4)


def test_a_run_says_what_it_costs_where_it_is_asked_and_nothing_exact_leaves_it(tmp_path):
    trainer = tiny.trainer(tmp_path / "run", private_state_dir=str(tmp_path / "keys"), max_steps=4, logging_steps=2,
                           log_private_metrics=0.02, preconditioner="quantile",
                           preconditioner_kwargs={"count_noise": 0.5}, noise_multiplier=0.5)  # fmt: skip
    trainer.train()
    trainer.save_model()
    lines = [line for line in trainer.state.log_history if "learning_rate" in line]
    assert all("private_loss" in line and "loss" not in line for line in lines)
    plan = json.loads((tmp_path / "run/privacy/report.json").read_text())["plan"]
    assert plan["private_metrics"]["share"] == 0.02 and plan["private_metrics"]["loss_bound"] == round(
        5 * math.log(2), 3
    )
    ledger = (tmp_path / "run/privacy/ledger.jsonl").read_text()
    assert '"private_metrics"' in ledger
    statement = (tmp_path / "run/privacy/statement.md").read_text()
    assert "They take 0.02 of each step's budget" in statement and "about 1.02% larger" in statement
    checks = {check.name: check for check in verify(tmp_path / "run").checks}
    assert (
        checks["private metrics"].status == "ok" and "2.000% of each step's budget" in checks["private metrics"].detail
    )
    changed = tiny.trainer(tmp_path / "run", private_state_dir=str(tmp_path / "keys"), max_steps=6,
                           log_private_metrics=0.03, preconditioner="quantile", noise_multiplier=0.5,
                           preconditioner_kwargs={"count_noise": 0.5})  # fmt: skip
    with pytest.raises(DPConfigError, match="private_metrics"):
        changed.train()


def test_a_loss_without_a_usual_bound_needs_a_declared_one(tmp_path):
    with pytest.raises(DPConfigError, match="this loss has no usual one. Declare it"):
        tiny.trainer(tmp_path / "run", log_private_metrics=0.02, per_example_loss_func=lambda outputs, labels: outputs)


def _lines(trainer):
    return [
        {name: value for name, value in line.items() if name.startswith("private_")} | {"step": line["step"]}
        for line in trainer.state.log_history
        if "learning_rate" in line
    ]


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("point", ["after the noise", "after the optimizer"])
def test_a_killed_run_goes_on_to_the_same_lines(tmp_path, point):
    """The released numbers are taken from the journal: the same values, and no noise that was seen with others."""
    options = {"log_private_metrics": 0.3, "logging_steps": 2}
    alive, left, whole = (tmp_path / name for name in ("alive", "left", "whole"))
    preempted.kill(alive, left, "gaussian", point, 5, **options)
    trainer = preempted.resume(left, "gaussian", **options)
    lost = frozenset() if point == "after the optimizer" else frozenset({5})
    undisturbed = preempted.undisturbed(whole, "gaussian", lost, **options)
    assert trainer.privacy_spent().epsilon == undisturbed.privacy_spent().epsilon
    assert _lines(trainer) == _lines(undisturbed) and len(_lines(trainer)) >= 2


def test_a_resumed_run_has_the_window_of_its_checkpoint(tmp_path):
    """Saved in the middle of a line: what was released before the checkpoint is in it."""
    options = {"log_private_metrics": 0.3, "logging_steps": 4, "save_steps": 2, "model": tiny.model(dropout=0.0)}
    folder = dict(private_state_dir=str(tmp_path / "keys"), save_strategy="steps")
    seen = []
    receive = MetricsAtWork.receive

    def watched(self, released):
        seen.append((released[MEASURES].clone(), self.measures()))
        return receive(self, released)

    with mock.patch.object(MetricsAtWork, "receive", watched):
        tiny.trainer(tmp_path / "run", max_steps=2, **folder, **options).train()
        trainer = tiny.trainer(tmp_path / "run", max_steps=4, **folder, **options)
        trainer.train(resume_from_checkpoint=True)
    losses = [m.centre + float(values[0]) / m.loss_weight * m.farthest for values, m in seen]
    assert len(losses) == 4
    (line,) = _lines(trainer)[-1:]
    expected = min(max(sum(losses) / 4, 0.0), trainer.plan.private_metrics.loss_bound)
    assert line["private_loss"] == pytest.approx(expected, rel=1e-5)


def test_nothing_is_released_of_a_run_without_numbers(tmp_path):
    loop = Watched(tmp_path, loop_plan(2))
    loop.step(1)
    assert MEASURES not in loop.released[0] and loop.run.metrics.read() == {} and isinstance(loop.run, PrivateRun)
    assert isinstance(loop.run.noise, NoiseStream)
