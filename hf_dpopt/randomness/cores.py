"""Work in pieces on the processor cores that this process may use, whatever `OMP_NUM_THREADS` says.

`accelerate launch` sets that variable to 1, for torch; drawing noise is not torch's work.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Piece = TypeVar("Piece")

RANKS_HERE = "LOCAL_WORLD_SIZE"  # processes of the run on this machine, as torchrun and accelerate set it


def usable_cores() -> int:
    """Number of cores for one rank: those of the affinity mask, shared with the other ranks of this machine; >= 1."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get(RANKS_HERE, "")
    return max(1, here // max(1, int(ranks) if ranks.isdigit() else 1))


def run_in_pieces(
    pieces: Sequence[Piece], make_worker: Callable[[], Callable[[Piece], None]], num_threads: int
) -> None:
    """Do every piece once, on that many threads, the calling one among them; raise what a worker raised.

    Args:
        pieces: independent of each other. Who comes first takes the next one: a busy core does less.
        make_worker: called once per thread, for a worker owns scratch memory.
        num_threads: threads at most, >= 1.
    """
    left = iter(pieces)  # the iterator of a list hands out each element once, whichever thread asks

    def work(pieces: Iterator[Piece]) -> None:
        worker = make_worker()
        for piece in pieces:
            worker(piece)

    helpers = min(num_threads, len(pieces)) - 1
    if helpers <= 0:
        work(left)
        return
    with ThreadPoolExecutor(helpers) as pool:  # not kept: an idle pool does not survive a fork
        others = [pool.submit(work, left) for _ in range(helpers)]
        work(left)
        for other in others:
            other.result()
