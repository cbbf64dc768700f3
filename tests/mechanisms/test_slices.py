"""Noise in slices: the ranks together add what one process adds, bit for bit, and an element left out stops all."""

from __future__ import annotations

import datetime
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hf_dpopt.common.collectives import current_ranks
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.reduction import Layout, piece_of
from hf_dpopt.noise import gaussian, independent_noise
from hf_dpopt.noise.gaussian import Flattened
from hf_dpopt.randomness.chacha import CHUNK, ChaCha20Gaussian
from tests.helpers.ranks import launch

KEY = bytes(range(32))
SHAPES = {"z": (3, CHUNK), "a": (1001,), "m": (), "none": (0, 4), "b": (7, 11, 13)}
SMALL = {"a": (), "b": (1,)}  # fewer elements than some numbers of ranks
STEPS = 3


def _sums(shapes: dict[str, tuple[int, ...]], step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def _released(shapes: Any, source: Any, ranks: Any = None) -> list[dict[str, torch.Tensor]]:
    stream, found = independent_noise(0.8).stream(source, 1.3), []
    if ranks is not None:
        stream.share_over(ranks)
    for step in range(STEPS):
        stream.add_(sums := _sums(shapes, step), step)
        found.append(sums)
    return found


# --- the cut ---


@pytest.mark.parametrize("num, size", [(0, 2), (1, 3), (2, 3), (10, 3), (2**40 + 1, 8), (7, 1)])
def test_slices_cover_every_element_once(num, size):
    bounds = [piece_of(num, rank, size) for rank in range(size)]
    assert bounds[0][0] == 0 and bounds[-1][1] == num
    assert all(a[1] == b[0] for a, b in itertools.pairwise(bounds))
    assert max(b - a for a, b in bounds) == -(-num // size)  # none has more to draw than it must


def test_parts_are_views_of_the_elements():
    totals = {5: torch.arange(6.0).view(2, 3), 1: torch.tensor(10.0), 3: torch.zeros(0), 9: torch.arange(20.0, 24.0)}
    flat = Flattened(totals)
    everything = torch.cat([totals[i].view(-1) for i in sorted(totals)])
    assert flat.num == len(everything) == 11
    rng = np.random.default_rng(0)
    for first, end in [(0, 11), (3, 3), (0, 1), (1, 7), *(sorted(rng.integers(0, 12, 2).tolist()) for _ in range(20))]:
        parts = flat.parts(first, end)
        found = torch.cat([part.total for part in parts]) if parts else torch.zeros(0)
        assert torch.equal(found, everything[first:end])
        for part in parts:
            assert torch.equal(part.total, totals[part.tensor].view(-1)[part.first : part.first + part.total.numel()])
    flat.parts(1, 2)[0].total.fill_(-1)
    assert totals[5][0, 0] == -1


# --- processes ---


def _work(size: int, folder: str) -> None:
    """What each rank releases, and what it raises."""
    rank = int(os.environ["RANK"])
    init, wait = f"file://{folder}/init", datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=size, timeout=wait)
    ranks, found = current_ranks(), {}
    drawn: list[int] = []

    class Watched(ChaCha20Gaussian):
        def add_parts(self, parts, *, stddev, step):
            drawn.append(sum(part.total.numel() for part in parts))
            super().add_parts(parts, stddev=stddev, step=step)

    found["all"] = _released(SHAPES, Watched(KEY), ranks)
    found["drawn"] = list(drawn)
    found["few"] = _released(SMALL, ChaCha20Gaussian(KEY), ranks)
    gaussian.BUCKET_ELEMENTS = 1000
    found["in buckets"] = _released(SHAPES, ChaCha20Gaussian(KEY), ranks)

    class OnDevice(ChaCha20Gaussian):  # of rank 0 alone: all ranks share the work, or they would wait for each other
        def is_drawn_at(self, device):
            return rank == 0

    found["unlike"] = _released(SHAPES, OnDevice(KEY), ranks)
    cut = gaussian.piece_of
    gaussian.piece_of = lambda num, r, n: (cut(num, r, n)[0] + (r == 1 and rank == 1), cut(num, r, n)[1])
    found["gap"] = _said(lambda: _released(SHAPES, ChaCha20Gaussian(KEY), ranks))
    gaussian.piece_of = cut
    found["other order"] = _in_layout(["c", "a", "b"] if rank == 1 else ["a", "b", "c"], ranks)
    shapes = {"a": (5 + (rank == 1),), "b": (5 - (rank == 1),)}
    found["other sizes"] = _said(lambda: _released(shapes, ChaCha20Gaussian(KEY), ranks))
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def _in_layout(order: list[str], ranks: Any) -> str:
    """What a rank says that has tensors of one size in an order of its own, in pieces."""
    stream, sums = independent_noise(0.8).stream(ChaCha20Gaussian(KEY), 1.3), {name: torch.zeros(12) for name in "abc"}
    stream.share_over(ranks, Layout.of(order, dict.fromkeys(order, 12)))
    return _said(lambda: stream.add_(sums, 1))


def _said(release: Callable[[], object]) -> str:
    try:
        release()
        return "released"
    except DPConfigError as error:
        return str(error)


@pytest.fixture(scope="module", params=[2, 3])
def found(request, tmp_path_factory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    launch(lambda: _work(request.param, str(folder)), request.param, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(request.param)]


@pytest.mark.timeout(300)
@pytest.mark.xdist_group("slices")
class TestProcesses:
    @pytest.mark.parametrize("case", ["all", "in buckets", "unlike"])
    def test_the_ranks_release_what_one_process_does(self, found, case):
        alone = _released(SHAPES, ChaCha20Gaussian(KEY))
        for rank in found:
            for step in range(STEPS):
                assert all(torch.equal(rank[case][step][name], alone[step][name]) for name in SHAPES)

    def test_fewer_elements_than_ranks(self, found):
        alone = _released(SMALL, ChaCha20Gaussian(KEY))
        assert all(torch.equal(rank["few"][s][n], alone[s][n]) for rank in found for s in range(STEPS) for n in SMALL)

    def test_each_draws_its_share(self, found):
        num = sum(torch.Size(shape).numel() for shape in SHAPES.values())
        for drawn in zip(*(rank["drawn"] for rank in found), strict=True):
            assert sum(drawn) == num and max(drawn) <= num // len(found) + 1

    def test_an_element_without_noise_stops_all_ranks(self, found):
        """Before anything is released, also on the ranks whose own slice is whole."""
        for rank in found:
            assert "do not cover the sums" in rank["gap"] and "Nothing was released" in rank["gap"]

    @pytest.mark.parametrize("case", ["other order", "other sizes"])
    def test_the_ranks_mean_the_same_elements(self, found, case):
        """Else each slice has noise, two of them have the same, and their difference has none."""
        for rank in found:
            assert "another order" in rank[case] and "Nothing was released" in rank[case]
