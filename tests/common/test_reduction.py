"""Sums over ranks in buckets: those of one sum after the step, in one order on every rank."""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hf_dpopt.clipping import make_engine
from hf_dpopt.clipping.scaling import Scale
from hf_dpopt.clipping.thresholds import FlatClipping
from hf_dpopt.common import collectives
from hf_dpopt.common.collectives import Ranks, current_ranks
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.reduction import Layout, Reduction, piece_of
from hf_dpopt.noise import independent_noise
from hf_dpopt.randomness.chacha import ChaCha20Gaussian
from hf_dpopt.run.step import clip_and_sum, with_last
from tests.helpers.ranks import launch

KEY = bytes(range(32))
ENGINES = ("book_keeping", "two_pass")
SHARES = {2: ((3, 2), ()), 3: ((3, 2), (1,), ())}  # records of the physical batches of each rank


class Tied(nn.Module):
    """A model with a parameter that is used twice, one that is used once, and one that no record uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.middle, self.unused = nn.Embedding(31, 20), nn.Linear(20, 20), nn.Linear(5, 3)
        self.head = nn.Linear(20, 31, bias=False)
        self.head.weight = self.embedding.weight

    def losses(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = self.head(torch.tanh(self.middle(self.embedding(batch["input_ids"]))))
        labels = batch["labels"]
        return (
            nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
            .view(labels.shape)
            .mean(1)
        )


class Losses:
    """What `clip_and_sum` asks for losses."""

    def __init__(self, model: Tied):
        self.model = model

    def __call__(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.model.losses(batch)


def batches(rank: int, size: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7 + rank)
    made = []
    for i, num in enumerate(SHARES[size][rank]):
        ids, labels = (torch.randint(0, 31, (num, 4 + 3 * i), generator=generator) for _ in range(2))
        made.append({"input_ids": ids, "labels": labels})
    return made


def clipped(rank: int, size: int, engine: str, reduction: Reduction | None = None, scale: Scale | None = None) -> Any:
    model = Tied()
    made = make_engine(model, FlatClipping(clipping_norm=0.1), engine)
    losses: Any = Losses(model)
    return clip_and_sum(made, losses, batches(rank, size), [scale], sums_users=False, reduction=reduction)[0]


def layout_of(engine: str, *more: str) -> Layout:
    made = make_engine(Tied(), FlatClipping(clipping_norm=0.1), engine)
    sizes = {name: p.numel() for name, p in made.parameters.items()} | dict.fromkeys(more, 1)
    return Layout.of([*made.order_of_sums, *more], sizes)


class OnDevice(ChaCha20Gaussian):
    """A source that each rank asks for all noise, as on a GPU."""

    def is_drawn_at(self, device: torch.device) -> bool:
        return True


def step(rank: int, size: int, engine: str, source: Any) -> dict[str, torch.Tensor]:
    """What one step of a rank, as a run takes it, releases."""
    ranks, stream, layout = current_ranks(), independent_noise(0.8).stream(source, 0.1), layout_of(engine)
    stream.share_over(ranks)
    in_pieces = stream.takes_pieces(torch.device("cpu"))
    stream.share_over(ranks, layout if in_pieces else None)
    reduction = Reduction(ranks, layout, in_pieces=in_pieces)
    joint = reduction.finish(clipped(rank, size, engine, reduction))
    stream.add_(joint, 1)
    return dict(joint)


def _work(size: int, folder: str) -> None:
    rank = int(os.environ["RANK"])
    wait = datetime.timedelta(seconds=90)
    dist.init_process_group("gloo", init_method=f"file://{folder}/init", rank=rank, world_size=size, timeout=wait)
    collectives.BUCKET_ELEMENTS = 100  # several buckets
    found: dict[str, Any] = {}
    for engine in ENGINES:
        found[engine, "pieces"] = step(rank, size, engine, ChaCha20Gaussian(KEY))
        found[engine, "whole"] = step(rank, size, engine, OnDevice(KEY))
        after = current_ranks().sum(clipped(rank, size, engine))
        ahead = Reduction(current_ranks(), layout_of(engine))
        found[engine, "sums"] = (dict(after), dict(ahead.finish(clipped(rank, size, engine, ahead))))
        scale = Scale(factor=0.5, count_weight=2.0)
        counted = current_ranks().sum(clipped(rank, size, engine, scale=scale))
        ahead = Reduction(current_ranks(), layout_of(engine, *(counted.keys() - after.keys())))
        found[engine, "scaled"] = (dict(counted), dict(ahead.finish(clipped(rank, size, engine, ahead, scale))))
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=[3])  # of two, all bits are those of one sum
def found(request, tmp_path_factory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("reduction")
    launch(lambda: _work(request.param, str(folder)), request.param, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(request.param)]


def close(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor], size: int) -> bool:
    """Equal bits of two ranks; of three, whose numbers may be added in another order, up to rounding."""
    assert one.keys() == two.keys()
    far = {name: (one[name] - two[name]).abs().max().item() for name in one}
    return max(far.values()) <= (0.0 if size == 2 else 1e-7)


@pytest.mark.timeout(300)
@pytest.mark.xdist_group("reduction")
@pytest.mark.parametrize("engine", ENGINES)
class TestProcesses:
    @pytest.mark.parametrize("case", ["sums", "scaled"])
    def test_buckets_that_leave_early_hold_what_one_sum_at_the_end_does(self, found, engine, case):
        for rank in found:
            after, ahead = rank[engine, case]
            assert close(after, ahead, len(found)) and any(bool(total.any()) for total in after.values())

    @pytest.mark.parametrize("case", ["pieces", "whole"])
    def test_all_ranks_release_what_one_process_does(self, found, engine, case):
        sums = [clipped(rank, len(found), engine) for rank in range(len(found))]
        alone = {name: sum(of_rank[name] for of_rank in sums[1:]) + sums[0][name] for name in sums[0]}
        independent_noise(0.8).stream(ChaCha20Gaussian(KEY), 0.1).add_(alone, 1)
        for rank in found:
            assert close(rank[engine, case], alone, len(found))
            assert all(torch.equal(rank[engine, case][n], found[0][engine, case][n]) for n in alone)


@pytest.mark.parametrize("sizes", [{"a": 3}, {"a": 60, "b": 60, "c": 500, "d": 1, "e": 0}, {}])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_buckets_and_pieces_cover_every_element_once(monkeypatch, sizes, ranks):
    monkeypatch.setattr(collectives, "BUCKET_ELEMENTS", 100)
    layout = Layout.of(list(sizes), sizes)
    assert layout.order == list(sizes)
    for bucket, num in zip(layout.names, layout.lengths, strict=True):
        assert num <= 100 or len(bucket) == 1
        bounds = [piece_of(num, rank, ranks) for rank in range(ranks)]
        assert bounds[0][0] == 0 and bounds[-1][1] == num
        assert all(a[1] == b[0] for a, b in zip(bounds, bounds[1:], strict=False))


def test_sums_of_other_tensors_are_refused():
    reduction = Reduction(Ranks(), Layout.of(["a"], {"a": 3}))
    with pytest.raises(DPConfigError, match="other tensors"):
        reduction.finish({"b": torch.zeros(3)})  # type: ignore[arg-type]


def test_nothing_is_added_to_a_sum_that_was_handed_over():
    model = Tied()
    engine = make_engine(model, FlatClipping(clipping_norm=0.1), "book_keeping")
    sums, taken = engine.empty_sum(), {}
    batch = batches(0, 2)[0]
    with sums.handing_over(taken.__setitem__):
        engine.add_clipped_sum(sums, lambda: model.losses(batch), 3)
    assert taken.keys() == engine.parameters.keys()
    assert all(sums.result()[name] is total for name, total in taken.items())
    with pytest.raises(AssertionError, match="was taken"):
        engine.add_clipped_sum(sums, lambda: model.losses(batch), 3)


@pytest.mark.parametrize("num", [0, 1, 3])
def test_the_last_batch_is_known(num):
    assert list(with_last(range(num))) == [(i, i == num - 1) for i in range(num)]
