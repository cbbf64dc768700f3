"""The private loop of all experiments: `hf_dpopt.run.step` without its ledger, with keys made of a seed.

The data are public, so nothing has to be kept. B = records of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from hf_dpopt.clipping import ClippingEngine, UnprivatizedStatistics
from hf_dpopt.clipping.scaling import Scale
from hf_dpopt.common.types import ClippedSums, Released
from hf_dpopt.noise.mechanism import MechanismLevel
from hf_dpopt.plan.plan import PrivacyPlan
from hf_dpopt.postprocess import Postprocess
from hf_dpopt.preclip import Identity, queries
from hf_dpopt.randomness.chacha import ChaCha20Gaussian
from hf_dpopt.run.step import write_gradients

Scales = Sequence[Scale | None]


def seeded_keys(seed: int) -> tuple[bytes, bytes]:
    """Of the sampling and of the noise."""
    rng = np.random.default_rng(seed)
    return rng.bytes(32), rng.bytes(32)


def query_noise(epsilon: float) -> float:
    """Noise multiplier of a query before the first step: the smaller the budget, the more noise."""
    return 5.0 if epsilon > 4 else 10.0


def falling(num_steps: int) -> list[float]:
    """Learning rates relative to the first: down to a twentieth."""
    return np.linspace(1.0, 0.05, num_steps).tolist()


class PrivateSteps:
    """Releases of one run, step after step.

    Args:
        plan: what runs.
        clipped_sums: sums over the rows of a logical batch, at the scale of every query; float32, and secret.
        keys: of the sampling and of the noise; 32 bytes each.
        start: makes the preconditioner of the run from the level of its noise; None for none.
        sensitivity: of the sums; None for the plan's.

    Attributes:
        before: mean of the latest step before its noise; secret, unless the data are public.
        released: what the latest step released.
        steps_done: steps so far.
        stddev: of the noise in a coordinate of the mean.
    """

    def __init__(
        self,
        plan: PrivacyPlan,
        clipped_sums: Callable[[np.ndarray, Scales], ClippedSums],
        *,
        keys: tuple[bytes, bytes],
        start: Callable[[MechanismLevel], Any] | None = None,
        sensitivity: float | None = None,
    ):
        self._plan, self._clipped_sums, (self._sampling_key, noise_key) = plan, clipped_sums, keys
        sensitivity = plan.sensitivity if sensitivity is None else sensitivity
        self._noise = plan.mechanism.stream(ChaCha20Gaussian(noise_key), sensitivity, first_step=1)
        self._batch, self.steps_done = plan.config.expected_batch_size, 0
        self.before, self.released = ClippedSums({}), Released({})
        self.stddev = self._noise.draw_stddev / self._batch
        self.level = MechanismLevel(
            plan.mechanism, stddev=self.stddev, num_steps=plan.num_steps, steps_done=lambda: self.steps_done
        )
        self.preconditioner = Identity().start() if start is None else start(self.level)

    def __call__(self) -> Released:
        """What the optimizer is given by the next step."""
        step = self.steps_done + 1
        sums = self._clipped_sums(self._plan.sampler.draw(self._sampling_key, step), self.preconditioner.scales())
        self.before = ClippedSums({name: total / self._batch for name, total in sums.items()})
        self._noise.add_(sums, step)
        self.steps_done = step
        mean = Released({name: total.div_(self._batch) for name, total in sums.items()})
        self.released = self.preconditioner.receive(mean)
        return self.released


Part = tuple[Callable[[], torch.Tensor], int]  # makes the losses of some records, (B,); and how many they are


class EngineSums:
    """Clipped sums of a model over rows.

    Args:
        engine: clips.
        parts: the physical batches of some rows.

    Attributes:
        seen: what the engine saw so far; secret, unless the data are public.
    """

    def __init__(self, engine: ClippingEngine, parts: Callable[[torch.Tensor], Iterable[Part]]):
        self._engine, self._parts, self.seen = engine, parts, UnprivatizedStatistics()

    def __call__(self, rows: np.ndarray, scales: Scales) -> ClippedSums:
        sums = [self._engine.empty_sum(scale) for scale in scales]
        for losses, num in self._parts(torch.tensor(rows)) if len(rows) else ():
            for query in sums:
                self.seen += self._engine.add_clipped_sum(query, losses, num)
        return queries.join([query.result() for query in sums])


def descend(
    steps: PrivateSteps,
    engine: ClippingEngine,
    optimizer: torch.optim.Optimizer,
    num_steps: int,
    chain: Sequence[Postprocess] = (),
) -> Iterator[int]:
    """Take steps of a model, with maps of the released gradient; yields the number of each when it is done."""
    for step in range(1, num_steps + 1):
        released = steps()
        for stage in chain:
            released = stage(released)
        write_gradients(engine.parameters, released)
        optimizer.step()
        yield step
