"""Sums of clipped gradients: the memory of a step, taken when it is needed.

Shape legend: B = records, N = values of a record, U = units of privacy.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping

import torch

from hf_dpopt.clipping.contributions import Contribution, Dense, flat_by_record
from hf_dpopt.clipping.measures import MEASURES, Measures
from hf_dpopt.clipping.products import wide
from hf_dpopt.clipping.scaling import Scale
from hf_dpopt.common.sharding import any_sharded, is_sharded, local_of, sharded_like, sum_to_shard
from hf_dpopt.common.types import ClippedSums

Taker = Callable[[str, torch.Tensor], None]
COUNT = "units within the clip"  # a coordinate of the sum that is no parameter
MAX_PACKED = 2**15  # elements of a parameter that goes into a pack
NARROW_RECORDS = 512  # that are added up in float32


class Pack:
    """Small materialised gradients of many parameters side by side: one operation for all instead of some for each.

    Biases, norms and low-rank factors are most of the parameters of a model by number and few of them by size; a GPU
    computes faster than Python can ask it one by one.

    Args:
        gradients: name -> per-record gradients of the one use of that parameter, on one device.
    """

    def __init__(self, gradients: Mapping[str, Dense]):
        flat = [flat_by_record(dense.grad_B) for dense in gradients.values()]
        self._names, self._sizes = list(gradients), [x_BN.size(1) for x_BN in flat]
        self._shapes = [dense.grad_B.shape[1:] for dense in gradients.values()]
        self._grad_BN = wide(torch.cat(flat, dim=1))

    @staticmethod
    def takes(uses: list[Contribution]) -> bool:
        """Whether these contributions of a parameter can go into a pack."""
        first = uses[0]
        return len(uses) == 1 and isinstance(first, Dense) and first.grad_B[:1].numel() <= MAX_PACKED

    def squared_norms(self, scale: Scale | None = None) -> torch.Tensor:
        """Squared norms over all parameters of the pack, (B,), after division by the scale's D."""
        if scale is None or not scale.parts.keys() & set(self._names):
            return Dense(self._grad_BN).squares()[0]
        like = zip(self._names, self._shapes, strict=True)
        weights = [scale.weights(name, self._grad_BN.new_empty(1).expand(shape)) for name, shape in like]
        return Dense(self._grad_BN * torch.cat(weights)).squares()[0]

    def select(self, keep_B: torch.Tensor) -> Pack:
        kept = copy.copy(self)
        kept._grad_BN = self._grad_BN[keep_B]
        return kept

    def by_name(self) -> dict[str, torch.Tensor]:
        """Name -> gradients of the records, (B, values)."""
        return dict(zip(self._names, self._grad_BN.split(self._sizes, dim=1), strict=True))

    def weighted_sums(self, factors_B: torch.Tensor) -> dict[str, torch.Tensor]:
        """Name -> ``sum_b factors_b g_b``, flat."""
        total_N = factors_B.to(self._grad_BN.dtype) @ self._grad_BN
        return dict(zip(self._names, total_N.split(self._sizes), strict=True))


class ClippedSum:
    """A sum over records that allocates memory for a parameter when its first contribution comes.

    A sum of all parameters that is there from the start would stand beside the activations of the whole forward, where
    ordinary training has no gradients yet.

    One record less shifts all batches after it, so what they round to is part of what a record moves. Rounding grows
    with the square of the number of records: from `NARROW_RECORDS` on, a batch is summed alone, and added in float64.

    The sum of a parameter that lies in shards is added up over the ranks batch by batch, one parameter at a time, and
    each rank keeps the shard that it has of the parameter: only one parameter is ever whole. That is a collective, so
    every rank adds the same parameters in the same order; without records, a rank adds zeros.

    Args:
        parameters: name -> parameter; all of them are in the result, those without contributions as zeros.
        scale: multiplier of the records before the clip; None for 1.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], scale: Scale | None = None):
        self._parameters = parameters
        self._totals: dict[str, torch.Tensor] = {}
        self._num_records: dict[str, int] = {}  # in the total of a parameter, those of every use
        self.scale = scale
        self._final: dict[str, torch.Tensor] = {}
        self._take: Taker | None = None  # of what is final, while the last contributions come
        self._count = 0.0  # of units, +1/2 for one within the clip and -1/2 for one that was clipped
        self._measures: Measures | None = None
        self._measured: torch.Tensor | None = None

    def take_measures(self, measures: Measures) -> None:
        """Sum the numbers of the units beside the gradients, too; before the first unit is added."""
        self._measures, self._measured = measures, measures.nothing()

    def measure(self, losses_U: torch.Tensor, squares: Mapping[str, torch.Tensor]) -> None:
        """Add the numbers of units, each of them once, where they are summed.

        Args:
            losses_U: their losses, (U,).
            squares: group of parameters -> squared norms before the clip, (U,).
        """
        if self._measures is not None and self._measured is not None:
            self._measured += self._measures.total_of(losses_U, squares)

    def count(self, is_clipped_U: torch.Tensor) -> None:
        """Count units that were not dropped and have a gradient: one without adds nothing to anything."""
        if self.scale is not None and self.scale.count_weight:
            self._count += float((0.5 - is_clipped_U.double()).sum())

    def add(self, name: str, contribution: Contribution, factors_B: torch.Tensor) -> None:
        """Add ``sum_b factors_b g_b`` of one contribution to the sum of parameter `name`."""
        assert name not in self._final, f"the sum of {name} was taken"
        if is_sharded(self._parameters[name]):
            self._add_to_shard(name, self._of_batch(name, contribution, factors_B))
            return
        if contribution.num_records == 0:
            return
        self._widen(name, contribution.num_records)
        if name not in self._totals:  # fresh memory, overwritten with beta=0: no pass of zeros
            self._totals[name] = self._of_batch(name, contribution, factors_B)
        elif self._is_wide(name):
            self._totals[name] += self._of_batch(name, contribution, factors_B)
        else:
            contribution.add_weighted_sum_(self._totals[name], factors_B)

    @property
    def is_sharded(self) -> bool:
        """Whether adding to it is a collective."""
        return any_sharded(self._parameters.values())

    def _add_to_shard(self, name: str, whole: torch.Tensor) -> None:
        """Add the sum of a batch over all ranks to the shard that lies here; from the second batch on, in float64."""
        mine = sum_to_shard(self._parameters[name], whole)
        self._totals[name] = self._totals[name].double().add_(mine) if name in self._totals else mine

    def _of_batch(self, name: str, contribution: Contribution, factors_B: torch.Tensor) -> torch.Tensor:
        if contribution.num_records == 0:
            return self._new(name, torch.zeros)
        total = self._new(name, torch.empty)
        contribution.add_weighted_sum_(total, factors_B, beta=0)
        return total

    def _widen(self, name: str, num_records: int) -> None:
        """Count records that come; before there are too many for its dtype, a total that is there becomes wide."""
        self._num_records[name] = self._num_records.get(name, 0) + num_records
        if name in self._totals and self._num_records[name] > NARROW_RECORDS:
            self._totals[name] = self._totals[name].double()

    def _is_wide(self, name: str) -> bool:
        """Whether the total has more digits than what is added to it."""
        return self._totals[name].dtype != self._dtype(self._parameters[name])

    def add_pack(self, pack: Pack, factors_B: torch.Tensor) -> None:
        """Add ``sum_b factors_b g_b`` of every gradient of the pack."""
        parts = pack.weighted_sums(factors_B)
        assert not parts.keys() & self._final.keys(), "the sum was taken"
        for name in parts:
            self._widen(name, len(factors_B))
        known = [name for name in parts if name in self._totals]
        new = {name: self._new(name, torch.empty) for name in parts if name not in self._totals}
        for is_wide in (False, True):
            some = [name for name in known if self._is_wide(name) == is_wide]
            if some:
                totals = [self._totals[name] for name in some]
                added = [parts[n].view_as(t).to(t.dtype) for n, t in zip(some, totals, strict=True)]
                torch._foreach_add_(totals, added)
        if new:  # copied: a view of the pack would keep all of it
            torch._foreach_copy_(list(new.values()), [parts[name].view_as(total) for name, total in new.items()])
        self._totals |= new

    @staticmethod
    def _dtype(parameter: torch.Tensor) -> torch.dtype:
        return torch.promote_types(parameter.dtype, torch.float32)

    def _new(self, name: str, make: Callable[..., torch.Tensor]) -> torch.Tensor:
        p = self._parameters[name]  # contiguous, whatever the parameter is
        return make(p.shape, dtype=self._dtype(p), device=p.device)

    @contextlib.contextmanager
    def handing_over(self, take: Taker | None) -> Iterator[None]:
        """Hand the sum of a parameter over as soon as it is final; only while the last contributions come.

        Args:
            take: takes name and sum, float32; None to keep all until `result`.
        """
        self._take = take
        try:
            yield
        finally:
            self._take = None

    def close(self, *names: str) -> None:
        """Note that nothing more of this batch is added to the sums of these parameters."""
        if self._take is None:
            return
        for name in names:
            if name not in self._final:
                self._final[name] = self._scaled(name).float()
                self._take(name, self._final[name])

    def _scaled(self, name: str) -> torch.Tensor:
        p, total = self._parameters[name], self._totals.pop(name, None)
        if total is None:
            return torch.zeros_like(p, dtype=self._dtype(p)) if is_sharded(p) else self._new(name, torch.zeros)
        total = total.to(self._dtype(p))
        total = sharded_like(p, total) if is_sharded(p) else total
        if self.scale is not None:
            self.scale.apply_(name, total)
        return total

    def result(self) -> ClippedSums:
        """Name -> sum, in the parameter's shape, float32 (float64 for float64 parameters); the sum itself, no copy.

        The sums of float64 parameters that were handed over are float32.

        What is added afterwards would not be scaled, so nothing can be.
        """
        for name in self._parameters:
            if name not in self._final:
                self._final[name] = self._scaled(name)
        sums = {name: self._final[name] for name in self._parameters}
        if self.scale is not None and self.scale.count_weight:
            first = local_of(next(iter(sums.values())))
            sums[COUNT] = first.new_tensor([self.scale.count_weight * self._count])
        if self._measured is not None:
            sums[MEASURES] = self._measured.to(local_of(next(iter(sums.values()))))
        return ClippedSums(sums)
