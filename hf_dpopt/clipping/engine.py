"""Base of the clipping engines: per-record losses, the backward under capture, the safety checks around it.

Shape legend: B = rows of the physical batch, U = units of privacy in it: as many, or fewer if a unit has several rows.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import ClassVar

import torch
from torch import nn

from hf_dpopt.clipping.capture import Capture
from hf_dpopt.clipping.clipped_sum import ClippedSum
from hf_dpopt.clipping.contributions import Contribution, Dense
from hf_dpopt.clipping.products import wide
from hf_dpopt.clipping.record_norms import squared_norms
from hf_dpopt.clipping.scaling import UNSCALED, Scale
from hf_dpopt.clipping.thresholds import Clipping, usable
from hf_dpopt.clipping.units import Units
from hf_dpopt.common.errors import UnsupportedModuleError
from hf_dpopt.common.sharding import any_sharded, check_layout
from hf_dpopt.common.types import Secret

LossFunction = Callable[[], torch.Tensor]


@dataclasses.dataclass(repr=False)
class UnprivatizedStatistics(Secret):
    """Values of a step before any noise; their text does not show them, so no log line tells them by accident."""

    num_records: int = 0
    loss_sum: float = 0.0
    num_clipped: int = 0
    num_dropped: int = 0

    def __add__(self, other: UnprivatizedStatistics) -> UnprivatizedStatistics:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return UnprivatizedStatistics(*(a + b for a, b in pairs))


@contextlib.contextmanager
def full_precision(device: str) -> Iterator[None]:
    """Autocast, TF32 and bfloat16 reductions off: a norm that is rounded down is a record that goes unclipped."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


class ClippingEngine(abc.ABC):
    """Clipped gradient sums of a model, one physical batch at a time.

    Formal guarantee: what `add_clipped_sum` adds for one record has L2 norm at most `clipping.clipping_norm` over all
    trainable parameters together (float32 rounding aside), in the coordinates of the sum's scale if it has one,
    provided the loss of a record depends on that record alone.
    A record without finite gradient adds exactly nothing.

    Args:
        model: the module whose trainable parameters are clipped. Never wrapped or changed; patched inside a call only.
        clipping: the rule that turns norms into factors.

    Raises:
        UnsupportedModuleError: if a trainable parameter cannot be covered; names it.
        DPConfigError: for weights in shards that FSDP2 did not make, or over a part of the processes.
    """

    name: ClassVar[str]

    def __init__(self, model: nn.Module, clipping: Clipping):
        check_layout(model)
        self.model, self.clipping = model, clipping
        self.capture = Capture(model)
        self.parameters = self.capture.parameters
        #: Whether a forward is a collective: weights of the model, trained or not, lie in shards.
        self.is_collective = any_sharded(model.parameters())
        self._leaves_out = False  # see `leaving_out`
        self._weights_U: torch.Tensor | None = None  # of the losses of the units of a batch, in their sums

    @property
    def order_of_sums(self) -> list[str]:
        """Names of the sums of a batch, about in the order in which they become final; none if that is not known."""
        return []

    def empty_sum(self, scale: Scale | None = None) -> ClippedSum:
        """A new accumulator for the clipped sums of one logical batch.

        Args:
            scale: multiplier of a record's gradient before its norm is taken. It may depend on public and on released
                values alone; clip, sum and sensitivity are then those of the scaled gradients.
        """
        return ClippedSum(self.parameters, scale)

    @abc.abstractmethod
    def add_clipped_sum(
        self, sums: ClippedSum, record_losses: LossFunction, num_records: int, units: Units | None = None
    ) -> UnprivatizedStatistics:
        """Add the sum over the records of their clipped gradients to `sums`, in place.

        Args:
            sums: made by `empty_sum`, once per logical batch.
            record_losses: runs the forward and returns the losses of the records, (B,).
            num_records: B, at least 1.
            units: records that belong together (users): the sum of their gradients is clipped, once. None if each
                record is a unit of its own.
        """

    @contextlib.contextmanager
    def leaving_out(self) -> Iterator[None]:
        """Contribute zero inside the context, so that idle ranks can join collectives."""
        self._leaves_out = True
        try:
            yield
        finally:
            self._leaves_out = False

    def _usable(self, squares: dict[str, torch.Tensor]) -> torch.Tensor:
        """Whether a unit is added, (U,): its gradient is finite, and the batch is not there to take part alone."""
        keep_U = usable(squares)
        return torch.zeros_like(keep_U) if self._leaves_out else keep_U

    def add_clipped(
        self, sums: ClippedSum, gradients: Mapping[str, torch.Tensor], losses_U: torch.Tensor | None = None
    ) -> UnprivatizedStatistics:
        """Clip vectors that units have already computed, and add them to `sums`.

        For users who were summed in parts, or trained locally. Memory is that of the vectors.

        Args:
            sums: made by `empty_sum`.
            gradients: name -> (U, *shape of the parameter), for every trainable parameter.
            losses_U: losses of the units, where their numbers are summed as well.
        """
        assert gradients.keys() == self.parameters.keys(), gradients.keys() ^ self.parameters.keys()
        first = next(iter(gradients.values()))
        zeros_U = first.new_zeros(len(first))
        with torch.no_grad(), full_precision(zeros_U.device.type):
            scale = sums.scale or UNSCALED
            uses: dict[str, list[Contribution]] = {name: [Dense(g_U)] for name, g_U in gradients.items()}
            squares = self._no_squares(zeros_U)
            for name, squares_U in squared_norms(uses, scale=scale).items():
                squares[self.clipping.group(name)] += squares_U
            scale.scale_squares_(squares)
            factors, keep_U = self.clipping.factors(squares), self._usable(squares)
            is_whole = bool(keep_U.all())  # a selection would be a copy
            for name, use in uses.items():
                for part in scale.summed(name, use):
                    kept = part if is_whole else part.select(keep_U)
                    sums.add(name, kept, factors[self.clipping.group(name)][keep_U])
            self._weights_U = None
            return self._statistics(sums, zeros_U if losses_U is None else losses_U, squares, factors, keep_U)

    def gradient_of(self, parts: Iterable[LossFunction]) -> dict[str, torch.Tensor]:
        """Unclipped ``sum over the parts of grad sum_b loss_b``, by plain backwards.

        Args:
            parts: each runs a forward over records of one unit and returns their losses.

        Returns:
            Name -> tensor, float32 or wider; NaN if a loss is not finite.
        """
        total: dict[str, torch.Tensor] = {}
        is_finite = True
        for record_losses in parts:
            for p in self.parameters.values():
                p.grad = None
            losses_B = record_losses()
            if losses_B.requires_grad:
                with torch.autocast(losses_B.device.type, enabled=False):
                    losses_B.sum().backward()
            for name, p in self.parameters.items():
                if p.grad is not None:
                    total[name] = total[name].add_(p.grad) if name in total else wide(p.grad)
                    p.grad = None
            is_finite = is_finite and bool(losses_B.detach().isfinite().all())
        total = {n: total[n] if n in total else torch.zeros_like(wide(p.detach())) for n, p in self.parameters.items()}
        if not is_finite:
            next(iter(total.values())).fill_(torch.nan)  # of a loss that is no number no gradient is right
        return total

    def _forward(self, record_losses: LossFunction, num_records: int, units: Units | None) -> torch.Tensor:
        """The losses of the units, (U,)."""
        for p in self.parameters.values():
            p.grad = None
        losses_B = record_losses()
        if losses_B.shape != (num_records,):
            raise UnsupportedModuleError(
                f"The loss has shape {tuple(losses_B.shape)}; expected one value per record, ({num_records},). "
                "A loss that mixes records cannot be made private: return the per-record losses."
            )
        self._weights_U = None if units is None else units.weights_U
        return losses_B if units is None else units.summed(losses_B)

    def _backward(self, losses_B: torch.Tensor, *, keep_graph: bool = False) -> None:
        if losses_B.requires_grad:
            # an ambient autocast would reach the products that the backward forms for the engine
            with torch.autocast(losses_B.device.type, enabled=False):
                losses_B.sum().backward(retain_graph=keep_graph)
        self._check_nothing_escaped()

    def _check_nothing_escaped(self) -> None:
        escaped = [name for name, p in self.parameters.items() if p.grad is not None]
        for name in escaped:
            self.parameters[name].grad = None
        if escaped:
            raise UnsupportedModuleError(
                "These parameters are also used outside the layers that own them, so part of their gradient escaped "
                f"the clip: {', '.join(escaped)}. Freeze them, untie them, or add a rule under "
                "hf_dpopt/clipping/rules."
            )

    def _no_squares(self, losses_B: torch.Tensor) -> dict[str, torch.Tensor]:
        """Group -> zeros, (B,), NaN for records whose loss is not finite; unused layers count as groups too."""
        is_wide = all(p.dtype == torch.float64 for p in self.parameters.values())
        zeros_B = losses_B.detach().to(torch.float64 if is_wide else torch.float32) * 0  # in the dtype of the sums
        return {group: zeros_B.clone() for group in {self.clipping.group(name) for name in self.parameters}}

    def _statistics(
        self,
        sums: ClippedSum,
        losses_B: torch.Tensor,
        squares: dict[str, torch.Tensor],
        factors: dict[str, torch.Tensor],
        keep_B: torch.Tensor,
    ) -> UnprivatizedStatistics:
        is_clipped_B = torch.stack([f < 1 - 1e-5 for f in factors.values()]).any(dim=0)
        has_gradient_B = torch.stack(list(squares.values())).gt(0).any(dim=0)
        sums.count(is_clipped_B[keep_B & has_gradient_B])
        if self._leaves_out:
            return UnprivatizedStatistics()
        weights_B = 1.0 if self._weights_U is None else self._weights_U.to(losses_B.device)
        sums.measure(losses_B.detach() / weights_B, squares)
        return UnprivatizedStatistics(
            num_records=losses_B.numel(),
            loss_sum=float(losses_B.detach()[keep_B].sum()),
            num_clipped=int(is_clipped_B[keep_B].sum()),
            num_dropped=int(losses_B.numel() - keep_B.sum()),
        )
