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
from hf_dpopt.common.collectives import current_ranks
from hf_dpopt.common.errors import UnsupportedModuleError
from hf_dpopt.common.sharding import is_sharded, local_of
from hf_dpopt.records.losses import RecordLosses
from hf_dpopt.self_check.conditions import plain_operations
from hf_dpopt.self_check.draws import RecordDraws
from hf_dpopt.self_check.made_up import rows

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

    def norms(self, gradient: Gradient) -> dict[str, torch.Tensor]:
        """L2 norm of each tensor, float64."""
        return _norms(gradient)

    def length(self, gradient: Gradient) -> float:
        """L2 norm over all tensors together."""
        return _joint(self.norms(gradient))

    def clipped_sum(self, clipping: Clipping, alone: Sequence[Gradient]) -> Gradient:
        """The sum of the gradients of single records, clipped record by record in a loop."""
        squares = [self._squares(clipping, one) for one in alone]
        factors = clipping.factors({group: torch.stack([s[group] for s in squares]) for group in squares[0]})
        return {
            name: torch.stack([one[name] * factors[clipping.group(name)][b] for b, one in enumerate(alone)]).sum(0)
            for name in alone[0]
        }

    def clip_half(self, alone: Sequence[Gradient]) -> Clipping | None:
        """The engine's rule with a clipping norm at the median of these records; None if that is zero."""
        median = sorted(self.length(one) for one in alone)[len(alone) // 2]
        clipping: Any = self.engine.clipping
        return dataclasses.replace(clipping, clipping_norm=median) if median > 0 else None

    def _squares(self, clipping: Clipping, gradient: Gradient) -> dict[str, torch.Tensor]:
        """Group -> squared norm."""
        squares: dict[str, Any] = {}
        for name, norm in self.norms(gradient).items():
            group = clipping.group(name)
            squares[group] = squares.get(group, 0.0) + norm.square()
        return squares

    def check_equal(self, got: Gradient, want: Gradient, what: str, fix: str, *, added: float = 0.0) -> float:
        """Return the relative error if it is within the tolerance; else raise an error that names the worst tensor.

        `added` is the length of the longest gradient in the sum: where they cancel, what is left of them is rounding.
        """
        scale = max(self.length(want), added, 1e-12)
        apart = self.norms({name: got[name] - want[name] for name in want})
        errors = {name: float(norm) / scale for name, norm in apart.items()}
        worst = max(errors, key=lambda n: errors[n] if errors[n] == errors[n] else float("inf"))
        if not errors[worst] <= self.tolerance:
            raise UnsupportedModuleError(
                f"Self-check failed before training: {what}. Worst tensor: {worst}, relative error "
                f"{errors[worst]:.2g} (allowed {self.tolerance:g}). {fix}"
            )
        return errors[worst]


class ProbeOfShards(Probe):
    """The same of a model in shards (FSDP2): every tensor is this rank's shard, and all ranks take part in each call.

    A plain backward leaves the mean of the ranks' gradients. So every rank computes the same made-up record, and the
    mean is its gradient. The engine meets the batch on rank 0 alone, the others take part without records: a mistake
    in how shards are cut, summed or skipped shows. Nothing may be drawn: masks cannot be drawn record by record here.
    """

    def gradient(self, batch: Mapping[str, Any], record: int, **how: Any) -> Gradient:
        """Compute the gradient of one record that every rank has: the mean of equal gradients is each of them."""
        self.losses(batch).sum().backward()
        found = {}
        for name, p in self.engine.parameters.items():
            found[name] = torch.zeros_like(local_of(p)).double() if p.grad is None else local_of(p.grad).double()
            p.grad = None
        return found

    def engine_sum(
        self,
        batch: Mapping[str, Any],
        clipping: Clipping,
        records: Sequence[int],
        *,
        scale: Scale | None = None,
        **how: Any,
    ) -> Gradient:
        """Compute the engine's clipped sum of a batch that rank 0 alone has."""
        ranks, sums = current_ranks(), self.engine.empty_sum(scale)
        takes_part = contextlib.nullcontext() if ranks.rank == 0 else self.engine.leaving_out()
        with clipped_by(self.engine, clipping), takes_part:
            self.engine.add_clipped_sum(sums, lambda: self.losses(batch), len(records))
        return {name: local_of(g).double() for name, g in ranks.sum(sums.result()).items()}

    def norms(self, gradient: Gradient) -> dict[str, torch.Tensor]:
        """L2 norm of each tensor over all shards, float64; of one that is whole every rank has a share."""
        ranks, names = current_ranks(), sorted(gradient)
        shares = [1.0 if is_sharded(self.engine.parameters[name]) else 1 / ranks.size for name in names]
        mine = [gradient[name].square().sum() * share for name, share in zip(names, shares, strict=True)]
        return dict(zip(names, torch.stack(ranks.gather(torch.stack(mine))).sum(0).sqrt(), strict=True))


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


def distance(one: Gradient, other: Gradient) -> float:
    """L2 distance of two gradients; NaN if either holds NaN."""
    return length({name: one[name] - other[name] for name in other})


def length(gradient: Gradient) -> float:
    """L2 norm of a gradient."""
    return _joint(_norms(gradient))


def _joint(norms: Mapping[str, torch.Tensor]) -> float:
    return float(torch.linalg.vector_norm(torch.stack(list(norms.values()))))


def _norms(gradient: Gradient) -> dict[str, torch.Tensor]:
    return {name: torch.linalg.vector_norm(g).double() for name, g in gradient.items()}
