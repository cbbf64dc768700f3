"""One private run of a task, and the choice of its learning rate.

A run is `private_step` without ledger and with keys made of its seed: the data are public. Runs of one seed share
initial weights and batches; noise is fresh in each.

Shape legend: B = records, D = width of the features.
"""

from __future__ import annotations

import dataclasses
import functools
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from hf_dpopt.clipping import make_engine
from hf_dpopt.common.types import ClippedSums, Released
from hf_dpopt.noise import make_noise_source
from hf_dpopt.noise.level import MechanismLevel
from hf_dpopt.optim import OPTIMIZERS
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.plan.make import make_plan
from hf_dpopt.plan.plan import PrivacyPlan
from hf_dpopt.postprocess.spectral import SpectralDenoising
from recipes.paper.matrix_optimizers.task import CLASSES
from recipes.paper.runs import KeptRuns, climb
from recipes.paper.top_layer.task import Task
from recipes.paper.top_layer.training import TopLayer, accuracy, add

DELTA, MOMENTUM = 1e-5, 0.9
TUNING_SEED = 1000

METHODS: dict[str, dict[str, Any]] = {
    "DP-AdamW": {},
    "DP-Muon": {"optimizer": "dp_muon", "options": {"momentum": MOMENTUM}},
    "DP-MuonBC": {"optimizer": "dp_muon", "options": {"momentum": MOMENTUM, "bias_correction": True}},
    "denoised, then DP-AdamW": {"chain": 0.0},
    "DP-AdamW, first moment denoised": {"inside": MOMENTUM},
}

Observer = Callable[[int, ClippedSums, Released, float], None]  # step; mean before the noise, released, its variance


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """All that a result depends on, the data aside.

    Args:
        task: one of `TASKS`.
        method: key of `METHODS`.
        seed: `TUNING_SEED` for runs that choose, which are scored on other records.
    """

    task: str
    method: str
    epsilon: float
    rate: float
    seed: int
    clip: float = 0.1
    num_steps: int
    batch: int

    def schedule(self) -> list[float]:
        """Learning rates relative to the first: down to a twentieth."""
        return np.linspace(1.0, 0.05, self.num_steps).tolist()


@functools.cache
def _plan(epsilon: float, clip: float, batch: int, num_steps: int, num_examples: int) -> PrivacyPlan:
    config = PrivacyConfig(
        target_epsilon=epsilon, target_delta=DELTA, expected_batch_size=batch, clipping_norm=clip, sampling="poisson"
    )
    return make_plan(config, num_examples=num_examples, num_steps=num_steps)


class Hidden(nn.Module):
    """A hidden layer beside the features, and a linear head on the sum: (B, 1, D) to logits (B, classes)."""

    def __init__(self, width: int, num_classes: int, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.hidden, self.head = nn.Linear(width, width), nn.Linear(width, num_classes)
        nn.init.normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def forward(self, states_BTD: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
        features_BD = states_BTD.squeeze(1)
        return self.head(features_BD + nn.functional.gelu(self.hidden(features_BD)))


def make_model(task: Task, run: Run) -> nn.Module:
    """The model of a task with the initial weights of a seed."""
    if run.task in ("topics", "phrases"):
        return Hidden(task.train.states_LD.size(1), CLASSES[run.task], run.seed)
    return TopLayer(task.layer, run.seed, adapters=run.task == "lora")


def train(tasks: dict[str, Task], run: Run, observe: Observer | None = None) -> dict[str, Any]:
    """Accuracy of the last weights, on the records that choose for the tuning seed, else on those reported."""
    began, task = time.process_time(), tasks[run.task]
    plan = _plan(run.epsilon, run.clip, run.batch, run.num_steps, len(task.train))
    model = make_model(task, run)
    engine = make_engine(model, plan.clipper)
    fresh = np.random.default_rng([run.seed, zlib.crc32(repr(run).encode())])
    sampling_key = np.random.default_rng(run.seed).bytes(32)
    noise = plan.mechanism.stream(make_noise_source("fast", fresh.bytes(32)), plan.sensitivity, first_step=1)
    done = 0
    level = MechanismLevel(
        plan.mechanism, stddev=noise.draw_stddev / run.batch, num_steps=run.num_steps, steps_done=lambda: done
    )
    given = METHODS[run.method]
    chain = SpectralDenoising(level, average=given["chain"]) if "chain" in given else None
    inside = SpectralDenoising(level, average=given["inside"]) if "inside" in given else None
    make: Any = OPTIMIZERS[given.get("optimizer", "dp_adamw")]
    optimizer = make(engine.parameters.values(), lr=run.rate, noise=level, filter=inside, **given.get("options", {}))
    for step, size in enumerate(run.schedule(), start=1):
        query = engine.empty_sum(None)
        rows = torch.tensor(plan.sampler.draw(sampling_key, step))
        if len(rows):
            with torch.autocast("cpu", torch.bfloat16):
                add(engine, query, task.train, rows)
        sums = ClippedSums({name: value.float() for name, value in query.result().items()})
        before = ClippedSums({name: value / run.batch for name, value in sums.items()} if observe else {})
        noise.add_(sums, step)
        done = step
        released = Released({name: value.div_(run.batch) for name, value in sums.items()})
        if observe:
            observe(step, before, released, level.variance())
        if chain is not None:
            released = chain(released)
        for name, p in engine.parameters.items():
            p.grad = released[name]
        optimizer.param_groups[0]["lr"] = run.rate * size
        optimizer.step()
    with torch.autocast("cpu", torch.bfloat16):
        score = accuracy(model, task.tuning if run.seed == TUNING_SEED else task.test)
    return {"accuracy": score, "noise": plan.draw_stddev, "seconds": round(time.process_time() - began, 1)}


def tune(runs: KeptRuns, run: Run, start: float) -> dict[float, float]:
    """Accuracy on the records that choose, by learning rate: a climb by factors of 2 up to worse neighbours."""
    return climb(lambda rate: runs.result(dataclasses.replace(run, rate=rate, seed=TUNING_SEED))["accuracy"], start)


def reported(runs: KeptRuns, run: Run, seeds: Sequence[int]) -> list[float]:
    """Accuracies of seeds that share batches and initial weights with the same seeds of other methods, in %."""
    return [100 * runs.result(dataclasses.replace(run, seed=seed))["accuracy"] for seed in seeds]


def kept_runs(path: Path, tasks: dict[str, Task]) -> KeptRuns:
    """Runs of the tasks in a JSONL file."""
    return KeptRuns(path, lambda run: train(tasks, run), _line)


def _line(run: Run, result: dict[str, Any]) -> str:
    return (
        f"{run.task} eps {run.epsilon:g} {run.method} rate {run.rate:.3g} seed {run.seed}: "
        f"{100 * result['accuracy']:.1f} in {result['seconds']:.0f} s"
    )
