"""Book-keeping ghost clipping: one forward, one backward, exact clipped sums.

The backward leaves, per parameter, what each record contributes (`contributions`); norms, factors and weighted sums
are formed from that, so the batch of per-record gradients never exists.

Bu et al. (2023), arXiv:2210.00038 (book-keeping); Li et al. (2022), arXiv:2110.05679 (ghost norms).

Shape legend: B = records of the physical batch.
"""

from __future__ import annotations

import torch

from hf_dpopt.clipping.clipped_sum import ClippedSum, Pack
from hf_dpopt.clipping.contributions import Contribution, Dense
from hf_dpopt.clipping.engine import ClippingEngine, LossFunction, UnprivatizedStatistics, full_precision
from hf_dpopt.clipping.products import GramCache
from hf_dpopt.clipping.record_norms import squared_norms
from hf_dpopt.clipping.scaling import UNSCALED, Scale
from hf_dpopt.clipping.units import Units


class BookKeepingEngine(ClippingEngine):
    """One backward; keeps the inputs and output gradients of trained layers until the factors are known."""

    name = "book_keeping"

    @property
    def order_of_sums(self) -> list[str]:
        # Smallest first: what the small layers kept is freed before the sum of the large embedding is allocated.
        return sorted(self.parameters, key=lambda n: (self.parameters[n].numel(), n))

    def add_clipped_sum(
        self, sums: ClippedSum, record_losses: LossFunction, num_records: int, units: Units | None = None
    ) -> UnprivatizedStatistics:
        contributions: dict[str, list[Contribution]] = {}
        with self.capture.recording(num_records, lambda name, c: contributions.setdefault(name, []).append(c), units):
            losses_B = self._forward(record_losses, num_records, units)
            self._backward(losses_B)
        with torch.no_grad(), full_precision(losses_B.device.type):
            # what is packed depends on the lengths of records, and shards are added in one order on every rank
            packs = {} if sums.is_sharded else self._pack(contributions)
            scale = sums.scale or UNSCALED
            squares = self._squares(losses_B, contributions, packs, scale)
            factors, keep_B = self.clipping.factors(squares), self._usable(squares)
            summed = {name: scale.summed(name, uses) for name, uses in contributions.items()}
            contributions.clear()
            self._add_weighted_sums(sums, summed, packs, factors, keep_B)
        return self._statistics(sums, losses_B, squares, factors, keep_B)

    def _pack(self, contributions: dict[str, list[Contribution]]) -> dict[str, Pack]:
        """Group -> its small gradients, taken out of `contributions`."""
        small: dict[str, dict[str, Dense]] = {}
        for name, uses in list(contributions.items()):
            if Pack.takes(uses):
                small.setdefault(self.clipping.group(name), {})[name] = contributions.pop(name)[0]  # type: ignore[assignment]
        return {group: Pack(gradients) for group, gradients in small.items()}

    def _squares(
        self,
        losses_B: torch.Tensor,
        contributions: dict[str, list[Contribution]],
        packs: dict[str, Pack],
        scale: Scale,
    ) -> dict[str, torch.Tensor]:
        """Group -> squared norms of the scaled gradients, (B,)."""
        found: dict[str, list[torch.Tensor]] = {group: [pack.squared_norms(scale)] for group, pack in packs.items()}
        for name, squares_B in squared_norms(contributions, GramCache(), scale).items():
            found.setdefault(self.clipping.group(name), []).append(squares_B)
        squares = self._no_squares(losses_B)
        for group, of_group in found.items():
            squares[group] += torch.stack(of_group).sum(dim=0)  # in place: the dtype, and its safety, are the sums'
        scale.scale_squares_(squares)
        return squares

    def _add_weighted_sums(
        self,
        sums: ClippedSum,
        contributions: dict[str, list[Contribution]],
        packs: dict[str, Pack],
        factors: dict[str, torch.Tensor],
        keep_B: torch.Tensor,
    ) -> None:
        kept = {group: factors_B[keep_B] for group, factors_B in factors.items()}
        all_kept = bool(keep_B.all())
        for group, pack in packs.items():  # selected out, not multiplied: 0 * inf is NaN
            sums.add_pack(pack if all_kept else pack.select(keep_B), kept[group])
        packs.clear()
        for name in self.order_of_sums:
            for use in contributions.pop(name, ()):
                sums.add(name, use if all_kept else use.select(keep_B), kept[self.clipping.group(name)])
            sums.close(name)
