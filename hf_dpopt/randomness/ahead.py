"""Normals of a step, drawn by cores that have nothing else to do while the step computes its gradients."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from hf_dpopt.randomness.blocks import NormalsOfBlocks, ranges_of
from hf_dpopt.randomness.cores import usable_cores
from hf_dpopt.randomness.spans import Span

AHEAD_BYTES = 2**30  # of normals that are held at most; the rest of a larger model is drawn when it is added


def spare_cores(device: torch.device) -> int:
    """Number of cores that are free while a step computes on a device: those that torch does not use."""
    used = torch.get_num_threads() if device.type == "cpu" else 1
    return max(usable_cores() - used, 0)


class Ahead:
    """Normals of one step that threads draw in the background, in the order in which they will be added.

    What is not drawn when `stop` is called is left to the caller, so nobody ever waits for more than a chunk. The
    values are those of the foreground: whether and how far anything was drawn ahead changes no bit. They live in
    memory alone, as the key does, until the object is dropped.

    Args:
        key: key of the step, which must have been charged; 32 bytes.
        spans: what will be asked for.
        num_threads: threads, >= 1.
    """

    def __init__(self, key: bytes, spans: Sequence[Span], num_threads: int):
        self._key, self._is_stopped = key, False
        self._places: dict[Span, int] = {}
        num = 0
        for span in spans:
            for cut in ranges_of(0, span.first, span.num):
                if 4 * (num + cut.num) <= AHEAD_BYTES:
                    self._places[Span(span.tensor, cut.first, cut.num)] = num
                    num += cut.num
        self._normals, self._drawn = np.empty(num, dtype=np.float32), set[Span]()
        left = iter(list(self._places.items()))  # hands out each once, whichever thread asks
        self._threads = [threading.Thread(target=self._draw, args=(left,)) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def _draw(self, left: Iterator[tuple[Span, int]]) -> None:
        normals = NormalsOfBlocks()
        for span, place in left:
            if self._is_stopped:
                return
            self._normals[place : place + span.num] = normals.draw_range(self._key, *span)
            self._drawn.add(span)  # whole: a chunk that a fork or a stop left half drawn is not among them

    def stop(self) -> None:
        """End the threads, each after the chunk that it is at; in a child of a fork they have ended already."""
        self._is_stopped = True
        for thread in self._threads:
            thread.join()

    def find(self, span: Span) -> np.ndarray | None:
        """Normals of a chunk's part that was drawn, float32, (num,), not to be written to; None if it was not.

        To be called after `stop`.
        """
        assert self._is_stopped, "what threads still write is not looked at"
        if span not in self._drawn:
            return None
        place = self._places[span]
        return self._normals[place : place + span.num]
