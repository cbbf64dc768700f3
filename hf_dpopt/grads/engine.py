"""Book-keeping ghost clipping: one forward, one backward, exact clipped sums.

The backward leaves, per parameter, what each record contributes (`contributions`); norms, factors and weighted sums
are formed from that, so the batch of per-record gradients never exists.

Bu et al. (2023), arXiv:2210.00038 (book-keeping); Li et al. (2022), arXiv:2110.05679 (ghost norms).

Shape legend: B = records of the physical batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from hf_dpopt.clipping import Clipping, usable
from hf_dpopt.errors import UnsupportedModuleError
from hf_dpopt.grads.capture import Capture
from hf_dpopt.grads.contributions import Contribution, squared_norm, wide

LossFunction = Callable[[], torch.Tensor]


@dataclasses.dataclass
class UnprivatizedStatistics:
    """What a step saw before any noise. Secret: never logged by default, never written to disk."""

    num_records: int = 0
    loss_sum: float = 0.0
    num_clipped: int = 0
    num_dropped: int = 0

    def __add__(self, other: UnprivatizedStatistics) -> UnprivatizedStatistics:
        return UnprivatizedStatistics(*(a + b for a, b in zip(_values(self), _values(other), strict=True)))


def _values(x: UnprivatizedStatistics) -> tuple[Any, ...]:
    return dataclasses.astuple(x)


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


class ClippingEngine:
    """Clipped gradient sums of a model, one physical batch at a time.

    Formal guarantee: what `add_clipped_sum` adds for one record has L2 norm at most `clipping.clipping_norm` over all
    trainable parameters together (float32 rounding aside), provided the loss of a record depends on that record alone.
    A record without finite gradient adds exactly nothing.

    Args:
        model: the module whose trainable parameters are clipped. Never wrapped or changed; patched inside a call only.
        clipping: the rule that turns norms into factors.

    Raises:
        UnsupportedModuleError: if a trainable parameter cannot be covered, by name.
    """

    def __init__(self, model: nn.Module, clipping: Clipping):
        self.model, self.clipping = model, clipping
        self.capture = Capture(model)
        self.parameters = self.capture.parameters

    def zeros(self) -> dict[str, torch.Tensor]:
        """An empty clipped sum: parameter name -> zeros of its shape, float32 (float64 for float64 parameters)."""
        return {name: torch.zeros_like(p, dtype=wide(p.detach()[:0]).dtype) for name, p in self.parameters.items()}

    def add_clipped_sum(
        self, sums: dict[str, torch.Tensor], record_losses: LossFunction, num_records: int
    ) -> UnprivatizedStatistics:
        """Adds the sum over the records of their clipped gradients to `sums`, in place.

        Args:
            sums: parameter name -> float32 tensor of its shape, as made by `zeros`.
            record_losses: runs the forward and returns the losses of the records, (B,).
            num_records: B, at least 1.
        """
        for p in self.parameters.values():
            p.grad = None
        with self.capture.recording(num_records) as contributions:
            losses_B = record_losses()
            if losses_B.shape != (num_records,):
                raise UnsupportedModuleError(
                    f"The loss has shape {tuple(losses_B.shape)}; expected one value per record, ({num_records},). "
                    "A loss that mixes records cannot be made private: return the per-record losses."
                )
            if losses_B.requires_grad:
                # an ambient autocast would reach the products that the backward forms for the engine
                with torch.autocast(losses_B.device.type, enabled=False):
                    losses_B.sum().backward()
            self._check_nothing_escaped()
            with torch.no_grad(), full_precision(losses_B.device.type):
                factors, keep_B = self._clip_factors(contributions, losses_B)
                self._accumulate(sums, contributions, factors, keep_B)
        return UnprivatizedStatistics(
            num_records=num_records,
            loss_sum=float(losses_B.detach()[keep_B].sum()),
            num_clipped=int(self._is_clipped(factors)[keep_B].sum()),
            num_dropped=int(num_records - keep_B.sum()),
        )

    def _check_nothing_escaped(self) -> None:
        escaped = [name for name, p in self.parameters.items() if p.grad is not None]
        for name in escaped:
            self.parameters[name].grad = None
        if escaped:
            raise UnsupportedModuleError(
                "These parameters are also used outside the layers that own them, so part of their gradient escaped "
                f"the clip: {', '.join(escaped)}. Freeze them, untie them, or add a rule under hf_dpopt/grads/rules."
            )

    def _clip_factors(
        self, contributions: dict[str, list[Contribution]], losses_B: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        squares: dict[str, torch.Tensor] = {}
        for group in {self.clipping.group(name) for name in self.parameters}:  # unused layers count as groups too
            squares[group] = wide(losses_B.detach()) * 0  # carries a non-finite loss into the norm: it is dropped
        for name, uses in contributions.items():
            group = self.clipping.group(name)
            squares[group] = squares[group] + squared_norm(uses)
        factors = self.clipping.factors(squares)
        return factors, usable(squares)

    def _accumulate(
        self,
        sums: dict[str, torch.Tensor],
        contributions: dict[str, list[Contribution]],
        factors: dict[str, torch.Tensor],
        keep_B: torch.Tensor,
    ) -> None:
        all_kept = bool(keep_B.all())
        # Smallest first: what the small layers kept is freed before the sum of the large embedding is allocated.
        for name in sorted(contributions, key=lambda n: self.parameters[n].numel()):
            factors_B = factors[self.clipping.group(name)]
            for use in contributions.pop(name):
                if not all_kept:  # selected out, not multiplied: 0 * inf is NaN
                    use = use.select(keep_B)
                use.add_weighted_sum_(sums[name], factors_B if all_kept else factors_B[keep_B])

    def _is_clipped(self, factors: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.stack([f < 1 - 1e-5 for f in factors.values()]).any(dim=0)
