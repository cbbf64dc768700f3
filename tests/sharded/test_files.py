"""Files of models in shards hold whole tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from hf_dpopt.common.sharding import gathered, scattered, sharded_like, whole_of
from hf_dpopt.huggingface.shards import write_whole_models


@pytest.fixture
def weight():
    """A sharded parameter of a group of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = nn.Linear(4, 6)
    fully_shard(model)
    yield model.weight
    dist.destroy_process_group()


def state(weight: torch.Tensor) -> dict[str, Any]:
    moment = sharded_like(weight, torch.arange(24.0).view(6, 4))
    row = sharded_like(weight, torch.ones(6, 4, dtype=torch.float64))
    return {"state": {0: {"step": torch.tensor(3.0), "exp_avg": moment}}, "filters": [(row, 0.5)], "name": "adamw"}


def test_ranks_that_write_nothing_keep_nothing(weight):
    """Gathered tensors of the others are dropped one after the other; what was kept is cut again."""
    before = state(weight)
    kept, dropped = gathered(before), gathered(before, keeps=False)
    assert [list(copy["state"][0]["exp_avg"].values())[0] is None for copy in (kept, dropped)] == [False, True]
    again = scattered(kept, weight)["state"][0]["exp_avg"]
    assert torch.equal(whole_of(again), whole_of(before["state"][0]["exp_avg"]))


def test_accelerate_gathers_the_weights_whatever_it_is_asked_for():
    asked: list[str] = []
    plugin = SimpleNamespace(state_dict_type="SHARDED_STATE_DICT", set_state_dict_type=asked.append)
    write_whole_models(SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin)))
    assert asked == ["FULL_STATE_DICT"]
    write_whole_models(SimpleNamespace(state=SimpleNamespace()))
