"""Independent noise, fresh in every step: the mechanism of DP-SGD, and the trivial strategy C = B = I.

Formal guarantee: if one record moves the sum of step t by at most ``query_sensitivity`` (L2, over all tensors
together), step t is a Gaussian mechanism, and steps compose with fresh noise each. Every coordinate of every tensor is
noised in every step, the empty one included. Abadi et al. (2016), arXiv:1607.00133, Alg. 1.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from hf_dpopt.common.collectives import BUCKET_ELEMENTS, Ranks
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.reduction import Layout, piece_of
from hf_dpopt.noise.registry import INDEPENDENT, Setting, register
from hf_dpopt.noise.strategy import NoiseStrategy, ToeplitzStrategy
from hf_dpopt.noise.streams import NoiseStream
from hf_dpopt.randomness.source import AddressedSource, NoiseSource, Part


@dataclasses.dataclass(frozen=True)
class IdentityStrategy(ToeplitzStrategy):
    """Independent noise, as in DP-SGD."""

    name: ClassVar[str] = "identity"
    is_independent: ClassVar[bool] = True

    @property
    def num_bands(self) -> int | None:
        return 1

    def strategy_coefs(self, n: int) -> np.ndarray:
        coefs = np.zeros(n)
        coefs[0] = 1.0
        return coefs

    def noising_coefs(self, n: int) -> np.ndarray:
        return self.strategy_coefs(n)

    def restarted(self, every: int) -> NoiseStrategy | None:
        raise DPConfigError("Independent noise has nothing to restart: leave noise_restart_every out.")

    def _make_stream(self, source: NoiseSource, backend: str, common: dict[str, Any]) -> NoiseStream:
        return IndependentStream(source, draw_stddev=common["scale"])


class IndependentStream(NoiseStream):
    """Noise of any number of steps, which a step needs the key alone for.

    Args:
        source: standard normals under a key that no other stream uses.
        draw_stddev: stddev of a coordinate; absolute, in gradient units; 0 adds nothing.
    """

    def __init__(self, source: NoiseSource, *, draw_stddev: float):
        self.draw_stddev = draw_stddev
        self._source = source
        self._last_step = -1
        self._device = torch.device("cpu")
        self._ranks = Ranks()
        self._layout: Layout | None = None

    def add_(self, sums: dict[str, torch.Tensor], step: int) -> None:
        """Add the noise of `step` in place, to every coordinate of every tensor.

        Args:
            sums: clipped sums over the whole logical batch, float32; the tensors of all ranks and shards together, for
                a tensor's noise depends on the position of its name in sorted order.
            step: optimizer step; larger than in every earlier call, for a step's noise hides one batch only.

        Raises:
            DPConfigError: for a step that had its noise already, or sums that are not float32.
        """
        if step <= self._last_step:
            raise DPConfigError(
                f"The noise of step {step} was asked for after that of step {self._last_step}. A step's noise hides "
                "one batch only: count the steps upwards."
            )
        if any(total.dtype != torch.float32 for total in sums.values()):
            raise DPConfigError("Noise is added to float32 sums: what is rounded before it is noised is not covered.")
        self._last_step = step
        numbers = {name: tensor for tensor, name in enumerate(sorted(sums))}
        totals = {tensor: sums[name] for name, tensor in numbers.items()}
        self._device = next((total.device for total in totals.values()), self._device)
        if self._layout is not None or self._is_shared(totals.values()):
            assert isinstance(self._source, AddressedSource)
            whole = Flattened(totals, self._layout, numbers)
            add_in_slices(self._source, whole, stddev=self.draw_stddev, step=step, ranks=self._ranks)
        else:
            self._source.add_to(totals, stddev=self.draw_stddev, step=step)

    def share_over(self, ranks: Ranks, layout: Layout | None = None) -> None:
        self._ranks, self._layout = ranks, layout

    def takes_pieces(self, device: torch.device) -> bool:
        self._device = device
        return self._is_shared(())

    def _is_shared(self, totals: Iterable[torch.Tensor]) -> bool:
        """Whether each rank draws a slice: where it takes time, and with a source that can. All ranks agree on it."""
        can = isinstance(self._source, AddressedSource) and all(total.is_contiguous() for total in totals)
        if self._ranks.size == 1 or not can:
            return False
        assert isinstance(self._source, AddressedSource)
        return bool(self._ranks.largest(int(not self._source.is_drawn_at(self._device))))

    def continue_at(self, num_steps: int) -> None:
        """Nothing to bring back: steps are told apart by their numbers."""


@register(
    INDEPENDENT,
    sampler="truncated_poisson",
    summary="independent noise: DP-SGD",
    compared_with=("truncated_poisson",),
    max_steps=None,
)
def tune_independent(setting: Setting) -> NoiseStrategy:
    """Nothing to tune."""
    return IdentityStrategy()


# --- the draws of a step, shared over ranks; N = elements of all tensors together, in the order of their numbers -----


class Flattened:
    """Tensors of a step as one vector of N elements, of which parts are views; cut among the ranks, on each alike.

    Args:
        totals: number of the tensor within the step -> tensor, contiguous.
        layout: layout of sums that came in pieces; None where every rank has all of them, in ascending order.
        numbers: name in the layout -> number.
    """

    def __init__(
        self,
        totals: Mapping[int, torch.Tensor],
        layout: Layout | None = None,
        numbers: Mapping[str, int] | None = None,
    ):
        self._numbers = sorted(totals) if layout is None else [(numbers or {})[name] for name in layout.order]
        assert sorted(self._numbers) == sorted(totals), "an order of other tensors"
        self._flat = [totals[number].view(-1) for number in self._numbers]
        self._starts = [0, *itertools.accumulate(flat.numel() for flat in self._flat)]
        self._lengths = [self.num] if layout is None else layout.lengths  # of buckets, which every rank has a piece of

    @property
    def num(self) -> int:
        """N."""
        return self._starts[-1]

    def digest(self) -> int:
        """A number of 56 bits that tells which tensor lies where in the vector."""
        places = repr((self._numbers, self._starts)).encode()
        return int.from_bytes(hashlib.sha256(places).digest()[:7], "big")

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

    def bounds(self, rank: int, size: int) -> list[tuple[int, int]]:
        """First element of a rank in each bucket, and the one after its last."""
        found, start = [], 0
        for length in self._lengths:
            first, end = piece_of(length, rank, size)
            found.append((start + first, start + end))
            start += length
        return found


def add_in_slices(source: AddressedSource, whole: Flattened, *, stddev: float, step: int, ranks: Ranks) -> None:
    """Add ``stddev`` times the normals of a step to tensors, each rank to its slice, and give all of them to all.

    Formal guarantee: every rank leaves with the same bits, those of `NoiseSource.add_to` on one process where the
    ranks draw alike; the elements that the ranks drew for are counted, and the ranks have the same tensors in the
    same places, or it does not return. What a rank held outside of its slice before is overwritten.

    Args:
        source: draws any part of a tensor.
        whole: float32 tensors, whose slice of this rank is summed.
        stddev: what a normal is multiplied by.
        step: the step.
        ranks: the processes of the run.

    Raises:
        DPConfigError: if the slices of the ranks do not cover each element once: something would leave without noise,
            or two elements with the same.
    """
    slices = [whole.parts(first, end) for first, end in whole.bounds(ranks.rank, ranks.size)]
    mine = [part for parts in slices for part in parts]
    source.add_parts(mine, stddev=stddev, step=step)
    _check_cover(whole, [sum(part.total.numel() for part in parts) for parts in slices], ranks)
    noised, received = sum(part.total.numel() for part in mine), _exchange(whole, ranks)
    if noised + received != whole.num:
        raise DPConfigError(_uncovered(f"{noised} + {received} elements got noise, and there are {whole.num}"))


def _check_cover(whole: Flattened, noised: Sequence[int], ranks: Ranks) -> None:
    """Compare the slices that the ranks noised with the elements there are.

    Args:
        whole: the tensors.
        noised: elements that got noise on this rank, of each bucket.
        ranks: the processes of the run.
    """
    num, places, reached = whole.num, whole.digest(), 0
    bounds = whole.bounds(ranks.rank, ranks.size)
    rows = [[places, *of_bucket, count] for of_bucket, count in zip(bounds, noised, strict=True)]
    everyone = [row for theirs in ranks.gather(torch.tensor(rows)) for row in theirs.tolist()]
    if any(row[0] != places for row in everyone):
        raise DPConfigError(_uncovered("the ranks have other tensors in them, or the same in another order"))
    for _, first, end, their_noised in sorted(everyone, key=lambda row: (row[1], row[2])):
        if (first, their_noised) != (reached, end - first):
            break
        reached = end
    if reached != num:
        raise DPConfigError(_uncovered(f"of {num} elements {[tuple(row[1:]) for row in everyone]} got noise"))


def _uncovered(what: str) -> str:
    return (
        f"The slices of the ranks do not cover the sums ({what}), so some would be released without noise. Nothing "
        "was released. Start all processes with the same model, options and version of hf_dpopt."
    )


def _exchange(whole: Flattened, ranks: Ranks) -> int:
    """Write the slices of the other ranks over those of this one; return how many elements were received."""
    received = 0
    most = max(1, BUCKET_ELEMENTS // ranks.size)
    for bounds in zip(*(whole.bounds(rank, ranks.size) for rank in range(ranks.size)), strict=True):
        longest = max(end - first for first, end in bounds)
        for start in range(0, longest, most):
            length = min(most, longest - start)
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
