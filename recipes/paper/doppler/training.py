"""One private run from scratch, its learning rate, and the file that keeps what was run.

A run is `private_step` without ledger and with a key made of its seed: the data are public. Runs of one seed share
initial weights, batches and noise, whatever their optimizer and filter, so that they may be compared in pairs.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from hf_dpopt.clipping import make_engine
from hf_dpopt.noise import make_noise_source
from hf_dpopt.optim import OPTIMIZERS
from hf_dpopt.plan.choose import make_plan
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.plan.plan import PrivacyPlan
from hf_dpopt.postprocess import Gradients, IndependentNoise, NoiseLevel, Released
from hf_dpopt.postprocess.adaptive_fir import AdaptiveFIR
from hf_dpopt.postprocess.low_pass import LowPassFilter
from recipes.paper.doppler.task import Classifier, Data, Size, evaluate
from recipes.paper.runs import KeptRuns, climb

TUNING_SEED = 1000
NUM_POINTS = 8  # of a learning curve
PLAIN = "plain"
START_RATES = {"dp_sgd": 0.5, "dp_adamw": 0.008, "dp_adam_bc": 0.001, "dp_galore": 0.008}
OPTIONS: dict[str, dict[str, Any]] = {"dp_galore": {"rank": 8, "refresh_every": 50, "scale": 1.0}}

Observer = Callable[[int, Gradients, Gradients, Gradients], None]  # step; mean before noise, released, filtered


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """All that a result depends on, the data aside.

    Args:
        optimizer: ``dp_sgd``, without momentum, or a key of `OPTIMIZERS`, with its defaults and `OPTIONS`.
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

    Returns:
        Accuracies and losses on both held-out sets, the curve of (step, validation accuracy), the fraction of records
        that were clipped, the last weights of an adaptive filter, processor time. A loss that is not finite is None.
    """
    began = time.process_time()
    plan = run.plan(len(data.train))
    torch.manual_seed(run.seed)
    model = Classifier(run.size)
    engine = make_engine(model, plan.clipper)
    key = np.random.default_rng(run.seed).bytes(32)
    noise = plan.mechanism.stream(make_noise_source("fast", key), plan.sensitivity, first_step=1)
    level = IndependentNoise(noise.draw_stddev / run.batch)
    low_pass = None if run.filter == PLAIN else LowPassFilter.parse(run.filter, level)
    optimizer = make_optimizer(run, engine.parameters.values(), level, low_pass)
    chain = [low_pass] if low_pass is not None and run.optimizer == "dp_sgd" else []
    num_clipped = num_seen = 0
    curve = []
    for step in range(1, run.num_steps + 1):
        rows = torch.tensor(plan.sampler.draw(key, step))
        clipped = engine.empty_sum()
        if len(rows):
            records = data.train[rows].trimmed()

            def losses(records=records) -> torch.Tensor:  # type: ignore[no-untyped-def]
                return nn.functional.cross_entropy(model(records.words_BT), records.labels_B, reduction="none")

            seen = engine.add_clipped_sum(clipped, losses, len(rows))
            num_clipped, num_seen = num_clipped + seen.num_clipped, num_seen + seen.num_records
        sums = {name: total.float() for name, total in clipped.result().items()}
        before = {name: total / run.batch for name, total in sums.items()} if observe else {}
        noise.add_(sums, step)
        released = filtered = Released({name: total.div_(run.batch) for name, total in sums.items()})
        for stage in chain:
            filtered = stage(filtered)
        if observe:
            observe(step, before, released, filtered)
        for name, p in engine.parameters.items():
            p.grad = filtered[name]
        optimizer.step()
        if step * NUM_POINTS // run.num_steps > (step - 1) * NUM_POINTS // run.num_steps:
            curve.append([step, evaluate(model, data.validation)[0]])
    accuracy, loss = evaluate(model, data.test)
    validation_accuracy, validation_loss = evaluate(model, data.validation)
    return {
        "accuracy": accuracy,
        "loss": loss if math.isfinite(loss) else None,
        "validation_accuracy": validation_accuracy,
        "validation_loss": validation_loss if math.isfinite(validation_loss) else None,
        "curve": curve,
        "clipped": num_clipped / max(1, num_seen),
        "noise_multiplier": plan.noise_multiplier,
        "taps": list(low_pass.b) if isinstance(low_pass, AdaptiveFIR) else None,
        "seconds": round(time.process_time() - began, 1),
    }


def make_optimizer(
    run: Run, parameters: Iterable[nn.Parameter], level: NoiseLevel, low_pass: LowPassFilter | AdaptiveFIR | None
) -> torch.optim.Optimizer:
    """The filter sits in the optimizer, except for SGD, whose gradients are filtered before it."""
    if run.optimizer == "dp_sgd":
        return torch.optim.SGD(parameters, lr=run.rate)
    make: Any = OPTIMIZERS[run.optimizer]
    return make(parameters, lr=run.rate, noise=level, filter=low_pass, **OPTIONS.get(run.optimizer, {}))


class Runs(KeptRuns):
    """Runs on one set of data."""

    def __init__(self, path: Path, data: Data):
        super().__init__(path, lambda run: train(run, data), _line)

    def cell(self, run: Run, num_seeds: int, start: float) -> dict[str, Any]:
        """The rate with the best validation accuracy on `TUNING_SEED`, then test accuracies at that rate.

        Args:
            run: its rate and seed are not used.
            start: where the search for the rate begins.
        """

        def score(rate: float) -> float:
            return self.result(dataclasses.replace(run, rate=rate, seed=TUNING_SEED))["validation_accuracy"]

        tried = climb(score, start)
        best = max(tried, key=lambda rate: tried[rate])
        results = [self.result(dataclasses.replace(run, rate=best, seed=seed)) for seed in range(num_seeds)]
        return {
            "optimizer": run.optimizer,
            "filter": run.filter,
            "epsilon": run.epsilon,
            "noise_multiplier": results[0]["noise_multiplier"],
            "rate": best,
            "tried": {f"{rate:g}": accuracy for rate, accuracy in tried.items()},
            "seeds": list(range(num_seeds)),
            "accuracies": [result["accuracy"] for result in results],
            "losses": [result["loss"] for result in results],
            "curves": [result["curve"] for result in results],
            "taps": [result.get("taps") for result in results],
            "clipped": float(np.mean([result["clipped"] for result in results])),
            "seconds_per_run": float(np.mean([result["seconds"] for result in results])),
        }


def _line(run: Run, result: dict[str, Any]) -> str:
    return (
        f"{run.optimizer:10} {run.filter:18} epsilon {run.epsilon} rate {run.rate:<8g} seed {run.seed:<4} "
        f"{100 * result['accuracy']:.1f} % in {result['seconds']:.0f} s"
    )


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean, and its standard error."""
    return float(np.mean(values)), float(np.std(values, ddof=1) / math.sqrt(len(values)))
