"""Two-pass ghost clipping: one forward and two backwards over its graph; the first takes norms, the second sums.

Nothing is kept between layers, so gradient checkpointing saves what it saves without privacy. Costs one more pass of
input gradients (and recomputation) than book-keeping.

Li et al. (2022), arXiv:2110.05679, Section 4.

Shape legend: B = records of the physical batch.
"""

from __future__ import annotations

import torch
import torch._functorch.config
from torch import nn

from hf_dpopt import framework_rng
from hf_dpopt.clipping import Clipping, usable
from hf_dpopt.grads.capture import is_compiled
from hf_dpopt.grads.contributions import ClippedSum, Contribution, squared_norm
from hf_dpopt.grads.engine import ClippingEngine, LossFunction, UnprivatizedStatistics, full_precision


class TwoPassEngine(ClippingEngine):
    """Two backwards; keeps contributions only of parameters that are used more than once."""

    name = "two_pass"

    def __init__(self, model: nn.Module, clipping: Clipping):
        super().__init__(model, clipping)
        if any(is_compiled(module) for module in model.modules()):
            # a compiled backward gives the memory of its inputs away unless it is told that it may run again
            torch._functorch.config.donated_buffer = False
        self._reused: set[str] = set()  # their norms need all uses together; found when a second use turns up

    def add_clipped_sum(
        self, sums: ClippedSum, record_losses: LossFunction, num_records: int
    ) -> UnprivatizedStatistics:
        with self.capture.recording(num_records, self._nothing_yet) as capture:
            losses_B = self._forward(record_losses, num_records)
            device = losses_B.device.type
            # whatever a backward recomputes with dropout must see the same masks in every backward
            random_state = framework_rng.snapshot(losses_B.device)
            squares = self._squares(losses_B, random_state)
            with torch.no_grad():
                factors, keep_B = self.clipping.factors(squares), usable(squares)
            all_kept = bool(keep_B.all())

            def add(name: str, use: Contribution) -> None:
                factors_B = factors[self.clipping.group(name)]
                with torch.no_grad(), full_precision(device):
                    if not all_kept:  # selected out, not multiplied: 0 * inf is NaN
                        use, factors_B = use.select(keep_B), factors_B[keep_B]
                    sums.add(name, use, factors_B)

            capture.receive = add
            framework_rng.restore(random_state)
            self._backward(losses_B)
        return self._statistics(losses_B, factors, keep_B)

    def _squares(self, losses_B: torch.Tensor, random_state: framework_rng.Snapshot) -> dict[str, torch.Tensor]:
        """The first backward: group -> squared norms, (B,)."""
        device = losses_B.device.type
        known = -1
        while known < len(self._reused):  # again only when a use was found that had to be kept: at the first batch
            known = len(self._reused)
            squares, kept, seen = self._no_squares(losses_B), dict[str, list[Contribution]](), set[str]()

            def measure(
                name: str, use: Contribution, squares: dict = squares, kept: dict = kept, seen: set = seen
            ) -> None:
                if name in self._reused:
                    kept.setdefault(name, []).append(use)
                elif name in seen:
                    self._reused.add(name)
                else:
                    seen.add(name)
                    with torch.no_grad(), full_precision(device):
                        squares[self.clipping.group(name)] += squared_norm([use])

            self.capture.receive = measure
            framework_rng.restore(random_state)
            self._backward(losses_B, keep_graph=True)
            with torch.no_grad(), full_precision(device):
                for name, uses in kept.items():
                    squares[self.clipping.group(name)] += squared_norm(uses)
        return squares

    @staticmethod
    def _nothing_yet(name: str, use: Contribution) -> None:
        raise AssertionError(f"{name} handed over a gradient before any backward")
