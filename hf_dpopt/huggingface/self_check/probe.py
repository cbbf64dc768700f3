"""A model under test: its losses and plain gradients, with random draws that belong to records.

Shape legend: B = records.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hf_dpopt.clipping.engine import ClippingEngine
from hf_dpopt.clipping.products import wide
from hf_dpopt.clipping.scaling import Scale
from hf_dpopt.clipping.thresholds import Clipping
from hf_dpopt.common.errors import UnsupportedModuleError
from hf_dpopt.huggingface.self_check.conditions import plain_operations
from hf_dpopt.huggingface.self_check.draws import RecordDraws
from hf_dpopt.huggingface.self_check.made_up import rows
from hf_dpopt.records.losses import RecordLosses

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
NARROW_TOLERANCE = 5e-2
Gradient = dict[str, torch.Tensor]


@dataclasses.dataclass
class Probe:
    """An engine with its losses, whose random draws are under control.

    Args:
        engine: the engine that training uses.
        losses: the losses that training uses.
        tolerance: relative error that rounding may cause.
        draws: mode that makes draws per record; None if nothing is drawn.
        uses_others: whether Python's or numpy's generator is drawn from, too.
        is_entered: whether the mode covers forwards and backwards, not forwards only.
    """

    engine: ClippingEngine
    losses: RecordLosses
    tolerance: float
    draws: RecordDraws | None = None
    uses_others: bool = False
    is_entered: bool = False

    def losses_of(self, batch: Mapping[str, Any], records: Sequence[int], **how: Any) -> torch.Tensor:
        """The losses of a batch that holds these records, (B,); `how` as for `RecordDraws.start`."""
        shared = how.get("shared", 0)
        seed = shared if isinstance(shared, int) else 0
        random.seed(seed)
        np.random.seed(seed)
        if self.draws is None:
            return self.losses(batch)
        self.draws.start(records, **how)
        with contextlib.nullcontext() if self.is_entered else self.draws:  # twice would draw twice
            return self.losses(batch)

    def gradient(self, batch: Mapping[str, Any], record: int, **how: Any) -> Gradient:
        """Compute the gradient of one record alone, by plain autograd."""
        return plain_gradient(self.losses_of(batch, [record], **how)[0], self.engine.parameters)

    def engine_sum(
        self,
        batch: Mapping[str, Any],
        clipping: Clipping,
        records: Sequence[int],
        *,
        scale: Scale | None = None,
        **how: Any,
    ) -> Gradient:
        """Compute the engine's clipped sum of a batch."""
        sums = self.engine.empty_sum(scale)
        with clipped_by(self.engine, clipping):
            self.engine.add_clipped_sum(sums, lambda: self.losses_of(batch, records, **how), len(records))
        return sums.result()


@contextlib.contextmanager
def probing(
    engine: ClippingEngine, losses: RecordLosses, batch: Mapping[str, Any], records: Sequence[int], tolerance: float
) -> Iterator[Probe]:
    """Make a probe for a model, after trying it on a batch; it controls random draws if there are any.

    Intercepting every operation costs time, so it is done only where needed: not at all if nothing is drawn, and in
    the backward only if that repeats the forward (checkpointing).

    Raises:
        UnsupportedModuleError: if the operations cannot be seen one by one, and the model is random in training mode.
    """
    with plain_operations(engine.model):
        draws = RecordDraws(engine.model)
        probe = Probe(engine, losses, tolerance, draws)
        hidden = ""
        try:
            with torch.no_grad():
                probe.losses_of(batch, records)
                probe.uses_others = _others_were_used()
                if draws.num_drawn:
                    _learn(probe, batch, records)
        except NotImplementedError as error:  # of an operation that does not run under a dispatch mode
            hidden = str(error).split("\n", 1)[0][:120]
        if hidden:
            draws.stop()
            _check_is_not_random(losses, batch, hidden)
        if hidden or not draws.num_drawn:
            probe.draws = None
        repeats = any(getattr(module, "gradient_checkpointing", False) for module in engine.model.modules())
        probe.is_entered = repeats and probe.draws is not None
        with draws if probe.is_entered else contextlib.nullcontext():
            yield probe


def _learn(probe: Probe, batch: Mapping[str, Any], records: Sequence[int]) -> None:
    """Compare the draws of a batch with those of its first record alone."""
    assert probe.draws is not None
    together = probe.draws.shapes()
    if len(records) > 1:
        probe.losses_of(rows(batch, 0), records[:1])
        probe.draws.learn(len(records), together, 1, probe.draws.shapes())


def _check_is_not_random(losses: RecordLosses, batch: Mapping[str, Any], reason: str) -> None:
    with torch.no_grad():
        first = losses(batch)
        if any(not torch.equal(losses(batch), first) for _ in range(3)):
            raise UnsupportedModuleError(
                "Self-check failed before training: the model is random in training mode, and what it draws cannot "
                f"be seen ({reason}), so records cannot be compared with themselves alone. Set its dropout to 0, or "
                "load it with attn_implementation='sdpa' or 'eager'."
            )


def _others_were_used() -> bool:
    """Whether Python's or numpy's generator moved since it was seeded with 0."""
    pure, words = random.Random(0).getstate(), np.random.RandomState(0).get_state(legacy=False)["state"]
    now = np.random.get_state(legacy=False)["state"]
    return random.getstate() != pure or now["pos"] != words["pos"] or not np.array_equal(now["key"], words["key"])


def plain_gradient(loss: torch.Tensor, parameters: Mapping[str, torch.Tensor]) -> Gradient:
    """Compute the gradient of a loss by plain autograd; zeros for parameters that it does not depend on."""
    if not loss.requires_grad:
        return {name: wide(torch.zeros_like(p)) for name, p in parameters.items()}
    grads = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {
        name: wide(torch.zeros_like(p) if g is None else g)
        for (name, p), g in zip(parameters.items(), grads, strict=True)
    }


@contextlib.contextmanager
def clipped_by(engine: ClippingEngine, clipping: Clipping) -> Iterator[None]:
    """Give the engine another clipping rule inside the context."""
    before, engine.clipping = engine.clipping, clipping
    try:
        yield
    finally:
        engine.clipping = before


def squared_norm(gradient: Gradient) -> torch.Tensor:
    """Squared L2 norm over all parameters together."""
    return torch.stack([g.square().sum() for g in gradient.values()]).sum()


def distance(one: Gradient, other: Gradient) -> float:
    """L2 distance of two gradients; NaN if either holds NaN."""
    return _norm([torch.linalg.vector_norm(one[n] - other[n]) for n in other])


def length(gradient: Gradient) -> float:
    """L2 norm of a gradient."""
    return _norm([torch.linalg.vector_norm(g) for g in gradient.values()])


def _norm(norms: list[torch.Tensor]) -> float:
    return float(torch.linalg.vector_norm(torch.stack(norms).double()))


def check_equal(got: Gradient, want: Gradient, tolerance: float, what: str, fix: str, *, added: float = 0.0) -> float:
    """Return the relative error if it is within the tolerance; else raise an error that names the worst tensor.

    `added` is the length of the longest gradient in the sum: where they cancel, what is left of them is rounding.
    """
    scale = max(length(want), added, 1e-12)
    errors = {n: float(torch.linalg.vector_norm(got[n] - want[n])) / scale for n in want}
    worst = max(errors, key=lambda n: errors[n] if errors[n] == errors[n] else float("inf"))
    if not errors[worst] <= tolerance:
        raise UnsupportedModuleError(
            f"Self-check failed before training: {what}. Worst tensor: {worst}, relative error {errors[worst]:.2g} "
            f"(allowed {tolerance:g}). {fix}"
        )
    return errors[worst]
