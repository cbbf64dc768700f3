"""One private run from scratch, its learning rate, and the file that keeps what was run.

A run is `private_step` without ledger and with a key made of its seed: the data are public. Runs of one seed share
initial weights, batches and noise, whatever their optimizer and filter, so that they may be compared in pairs.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hf_dpopt.clipping import make_engine
from hf_dpopt.optim import OPTIMIZERS
from hf_dpopt.plan.choose import make_plan
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.plan.plan import PrivacyPlan
from hf_dpopt.postprocess import IndependentNoise, NoiseLevel
from hf_dpopt.postprocess.low_pass import LowPassFilter
from recipes.paper.doppler.task import Classifier, Data, Size, evaluate, read_data
from recipes.paper.runs import Folder, KeptRuns, best_of, is_point, labelled, mean_and_error, percent
from recipes.paper.steps import EngineSums, Part, PrivateSteps, descend

TUNING_SEED = 1000
PLAIN = "plain"
START_RATES = {"dp_sgd": 0.5, "dp_adamw": 0.008, "dp_adam_bc": 0.001, "dp_galore": 0.008}
OF_OPTIMIZER: dict[str, dict[str, Any]] = {"dp_galore": {"rank": 8, "refresh_every": 50, "scale": 1.0}}

Observer = Callable[..., None]  # step; mean before noise, released, filtered


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """All that a result depends on, the data aside.

    Args:
        optimizer: ``dp_sgd``, without momentum, or a key of `OPTIMIZERS`, with its defaults and `OF_OPTIMIZER`.
        filter: ``plain``, or what `LowPassFilter.parse` reads. In Adam it takes the place of the first moment, which
            is the filter ``momentum``.
        epsilon: None for no noise at all.
        clipping_norm: at 1, at least half of the records are clipped in every run; then the clip and the learning rate
            of SGD scale each other, and Adam is free of scale.
    """

    optimizer: str
    filter: str
    epsilon: float | None
    rate: float
    seed: int
    num_steps: int = 200
    batch: int = 256
    clipping_norm: float = 1.0
    delta: float = 1e-5
    size: Size = Size()

    def plan(self, num_examples: int) -> PrivacyPlan:
        config = PrivacyConfig(
            target_epsilon=self.epsilon,
            noise_multiplier=None if self.epsilon else 0.0,
            target_delta=self.delta,
            expected_batch_size=self.batch,
            clipping_norm=self.clipping_norm,
        )
        return make_plan(config, num_examples=num_examples, num_steps=self.num_steps)


def train(run: Run, data: Data, observe: Observer | None = None) -> dict[str, Any]:
    """Trains once.

    Args:
        run: what.
        data: on what.
        observe: is shown every step.

    Returns:
        Accuracies and losses on both held-out sets, the curve of (step, validation accuracy), the fraction of records
        that were clipped, processor time. A loss that is not finite is None.
    """
    began = time.process_time()
    plan = run.plan(len(data.train))
    torch.manual_seed(run.seed)
    model = Classifier(run.size)
    engine = make_engine(model, plan.clipper)
    key = np.random.default_rng(run.seed).bytes(32)

    def parts(rows: torch.Tensor) -> list[Part]:
        records = data.train[rows].trimmed()
        return [(lambda: cross_entropy(model(records.inputs), records.labels_B, reduction="none"), len(rows))]

    sums = EngineSums(engine, parts)
    steps = PrivateSteps(plan, sums, keys=(key, key))
    level = IndependentNoise(steps.stddev)
    low_pass = None if run.filter == PLAIN else LowPassFilter.parse(run.filter, level)
    optimizer = make_optimizer(run, engine.parameters.values(), level, low_pass)
    curve = []
    chain = [low_pass] if low_pass is not None and run.optimizer == "dp_sgd" else []
    for step in descend(steps, engine, optimizer, run.num_steps, chain):
        if observe:
            observe(step, steps.before, steps.released, {name: p.grad for name, p in engine.parameters.items()})
        if is_point(step, run.num_steps):
            curve.append([step, evaluate(model, data.validation)[0]])
    accuracy, loss = evaluate(model, data.test)
    validation_accuracy, validation_loss = evaluate(model, data.validation)
    return {
        "accuracy": accuracy,
        "loss": loss if math.isfinite(loss) else None,
        "validation_accuracy": validation_accuracy,
        "validation_loss": validation_loss if math.isfinite(validation_loss) else None,
        "curve": curve,
        "clipped": sums.seen.num_clipped / max(1, sums.seen.num_records),
        "noise_multiplier": plan.noise_multiplier,
        "seconds": round(time.process_time() - began, 1),
    }


def make_optimizer(
    run: Run, parameters: Iterable[nn.Parameter], level: NoiseLevel, low_pass: Any
) -> torch.optim.Optimizer:
    """The filter sits in the optimizer, except for SGD, whose gradients are filtered before it."""
    if run.optimizer == "dp_sgd":
        return torch.optim.SGD(parameters, lr=run.rate)
    make: Any = OPTIMIZERS[run.optimizer]
    return make(parameters, lr=run.rate, noise=level, filter=low_pass, **OF_OPTIMIZER.get(run.optimizer, {}))


class Runs(KeptRuns):
    """Runs of a command, on a model and records of `size`."""

    def __init__(self, given: argparse.Namespace, size: Size):
        data = read_data(given.data, size)
        super().__init__(given.output_dir / "doppler_runs.jsonl", lambda run: train(run, data))
        self._fixed, self._num_seeds = {"num_steps": given.num_steps, "size": size}, given.num_seeds

    def cell(self, optimizer: str, low_pass: str, epsilon: float | None) -> dict[str, Any]:
        """The rate with the best validation accuracy on `TUNING_SEED`, then test accuracies at that rate."""
        run = Run(optimizer=optimizer, filter=low_pass, epsilon=epsilon, rate=0.0, seed=0, **self._fixed)
        tried = self.rates(run, START_RATES[optimizer], (TUNING_SEED,), "validation_accuracy")
        rate, seeds = best_of(tried), range(self._num_seeds)
        results = self.of_seeds(dataclasses.replace(run, rate=rate), seeds)
        return {
            "optimizer": optimizer, "filter": low_pass, "epsilon": epsilon,
            "noise_multiplier": results[0]["noise_multiplier"], "rate": rate, "tried": labelled(tried),
            "seeds": list(seeds), "accuracies": [result["accuracy"] for result in results],
            "losses": [result["loss"] for result in results], "curves": [result["curve"] for result in results],
            "clipped": float(np.mean([result["clipped"] for result in results])),
            "seconds_per_run": float(np.mean([result["seconds"] for result in results])),
        }  # fmt: skip


def gains(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Points of all cells with a filter over those without, seed by seed: means and standard errors."""
    by_key = {(c["optimizer"], c["filter"], c["epsilon"]): c for c in cells}
    found = []
    for (optimizer, low_pass, epsilon), cell in by_key.items():
        plain = by_key.get((optimizer, PLAIN, epsilon))
        if low_pass != PLAIN and plain is not None:
            mean, error = mean_and_error(percent(cell["accuracies"]) - percent(plain["accuracies"]))
            found.append(
                {"optimizer": optimizer, "filter": low_pass, "epsilon": epsilon, "gain": mean, "error": error}
            )
    return found


# options of every command, and the names of their plots
OPTIONS: dict[str, Any] = {"data": Folder("folder with train.tsv and test.tsv of AG News"), "num_steps": 200}
COLORS = {"dp_sgd": "C0", "dp_adam_bc": "C1", "dp_adamw": "C2", "dp_galore": "C4"}
NAMES = {"dp_sgd": "DPSGD", "dp_adam_bc": "DP-AdamBC", "dp_adamw": "DP-AdamW", "dp_galore": "DP-GaLore"}
