"""What "auto" is decided from: the workload of the optimizer, the errors it predicts, and the choice."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from transformers import TrainingArguments

from hf_dpopt import DPConfigError, PrivacyConfig, make_plan
from hf_dpopt.huggingface.inputs import TrainerInputs
from hf_dpopt.huggingface.workload import workload_of
from hf_dpopt.noise import NoiseSource, momentum_workload
from hf_dpopt.plan.choose import all_candidates, compare_mechanisms
from hf_dpopt.plan.compare import predicted_errors
from tests.mechanisms.test_families import VARIANTS, mechanism_of

pytestmark = pytest.mark.slow

N = 24


def config(**changes):
    return PrivacyConfig(**{"target_epsilon": 8.0, "expected_batch_size": 50, "target_delta": 1e-5, **changes})


def compare(workload=None, **changes):
    return compare_mechanisms(config(**changes), num_examples=400, num_steps=N, workload=workload)


def arguments(**changes):
    return TrainingArguments(output_dir="unused", use_cpu=True, report_to="none", **changes)


def test_the_predicted_error_is_what_sgd_with_momentum_makes_of_the_noise():
    """The iterates of torch's SGD on noise alone, over many coordinates, at the plan's noise and clipping norm 1."""
    rates = [(N - t) / N for t in range(N)]
    workload = momentum_workload(N, 0.9, rates)
    for name in ("gaussian", "nu_dpftrl"):
        plan = make_plan(config(noise_mechanism=name), num_examples=400, num_steps=N, workload=workload)
        source = _Seeded(7)
        noise = plan.mechanism.stream(source, plan.clipper.sensitivity(plan.adjacency), first_step=1)
        p = torch.nn.Parameter(torch.zeros(40_000))
        optimizer = torch.optim.SGD([p], lr=1.0, momentum=0.9)
        for step, want in enumerate(predicted_errors(plan, workload), start=1):
            sums = {"p": torch.zeros(40_000)}
            noise.add_(sums, step)
            p.grad, optimizer.param_groups[0]["lr"] = sums["p"], rates[step - 1]
            optimizer.step()
            # sd of an estimated stddev: 1 / sqrt(2 x 40,000) = 0.35 %
            assert p.detach().std().item() == pytest.approx(want, rel=0.02), (name, step)


class _Seeded(NoiseSource):
    name = description = "seeded"

    def __init__(self, seed):
        self._seed = seed

    def normal(self, shape, *, step, tensor, device="cpu"):
        generator = torch.Generator().manual_seed(hash((self._seed, step, tensor)) % 2**31)
        return torch.randn(shape, generator=generator)


def test_rows_keep_the_budget_and_the_first_one_is_taken():
    rows = compare()
    assert {(row.mechanism, row.plan.sampler.name) for row in rows} == set(all_candidates())
    assert all(7.9 < row.plan.epsilon() <= 8.0 for row in rows)
    assert rows[0].rmse <= 1.02 * min(row.rmse for row in rows)
    plan = make_plan(config(noise_mechanism="auto"), num_examples=400, num_steps=N)
    compared = dataclasses.replace(plan.config, amplification_samples=0)  # rows are compared by computed bounds
    assert compared == rows[0].plan.config and plan.strategy == rows[0].plan.strategy


def test_an_adaptive_optimizer_counts_the_noise_of_single_steps():
    rows = compare(dataclasses.replace(momentum_workload(N, 0.0), adaptive=True))
    for row in rows:
        noise = row.plan.strategy.stream(_Seeded(1), scale=row.plan.draw_stddev, num_steps=N) if (
            row.mechanism != "gaussian"
        ) else None  # fmt: skip
        if noise is not None:
            for step in range(N):
                sums = {"w": torch.zeros(20_000)}
                noise.add_(sums, step)
            assert sums["w"].std().item() == pytest.approx(row.step_stddev, rel=0.03), row.mechanism
        assert row.score == pytest.approx((row.rmse * row.step_stddev) ** 0.5)


def test_what_was_asked_for_narrows_the_comparison():
    assert {row.plan.sampler.name for row in compare(sampling="fixed_order")} == {"fixed_order"}
    assert all(row.plan.adjacency == "replace_one" for row in compare(adjacency="replace_one"))
    with pytest.raises(DPConfigError, match="No mechanism fits.*"):
        compare(sampling="fixed_order", adjacency="add_or_remove_one")
    with pytest.raises(DPConfigError, match="chooses the options, too"):
        compare(noise_kwargs={"nu": 0.1})


@pytest.mark.parametrize("name", sorted(VARIANTS))
def test_the_stated_memory_is_what_a_stream_keeps(name):
    mechanism = mechanism_of(name)
    if mechanism.strategy.name == "identity":
        return
    stream, kept = mechanism.stream(_Seeded(1), 1.0), []
    for step in range(mechanism.num_steps):
        stream.add_({"w": torch.zeros(1000)}, step)
        kept.append(stream.bytes_kept() / 4000)
    cost = mechanism.strategy.cost(mechanism.num_steps, backend=mechanism.backend)
    # a tree's stack grows and shrinks
    assert kept[-1] <= cost.kept + 2 and np.mean(kept) <= cost.kept + 1 and cost.kept <= max(kept) + 2


def test_the_workload_is_that_of_optimizer_and_schedule():
    def workload(num_steps: int = 3, given: dict | None = None, **options):
        return workload_of(TrainerInputs(args=arguments(**options), **(given or {})), num_steps)

    linear = workload(6, lr_scheduler_type="linear", warmup_steps=2)
    assert linear.adaptive and linear.coefs == (1.0,) * 6
    assert linear.step_sizes == pytest.approx((0.0, 0.5, 1.0, 0.75, 0.5, 0.25))
    assert workload(6, lr_scheduler_type="constant").step_sizes is None
    assert not workload(6, optim="sgd").adaptive
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.5)
    given = workload(given={"optimizers": (sgd, None)}, lr_scheduler_type="constant")
    assert given.coefs == (1.0, 1.5, 1.75) and not given.adaptive
    assert workload(lr_scheduler_type="constant", optim="sgd", optim_args="momentum=0.5") == given
    by_class = {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.5})}
    assert workload(given=by_class, lr_scheduler_type="constant") == given
    adam = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    assert workload(given={"optimizers": (adam, None)}).adaptive
    assert workload(lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="steps").step_sizes is None
