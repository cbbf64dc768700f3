"""Book-keeping ghost clipping: one forward, one backward, exact clipped sums.

The backward leaves, per parameter, what each record contributes (`contributions`); norms, factors and weighted sums
are formed from that, so the batch of per-record gradients never exists.

Bu et al. (2023), arXiv:2210.00038 (book-keeping); Li et al. (2022), arXiv:2110.05679 (ghost norms).

Shape legend: B = records of the physical batch.
"""

from __future__ import annotations

import torch

from hf_dpopt.clipping import usable
from hf_dpopt.grads.contributions import ClippedSum, Contribution, GramCache, squared_norm
from hf_dpopt.grads.engine import ClippingEngine, LossFunction, UnprivatizedStatistics, full_precision


class BookKeepingEngine(ClippingEngine):
    """One backward; keeps the inputs and output gradients of trained layers until the factors are known."""

    name = "book_keeping"

    def add_clipped_sum(
        self, sums: ClippedSum, record_losses: LossFunction, num_records: int
    ) -> UnprivatizedStatistics:
        contributions: dict[str, list[Contribution]] = {}
        with self.capture.recording(num_records, lambda name, c: contributions.setdefault(name, []).append(c)):
            losses_B = self._forward(record_losses, num_records)
            self._backward(losses_B)
        with torch.no_grad(), full_precision(losses_B.device.type):
            squares, grams = self._no_squares(losses_B), GramCache()
            for name, uses in contributions.items():
                squares[self.clipping.group(name)] += squared_norm(uses, grams)
            del grams
            factors, keep_B = self.clipping.factors(squares), usable(squares)
            self._add_weighted_sums(sums, contributions, factors, keep_B)
        return self._statistics(losses_B, factors, keep_B)

    def _add_weighted_sums(
        self,
        sums: ClippedSum,
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
                sums.add(name, use, factors_B if all_kept else factors_B[keep_B])
