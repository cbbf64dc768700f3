"""Sum of a step over the ranks in buckets, which travel while the last physical batch is still at work.

Every rank sends the same buckets in the same order, whatever it has computed: the order is that of the names, given
once, and a bucket leaves when its tensors and all buckets before it are final on this rank.

A bucket is summed on every rank (all-reduce), or each rank receives the sum of its own piece alone (reduce-scatter):
where the noise is drawn piece by piece, the pieces travel once more with their noise on them, and both ways together
take as many bytes as one all-reduce, that of ordinary data parallel training.

Shape legend: L = elements of a bucket, one tensor after the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hf_dpopt.common import collectives
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.types import ClippedSums, JointSums

MOST_IN_FLIGHT = 2  # buckets that are sent at a time: copies of that much of the sums


@dataclasses.dataclass(frozen=True)
class Layout:
    """Cut of a step into buckets of whole tensors, and of a bucket into a piece for each rank.

    Args:
        names: names of the tensors of each bucket, in the order in which they travel.
        sizes: name -> elements of the tensor.
    """

    names: tuple[tuple[str, ...], ...]
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, order: Sequence[str], sizes: Mapping[str, int]) -> Layout:
        """Fill buckets in order, each up to `BUCKET_ELEMENTS` or one larger tensor."""
        found: list[list[str]] = []
        room = 0
        for name in order:
            if not found or sizes[name] > room:
                found.append([])
                room = collectives.BUCKET_ELEMENTS
            found[-1].append(name)
            room -= sizes[name]
        return cls(tuple(map(tuple, found)), dict(sizes))

    @property
    def order(self) -> list[str]:
        """All names, in the order in which they travel."""
        return [name for bucket in self.names for name in bucket]

    @property
    def lengths(self) -> list[int]:
        """L of each bucket."""
        return [sum(self.sizes[name] for name in bucket) for bucket in self.names]


def piece_of(num: int, rank: int, size: int) -> tuple[int, int]:
    """First element of a rank's piece of L, and the one after its last; all but the last pieces are of one length."""
    each = -(-num // size)
    return min(num, rank * each), min(num, (rank + 1) * each)


@dataclasses.dataclass
class _Sent:
    """A bucket on its way."""

    tensors: list[torch.Tensor]
    flat: torch.Tensor
    received: torch.Tensor
    work: Any


class Reduction:
    """Sum of one step over the ranks of a run.

    Args:
        ranks: the processes.
        layout: cut of the sums, the same on every rank; None to sum nothing before `finish`.
        in_pieces: whether this rank receives its pieces alone. What it holds of the others afterwards is no sum, and
            `JointSums` of that kind may be given to the noise that was asked for that layout, and to nothing else.
    """

    def __init__(self, ranks: collectives.Ranks, layout: Layout | None = None, *, in_pieces: bool = False):
        self._ranks, self._layout, self._in_pieces = ranks, layout, in_pieces
        self._final: dict[str, torch.Tensor] = {}
        self._left = iter(layout.names if layout is not None else ())
        self._next = next(self._left, None)
        self._sent: list[_Sent] = []

    @property
    def runs_ahead(self) -> bool:
        """Whether tensors may be handed over before all are final."""
        return self._layout is not None

    def ready(self, name: str, total: torch.Tensor) -> None:
        """Take a tensor that is final on this rank, and send the buckets that are complete.

        Args:
            name: its name in the layout.
            total: float32, contiguous; it is overwritten, and belongs to the reduction until `finish`.
        """
        assert self._layout is not None and name not in self._final, name
        self._final[name] = total
        while self._next is not None and all(n in self._final for n in self._next):
            self._send([self._final[n] for n in self._next])
            self._next = next(self._left, None)

    def finish(self, sums: ClippedSums) -> JointSums:
        """Send what is left, wait for all, and give the sums over the ranks: the tensors that were handed over.

        Raises:
            DPConfigError: if there are other tensors than in the layout.
        """
        if self._layout is None:
            return self._ranks.sum(sums)
        if self._layout.sizes != {name: total.numel() for name, total in sums.items()}:
            raise DPConfigError("The sums of a step are of other tensors than those it began with.")
        for name in self._layout.order:
            if name not in self._final:
                self.ready(name, sums[name])
            assert self._final[name] is sums[name], f"{name} was replaced after it was sent"
        while self._sent:
            self._receive(self._sent.pop(0))
        return JointSums(sums)

    def _send(self, tensors: list[torch.Tensor]) -> None:
        if len(self._sent) == MOST_IN_FLIGHT:
            self._receive(self._sent.pop(0))
        size, num = self._ranks.size, sum(t.numel() for t in tensors)
        each = -(-num // size)
        parts = [t.reshape(-1) for t in tensors]
        if self._in_pieces and each * size != num:
            parts.append(parts[0].new_zeros(each * size - num))
        flat = torch.cat(parts)
        if self._in_pieces:
            received = flat.new_empty(each)
            work = collectives.reduce_scatter(received, flat)
        else:
            received, work = flat, dist.all_reduce(flat, op=dist.ReduceOp.SUM, async_op=True)
        self._sent.append(_Sent(tensors, flat, received, work))

    def _receive(self, sent: _Sent) -> None:
        sent.work.wait()
        first = 0
        if self._in_pieces:
            num = sum(t.numel() for t in sent.tensors)
            first, _ = piece_of(num, self._ranks.rank, self._ranks.size)
        for total, piece in _beside(sent.tensors, first, sent.received):
            total.copy_(piece)


def _beside(
    tensors: Sequence[torch.Tensor], first: int, piece: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield views of the elements from `first` on of the joined tensors, and the parts of a piece that they take."""
    start = 0
    for tensor in tensors:
        low, high = max(first, start), min(first + piece.numel(), start + tensor.numel())
        if low < high:
            yield tensor.view(-1)[low - start : high - start], piece[low - first : high - first]
        start += tensor.numel()
