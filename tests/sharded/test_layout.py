"""Layouts of shards that are refused: sums and noise are cut by rows that FSDP2 dealt to all processes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from hf_dpopt.clipping import make_engine
from hf_dpopt.clipping.thresholds import FlatClipping
from hf_dpopt.common.errors import DPConfigError


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
