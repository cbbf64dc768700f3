"""Noise of a step in slices: every rank draws the share of its own elements, and all receive all of them.

Shape legend: N = elements of all tensors of a step together, one after the other in the order of their numbers.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping

import torch

from hf_dpopt.common.collectives import BUCKET_ELEMENTS, Ranks
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.randomness.source import AddressedSource
from hf_dpopt.randomness.spans import Part, Span


def slice_of(num: int, rank: int, size: int) -> tuple[int, int]:
    """First element of a rank's slice of N, and the one after its last: the slices are disjoint and cover all."""
    return num * rank // size, num * (rank + 1) // size


class Flattened:
    """Tensors of a step as one vector of N elements, of which parts are views.

    Args:
        totals: number of the tensor within the step -> tensor, contiguous.
    """

    def __init__(self, totals: Mapping[int, torch.Tensor]):
        self._numbers = sorted(totals)
        self._flat = [totals[number].view(-1) for number in self._numbers]
        self._starts = [0, *itertools.accumulate(flat.numel() for flat in self._flat)]

    @property
    def num(self) -> int:
        """N."""
        return self._starts[-1]

    def parts(self, first: int, end: int) -> list[Part]:
        """Views of elements ``first .. end - 1``, in their order."""
        found, i = [], max(bisect.bisect_right(self._starts, first) - 1, 0)
        while i < len(self._flat) and self._starts[i] < end:
            start, stop = self._starts[i], self._starts[i + 1]
            low, high = max(first, start) - start, min(end, stop) - start
            if low < high:
                found.append(Part(self._numbers[i], low, self._flat[i][low:high]))
            i += 1
        return found


def add_in_slices(
    source: AddressedSource, totals: Mapping[int, torch.Tensor], *, stddev: float, step: int, ranks: Ranks
) -> list[Span]:
    """Add ``stddev`` times the normals of a step to tensors that are the same on all ranks, in place.

    Formal guarantee: every rank leaves with the same bits, those of `NoiseSource.add_to` on one process where the
    ranks draw alike; the elements that got noise are counted, on all ranks, before it returns.

    Args:
        source: draws any part of a tensor.
        totals: number of the tensor within the step -> float32 tensor, contiguous.
        stddev: what a normal is multiplied by.
        step: the step.
        ranks: the processes of the run.

    Returns:
        What this rank drew.

    Raises:
        DPConfigError: if the slices of the ranks do not cover each element once: something would leave without noise.
    """
    whole = Flattened(totals)
    first, end = slice_of(whole.num, ranks.rank, ranks.size)
    mine = whole.parts(first, end)
    source.add_parts(mine, stddev=stddev, step=step)
    noised = sum(part.total.numel() for part in mine)
    _check_cover(whole.num, first, end, noised, ranks)
    received = _exchange(whole, ranks)
    if noised + received != whole.num:
        raise DPConfigError(_uncovered(f"{noised} + {received} elements got noise, and there are {whole.num}"))
    return [Span(part.tensor, part.first, part.total.numel()) for part in mine]


def _check_cover(num: int, first: int, end: int, noised: int, ranks: Ranks) -> None:
    """Compare the slices that the ranks noised with the elements there are."""
    everyone = [row.tolist() for row in ranks.gather(torch.tensor([num, first, end, noised]))]
    reached = 0
    for their_num, their_first, their_end, their_noised in everyone:
        if (their_num, their_first, their_noised) != (num, reached, their_end - their_first):
            break
        reached = their_end
    if reached != num:
        raise DPConfigError(_uncovered(f"of {num} elements {[tuple(row[1:]) for row in everyone]} got noise"))


def _uncovered(what: str) -> str:
    return (
        f"The slices of the ranks do not cover the sums ({what}), so some would be released without noise. Nothing "
        "was released. Start all processes with the same model, options and version of hf_dpopt."
    )


def _exchange(whole: Flattened, ranks: Ranks) -> int:
    """Write the slices of the other ranks over those of this one; return how many elements were received."""
    bounds = [slice_of(whole.num, rank, ranks.size) for rank in range(ranks.size)]
    longest, received = max(end - first for first, end in bounds), 0
    bucket = max(1, BUCKET_ELEMENTS // ranks.size)
    for start in range(0, longest, bucket):
        length = min(bucket, longest - start)
        views = [whole.parts(min(first + start, end), min(first + start + length, end)) for first, end in bounds]
        device = next((part.total.device for parts in views for part in parts), torch.device("cpu"))
        own = torch.zeros(length, device=device)
        _copy(views[ranks.rank], own, outwards=True)
        for rank, theirs in enumerate(ranks.gather(own)):
            if rank != ranks.rank:
                received += _copy(views[rank], theirs, outwards=False)
    return received


def _copy(parts: list[Part], buffer: torch.Tensor, *, outwards: bool) -> int:
    """Copy parts to the front of a buffer, or from it; return how many elements."""
    place = 0
    for part in parts:
        beside = buffer[place : place + part.total.numel()]
        (beside if outwards else part.total).copy_(part.total if outwards else beside)
        place += part.total.numel()
    return place
