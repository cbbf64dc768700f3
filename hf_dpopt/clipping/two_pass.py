"""Two-pass ghost clipping: one forward and two backwards over its graph, the first for norms, the second for sums.

A third runs where norms need contributions together or materialised: in the first batch of a model with tied weights,
and for a record whose tokens cancel.

Nothing is kept between layers, so gradient checkpointing saves what it saves without privacy. Costs one more pass of
input gradients (and recomputation) than book-keeping.

Li et al. (2022), arXiv:2110.05679, Section 4.

Shape legend: B = records of the physical batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch._functorch.config
from torch import nn

from hf_dpopt.clipping.capture import is_compiled
from hf_dpopt.clipping.clipped_sum import ClippedSum
from hf_dpopt.clipping.contributions import Contribution
from hf_dpopt.clipping.engine import ClippingEngine, LossFunction, UnprivatizedStatistics, full_precision
from hf_dpopt.clipping.record_norms import has_cancelled, squared_norms
from hf_dpopt.clipping.scaling import UNSCALED, Scale
from hf_dpopt.clipping.thresholds import Clipping
from hf_dpopt.clipping.units import Units
from hf_dpopt.common.collectives import current_ranks
from hf_dpopt.randomness.framework import snapshot


class TwoPassEngine(ClippingEngine):
    """Two backwards; keeps contributions only of parameters that are used more than once, or whose tokens cancel."""

    name = "two_pass"

    @property
    def order_of_sums(self) -> list[str]:
        return list(reversed(self.parameters))

    def __init__(self, model: nn.Module, clipping: Clipping):
        super().__init__(model, clipping)
        if any(is_compiled(module) for module in model.modules()):
            # a compiled backward gives the memory of its inputs away unless it is told that it may run again
            torch._functorch.config.donated_buffer = False
        self._reused: set[str] = set()  # their norms need all uses together; found when a second use turns up

    def add_clipped_sum(
        self, sums: ClippedSum, record_losses: LossFunction, num_records: int, units: Units | None = None
    ) -> UnprivatizedStatistics:
        with self.capture.recording(num_records, self._nothing_yet, units) as capture:
            losses_B = self._forward(record_losses, num_records, units)
            device = losses_B.device.type
            # whatever a backward recomputes with dropout must see the same masks in every backward
            restore = snapshot(losses_B.device)
            scale, together = sums.scale or UNSCALED, dict[str, list[Contribution]]()
            squares, used = self._squares(losses_B, restore, scale)
            with torch.no_grad():
                factors, keep_B = self.clipping.factors(squares), self._usable(squares)
            all_kept = bool(keep_B.all())

            def add(name: str, uses: list[Contribution]) -> None:
                factors_B = factors[self.clipping.group(name)]
                with torch.no_grad(), full_precision(device):
                    for use in scale.summed(name, uses):
                        if all_kept:
                            sums.add(name, use, factors_B)
                        else:  # selected out, not multiplied: 0 * inf is NaN
                            sums.add(name, use.select(keep_B), factors_B[keep_B])

            def receive(name: str, use: Contribution) -> None:
                if name in scale.parts and name in self._reused:  # formed together, as their norm was
                    together.setdefault(name, []).append(use)
                else:
                    add(name, [use])
                    if name not in self._reused:  # its only use
                        sums.close(name)

            sums.close(*(name for name in self.parameters if name not in used))
            capture.receive = receive
            restore()
            self._backward(losses_B)
            for name in list(together):
                add(name, together.pop(name))
        return self._statistics(sums, losses_B, squares, factors, keep_B)

    def _squares(
        self, losses_B: torch.Tensor, restore: Callable[[], None], scale: Scale
    ) -> tuple[dict[str, torch.Tensor], set[str]]:
        """The first backward: group -> squared norms of the scaled gradients, (B,), and the parameters used."""
        keep = set(self._reused)
        while True:
            norms = _Norms(self.clipping, self._no_squares(losses_B), keep, scale)
            self.capture.receive = norms.measure
            restore()
            self._backward(losses_B, keep_graph=True)
            self._reused |= norms.reused
            more = norms.to_keep()
            if self.is_collective:  # a backward is a collective: all ranks do as many
                more = set[str]().union(*current_ranks().every(lambda: more))  # noqa: B023
            if more <= keep:
                return norms.squares(), norms.used
            keep |= more  # again: rare but for the first batch, which shows what is used more than once

    @staticmethod
    def _nothing_yet(name: str, use: Contribution) -> None:
        raise AssertionError(f"{name} handed over a gradient before any backward")


class _Norms:
    """The norms that one backward measures.

    Args:
        clipping: the clipping rule, which names the group of a parameter.
        squares: group -> zeros, (B,).
        keep: parameters whose norms need their contributions together, or materialised.
        scale: multiplier of the records' gradients before the norm.
    """

    def __init__(self, clipping: Clipping, squares: dict[str, torch.Tensor], keep: set[str], scale: Scale):
        self._clipping, self._squares, self._keep, self._scale = clipping, squares, frozenset(keep), scale
        self._kept: dict[str, list[Contribution]] = {}
        self._cancelled: dict[str, torch.Tensor] = {}
        self.reused: set[str] = set()
        self._device = next(iter(squares.values())).device.type if squares else "cpu"

    def measure(self, name: str, use: Contribution) -> None:
        """Receive a contribution, and release it unless it is to be kept."""
        if name in self._keep:
            self._kept.setdefault(name, []).append(use)
        elif name in self._cancelled:
            self.reused.add(name)
        else:
            with torch.no_grad(), full_precision(self._device):
                squares_B, energy_B = self._scale.of(name, [use])[0].squares()
                self._squares[self._clipping.group(name)] += squares_B
                self._cancelled[name] = has_cancelled(squares_B, energy_B)

    def to_keep(self) -> set[str]:
        """Parameters that have to be kept in another backward; the device is asked once for all of them."""
        if not self._cancelled:
            return self.reused
        answers = torch.stack(list(self._cancelled.values())).any(dim=1).tolist()
        return self.reused | {name for name, answer in zip(self._cancelled, answers, strict=True) if answer}

    @property
    def used(self) -> set[str]:
        """Parameters that the loss depends on."""
        return self._kept.keys() | self._cancelled.keys()

    def squares(self) -> dict[str, torch.Tensor]:
        """Group -> squared norms, (B,)."""
        with torch.no_grad(), full_precision(self._device):
            for name, squares_B in squared_norms(self._kept, scale=self._scale).items():
                self._squares[self._clipping.group(name)] += squares_B
            self._scale.scale_squares_(self._squares)
        return self._squares
