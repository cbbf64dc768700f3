"""Layouts of shards that are refused: sums and noise are cut by rows that FSDP2 dealt to all processes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from hf_dpopt.clipping import make_engine
from hf_dpopt.clipping.thresholds import FlatClipping
from hf_dpopt.common.errors import DPConfigError, UnsupportedModuleError


@pytest.fixture
def alone():
    """A group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))


def test_shards_of_fsdp2_are_allowed(alone):
    sharded = model()
    fully_shard(sharded)
    assert make_engine(sharded, FlatClipping(clipping_norm=1.0), "book_keeping").is_collective


class Positioned(nn.Module):
    """Uses a parameter beside its child, as vision models use their positions."""

    def __init__(self):
        super().__init__()
        self.positions, self.child = nn.Parameter(torch.randn(6)), nn.Linear(6, 6)

    def forward(self, x_BD):
        return self.child(x_BD + self.positions)


def positioned() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), Positioned(), nn.Linear(6, 1))


def _sum(sharded: nn.Module, x_BD: torch.Tensor) -> dict[str, torch.Tensor]:
    engine = make_engine(sharded, FlatClipping(clipping_norm=0.1), "book_keeping")
    sums = engine.empty_sum()
    engine.add_clipped_sum(sums, lambda: sharded(x_BD).squeeze(-1).square(), len(x_BD))
    return sums.result()


@pytest.mark.parametrize("where", ["itself", "its child"])
def test_a_sharded_module_that_runs_again_for_each_record_is_refused(alone, where):
    sharded = positioned()
    fully_shard(sharded[1] if where == "itself" else sharded[1].child)
    fully_shard(sharded)
    with pytest.raises(UnsupportedModuleError, match="belong to 1, which is sharded .*1.positions. Freeze them"):
        make_engine(sharded, FlatClipping(clipping_norm=1.0), "book_keeping")
    sharded[1].positions.requires_grad_(False)
    assert "1.child.weight" in make_engine(sharded, FlatClipping(clipping_norm=1.0), "book_keeping").parameters


def test_a_module_inside_of_a_sharded_one_runs_again_with_whole_weights(alone):
    """Its weights are gathered with those of the module that shards them, before the backward comes to it."""
    sharded, x_BD = positioned(), torch.randn(5, 4)
    want = _sum(sharded, x_BD)
    fully_shard(sharded)
    for name, total in _sum(sharded, x_BD).items():
        torch.testing.assert_close(total.full_tensor() if isinstance(total, DTensor) else total, want[name])


@pytest.mark.parametrize("dim", [0, 1])
def test_shards_of_something_else_are_refused(alone, dim):
    split = model()
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    split[0].weight = nn.Parameter(distribute_tensor(split[0].weight.detach(), mesh, [Shard(dim)]))
    with pytest.raises(DPConfigError, match="0.weight is sharded by something else than FSDP2.*plain data parallel"):
        make_engine(split, FlatClipping(clipping_norm=1.0), "book_keeping")


def test_replicas_of_shards_are_refused(alone):
    replicated = model()
    fully_shard(replicated, mesh=init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard")))
    with pytest.raises(DPConfigError, match="mesh of .1, 1. .*HSDP"):
        make_engine(replicated, FlatClipping(clipping_norm=1.0), "book_keeping")
