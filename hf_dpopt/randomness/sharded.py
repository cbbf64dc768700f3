"""Noise of the elements that lie on this rank, out of the one stream of the whole tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from hf_dpopt.common.collectives import Ranks
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.sharding import elements_of, is_sharded
from hf_dpopt.randomness.source import AddressedSource, NoiseSource, Part

FINGERPRINT_ROWS = 2**62  # rows from here on belong to no step: they tell keys apart, and are the same on every rank


class Place(NamedTuple):
    """Place of a tensor of a step on this rank."""

    whole: tuple[int, ...]  #: shape of the unsharded tensor
    first: int  #: number of the first element that lies here, of the flattened tensor
    num: int  #: number of elements that do
    is_sharded: bool


class ShardedSource(NoiseSource):
    """A source that is asked for shards, and draws the elements of the whole tensors that they are.

    Formal guarantee: element e of tensor k of a row is the same number on whichever rank it lies, that of the source
    it is made of; `place` returns only if every element of every tensor lies on exactly one rank, or, where a tensor
    is not sharded, on all. Nothing is drawn before that, and nothing for another number of elements.

    Args:
        source: draws for whole tensors.
        ranks: the processes of the run.
    """

    def __init__(self, source: AddressedSource, ranks: Ranks):
        self.whole = source
        self.stream, self.description = source.stream, source.description  # type: ignore[misc]
        self._ranks = ranks
        self._places: tuple[Place, ...] | None = None

    def place(self, sums: Mapping[str, torch.Tensor]) -> None:
        """Take the places of the tensors of a step, numbered by their names in sorted order; all ranks together.

        Args:
            sums: name -> tensor, sharded or not; the same in every step.

        Raises:
            DPConfigError: if an element lies on no rank, or on two; some would be released without noise.
        """
        places = tuple(
            Place(tuple(sums[name].shape), *elements_of(sums[name]), is_sharded(sums[name])) for name in sorted(sums)
        )
        if places == self._places:
            return
        everyone = self._ranks.every(lambda: places)
        for tensor, theirs in enumerate(zip(*everyone, strict=True)):
            _check_cover(sorted(sums)[tensor], theirs)
        self._places = places

    def normal(
        self, shape: Sequence[int], *, step: int, tensor: int, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        if step >= FINGERPRINT_ROWS:
            return self.whole.normal(shape, step=step, tensor=tensor, device=device)
        place = self._place_of(tensor, torch.Size(shape).numel())
        if not place.is_sharded:
            return self.whole.normal(shape, step=step, tensor=tensor, device=device)
        mine = torch.zeros(place.num, device=device)
        self.whole.add_parts([Part(tensor, place.first, mine)], stddev=1.0, step=step)
        return mine.view(torch.Size(shape))

    def add_to(self, totals: Mapping[int, torch.Tensor], *, stddev: float, step: int) -> None:
        if step >= FINGERPRINT_ROWS:
            super().add_to(totals, stddev=stddev, step=step)
            return
        flat: list[Part] = []
        for tensor, total in totals.items():
            place = self._place_of(tensor, total.numel())
            if total.is_contiguous():
                flat.append(Part(tensor, place.first, total.view(-1)))
            else:
                total.add_(self.normal(total.shape, step=step, tensor=tensor, device=total.device), alpha=stddev)
        self.whole.add_parts([part for part in flat if part.total.numel()], stddev=stddev, step=step)

    def _place_of(self, tensor: int, num: int) -> Place:
        place = None if self._places is None else self._places[tensor]
        if place is None or place.num != num:
            raise DPConfigError(
                f"Noise was asked for {num} elements of tensor {tensor}, of which "
                f"{0 if place is None else place.num} lie here: some would be released without noise. Nothing was "
                "released."
            )
        return place


def _check_cover(name: str, theirs: Sequence[Place]) -> None:
    """Check that every element of a tensor lies on one rank, or all of them on each."""
    if not _covers(theirs):
        where = ", ".join(f"{place.first} to {place.first + place.num - 1}" for place in theirs)
        raise DPConfigError(
            f"The shards of {name}, of shape {theirs[0].whole}, do not hold each of its elements once ({where}), so "
            "some would be released without noise, or with other noise on each rank. Nothing was released. Start all "
            "processes with the same model, options and version of hf_dpopt."
        )


def _covers(theirs: Sequence[Place]) -> bool:
    whole, reached = theirs[0].whole, 0
    num = torch.Size(whole).numel()
    if not any(place.is_sharded for place in theirs):
        return all(place == Place(whole, 0, num, False) for place in theirs)
    for place in theirs:
        if not place.is_sharded or place.whole != whole or place.first != reached:
            return False
        reached += place.num
    return reached == num
