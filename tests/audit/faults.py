"""Faults that are planted into the running code, and who has to find each: a test of the audit, or a named test.

All leave the program running and its claim as it was. What `hf_dpopt.audit` looks at is what comes out of the weights.
`tests.audit.guard` plants all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hf_dpopt.clipping import thresholds
from hf_dpopt.common import collectives
from hf_dpopt.huggingface import loader
from hf_dpopt.noise.streams.base import CorrelatedStream
from hf_dpopt.randomness import chacha
from hf_dpopt.randomness.chacha import ChaCha20Gaussian
from hf_dpopt.run import run as runs
from hf_dpopt.run import step as steps
from hf_dpopt.run.batches import StepIndices
from hf_dpopt.sampling.poisson import PoissonSampler
from hf_dpopt.users.batches import UserBatch

Patch = pytest.MonkeyPatch
NU = {"noise_mechanism": "nu_dpftrl"}
USERS = {"privacy_unit": "user"}
CLOSE = {"noise_multiplier": 0.002}  # so little noise that what a record adds is seen to a thousandth of a clip


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault, and what finds it.

    Attributes:
        what: name of the fault.
        plant: puts it into the running code.
        seen_by: beginning of the name of the finding that sees it; or a named test (`tests/..`) that turns red.
        settings: what is audited.
        num_ranks: processes; the fault is found if the audit of one of them fails.
    """

    what: str
    plant: Callable[[Patch], None]
    seen_by: str
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    num_ranks: int = 1

    @property
    def is_named(self) -> bool:
        """Whether a test of the suite finds it, and not the audit."""
        return self.seen_by.startswith("tests/")


def _noise(change: Callable[[list[Any], float, bytes], tuple[list[Any], float, bytes]]) -> Callable[[Patch], None]:
    """Change what is drawn: parts, stddev, key."""

    def plant(patch: Patch) -> None:
        add = chacha.add_on_host

        def changed(key: bytes, parts: Any, stddev: float, drawn: Any = None) -> None:
            parts, stddev, key = change(list(parts), stddev, key)
            add(key, parts, stddev, None)

        patch.setattr(chacha, "add_on_host", changed)

    return plant


def _values(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Patch], None]:
    """Change the standard normals themselves."""

    def plant(patch: Patch) -> None:
        add = chacha.add_on_host

        def changed(key: bytes, parts: Any, stddev: float, drawn: Any = None) -> None:
            for part in parts:
                values = torch.zeros_like(part.total)
                add(key, [part._replace(total=values)], 1.0, None)
                part.total.add_(change(values), alpha=stddev)

        patch.setattr(chacha, "add_on_host", changed)

    return plant


def _without_a_tensor(patch: Patch) -> None:
    add_to = ChaCha20Gaussian.add_to

    def changed(self: Any, totals: Any, *, stddev: float, step: int) -> None:
        add_to(self, {tensor: total for tensor, total in totals.items() if tensor != 0}, stddev=stddev, step=step)

    patch.setattr(ChaCha20Gaussian, "add_to", changed)


def _one_stream_for_all(patch: Patch) -> None:
    add_to = ChaCha20Gaussian.add_to

    def changed(self: Any, totals: Any, *, stddev: float, step: int) -> None:
        for total in totals.values():
            add_to(self, {0: total}, stddev=stddev, step=step)

    patch.setattr(ChaCha20Gaussian, "add_to", changed)


def _same_in_every_step(patch: Patch) -> None:
    key = ChaCha20Gaussian.step_key
    patch.setattr(ChaCha20Gaussian, "step_key", lambda self, step: key(self, 1))


def _same_in_two_steps(patch: Patch) -> None:
    key = ChaCha20Gaussian.step_key
    patch.setattr(ChaCha20Gaussian, "step_key", lambda self, step: key(self, 5 if step == 17 else step))


def _factors(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        factor = thresholds._Clipping._factor
        patch.setattr(thresholds._Clipping, "_factor", lambda self, norms, bound: change(factor(self, norms, bound)))

    return plant


def _clipped_per_batch(patch: Patch) -> None:
    """The sum of a physical batch is clipped, whose records have orthogonal gradients here, and no record is."""
    factor = thresholds._Clipping._factor

    def changed(self: Any, norms: torch.Tensor, bound: float) -> torch.Tensor:
        return factor(self, norms.square().sum().sqrt().expand_as(norms), bound)

    patch.setattr(thresholds._Clipping, "_factor", changed)


def _clipped_in_bf16(patch: Patch) -> None:
    """Norms and factors have eight bits."""
    factor = thresholds._Clipping._factor
    patch.setattr(
        thresholds._Clipping, "_factor", lambda self, norms, bound: factor(self, norms.bfloat16(), bound).float()
    )


def _key_of_nobody(patch: Patch) -> None:
    """Noise is a function of the number of the step: every run draws the same."""
    derive = chacha.derive_key
    patch.setattr(
        chacha,
        "derive_key",
        lambda key, *labels: derive(bytes(32) if labels == ("chacha20 gaussian",) else key, *labels),
    )


def _missing_on_a_rank(patch: Patch) -> None:
    add = chacha.add_on_host

    def changed(key: bytes, parts: Any, stddev: float, drawn: Any = None) -> None:
        add(key, parts, stddev if collectives.rank() == 0 else 0.0, None)

    patch.setattr(chacha, "add_on_host", changed)


def _all_of_them_on_every_rank(patch: Patch) -> None:
    patch.setattr(loader, "take_all", lambda run, step, drawn: StepIndices(run.draw(step).tolist(), step))


def _choose(change: Callable[[list[int], int], list[int]]) -> Callable[[Patch], None]:
    def plant(patch: Patch) -> None:
        patch.setattr(loader, "take_all", lambda run, step, drawn: StepIndices(change(drawn.tolist(), step), step))

    return plant


def _sampler(draw: Callable[[PoissonSampler, bytes, int], np.ndarray]) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(PoissonSampler, "draw", draw)


def _shuffled(self: PoissonSampler, key: bytes, step: int) -> np.ndarray:
    per_epoch = self.num_examples // self.expected_batch_size
    epoch, place = divmod(step - 1, per_epoch)
    order = np.random.default_rng([epoch, *key]).permutation(self.num_examples)
    return np.sort(order[place * self.expected_batch_size : (place + 1) * self.expected_batch_size])


def _too_many(self: PoissonSampler, key: bytes, step: int) -> np.ndarray:
    rate = 1.15 * self.sample_rate
    return np.flatnonzero(np.random.default_rng([step, *key]).random(self.num_examples) < rate)


def _same_batch(self: PoissonSampler, key: bytes, step: int) -> np.ndarray:
    return np.flatnonzero(np.random.default_rng([*key]).random(self.num_examples) < self.sample_rate)


def _restarted(patch: Patch) -> None:
    """Correlated noise begins anew halfway, under a new key, and nothing is charged for it."""
    add = CorrelatedStream.add_

    def changed(self: Any, sums: Any, step: int) -> None:
        if step - self._first_step == 8:
            fresh = type(self).__new__(type(self))
            fresh.__dict__.update(self.__dict__)
            for name, value in vars(self).items():
                if isinstance(value, dict) and name not in ("_bound_to", "_shapes"):
                    setattr(self, name, type(value)())
        add(self, sums, step)

    patch.setattr(CorrelatedStream, "add_", changed)


def _correlation_forgotten(patch: Patch) -> None:
    def changed(self: Any, sums: Any, step: int) -> None:
        t = step - self._first_step
        for tensor, name in enumerate(sorted(sums)):
            sums[name].add_(self._normal(sums[name], tensor, t), alpha=self.scale)
        self._num_done = t + 1

    patch.setattr(CorrelatedStream, "add_", changed)


def _divided_by_what_came(patch: Patch) -> None:
    """The sum is divided by the size of the batch that was drawn."""
    write, clip = steps.write_gradients, steps.clip_and_sum
    size: list[int] = []

    def counted(engine: Any, losses: Any, batches: Any, scales: Any, **options: Any) -> Any:
        batches = list(batches)
        size[:] = [sum(len(batch["canary"]) for batch in batches)]
        return clip(engine, losses, batches, scales, **options)

    def changed(parameters: Any, released: Any) -> None:
        write(parameters, released)
        for p in parameters.values():
            p.grad.mul_(250 / max(1, size[0]))

    patch.setattr(steps, "clip_and_sum", counted)
    patch.setattr(steps, "write_gradients", changed)


def _filtered_before_the_noise(patch: Patch) -> None:
    """A low-pass filter stands between the clip and the noise, so a record goes on after its step."""
    release, kept = runs.PrivateRun.release, dict[str, torch.Tensor]()

    def changed(self: Any, sums: Any, step: int) -> Any:
        for name, total in sums.items():
            kept[name] = total.add_(kept.get(name, torch.zeros_like(total)), alpha=0.5).clone()
        return release(self, sums, step)

    patch.setattr(runs.PrivateRun, "release", changed)


def _parts_of_users(patch: Patch) -> None:
    """Every row of a user is clipped as if it were a user of its own."""
    init = UserBatch.__init__

    def changed(self: Any, records: Any, step: Any, sizes: Any, weight: Any) -> None:
        init(self, records, step, [1] * len(records), weight)

    patch.setattr(UserBatch, "__init__", changed)


SCALE, TIME, SPACE = "noise: stddev", "noise: steps", "noise: coordinates"
CLIP, REST, SAMPLING = "a record adds", "a record is in", "sampling"
FAULTS = (
    Fault("no noise", _noise(lambda parts, s, key: (parts, 0.0, key)), SCALE),
    Fault("noise halved", _noise(lambda parts, s, key: (parts, s / 2, key)), SCALE),
    Fault("noise 5 % too small", _noise(lambda parts, s, key: (parts, 0.95 * s, key)), SCALE),
    Fault("noise missing on one tensor", _without_a_tensor, SCALE),
    Fault("noise divided by the size of the batch that came", _divided_by_what_came, SCALE),
    Fault("noise drawn once, and added in every step", _same_in_every_step, TIME),
    Fault("noise of step 17 that of step 5", _same_in_two_steps, TIME),
    Fault("one stream of noise for all tensors", _one_stream_for_all, SPACE),
    Fault("noise uniform, of the same variance",
          _values(lambda z: (torch.special.ndtr(z) - 0.5) * 12**0.5), "noise: Gaussian"),
    Fault("noise cut at three standard deviations", _values(lambda z: z.clamp(-3, 3) * 1.00075), "noise: Gaussian"),
    Fault("clipping skipped", _factors(torch.ones_like), CLIP),
    Fault("clip too wide by a quarter", _factors(lambda f: 1.25 * f), CLIP),
    Fault("clip of a physical batch, not of its records", _clipped_per_batch, CLIP),
    Fault("clip computed in bfloat16", _clipped_in_bf16, CLIP, CLOSE),
    Fault("records handed out twice", _choose(lambda drawn, step: [i for i in drawn for _ in range(2)]), CLIP),
    Fault("the loader shuffles, whatever was drawn",
          _choose(lambda drawn, step: np.random.default_rng(step).choice(1000, len(drawn), replace=False).tolist()), REST),
    Fault("batches of a shuffle, not of Poisson sampling", _sampler(_shuffled), SAMPLING),
    Fault("records drawn 15 % too often", _sampler(_too_many), SAMPLING),
    Fault("the same records in every step", _sampler(_same_batch), SAMPLING),
    Fault("correlated noise begun anew, uncharged", _restarted, TIME, NU),
    Fault("correlation forgotten: independent noise", _correlation_forgotten, TIME, NU),
    Fault("a filter between the clip and the noise", _filtered_before_the_noise, REST, CLOSE),
    Fault("a user's rows clipped one by one", _parts_of_users, CLIP, USERS),
    Fault("noise missing on one rank of two", _missing_on_a_rank, SCALE, num_ranks=2),
    Fault("two ranks that each take all records", _all_of_them_on_every_rank, CLIP, num_ranks=2),
    Fault("noise keyed by the number of the step alone", _key_of_nobody,
          "tests/mechanisms/test_randomness.py::test_streams_are_independent"),
)  # fmt: skip
