"""Files of states in shards: what is written is read again, marks tell the way, and a lost folder is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.sharding import gathered, is_sharded, scattered, sharded_like, whole_of
from hf_dpopt.huggingface.shards import write_whole_models
from hf_dpopt.run.shards import folder_of, has_marks, read_shards, write_shards


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


def test_a_state_in_shards_is_read_again(weight, tmp_path):
    file, before = tmp_path / "optimizer.pt", state(weight)
    torch.save(write_shards(before, file), file)
    rest = torch.load(file, weights_only=True)
    assert has_marks(rest) and folder_of(file) == tmp_path / "optimizer_shards"
    after = read_shards(rest, file, weight)
    assert after["name"] == "adamw" and after["state"][0]["step"] == 3 and after["filters"][0][1] == 0.5
    for one, two in (
        (before["state"][0]["exp_avg"], after["state"][0]["exp_avg"]),
        (before["filters"][0][0], after["filters"][0][0]),
    ):
        assert is_sharded(two) and two.placements == one.placements and two.dtype == one.dtype
        assert torch.equal(whole_of(one), whole_of(two))


def test_shards_that_are_not_there_are_refused(weight, tmp_path):
    rest = write_shards(state(weight), tmp_path / "optimizer.pt")
    with pytest.raises(DPConfigError, match="released_state_shards is not there.*a disk that all machines see"):
        read_shards(rest, tmp_path / "released_state.pt", weight)


def test_a_state_without_shards_has_no_folder(tmp_path):
    assert write_shards({"step": 1}, tmp_path / "optimizer.pt") == {"step": 1}
    assert not has_marks({"step": 1}) and not list(tmp_path.iterdir())


def test_ranks_that_write_nothing_keep_nothing(weight):
    """Gathered tensors of the others are dropped one after the other; what was kept is cut again."""
    before = state(weight)
    kept, dropped = gathered(before), gathered(before, keeps=False)
    assert [list(copy["state"][0]["exp_avg"].values())[0] is None for copy in (kept, dropped)] == [False, True]
    again = scattered(kept, weight)["state"][0]["exp_avg"]
    assert torch.equal(whole_of(again), whole_of(before["state"][0]["exp_avg"]))


@pytest.mark.parametrize(
    "kind, on_each_node, in_shards",
    [("FULL_STATE_DICT", False, False), ("SHARDED_STATE_DICT", False, True), ("SHARDED_STATE_DICT", True, False)],
)
def test_what_accelerate_is_asked_for_decides(kind, on_each_node, in_shards):
    """Weights are whole in any case; a machine with checkpoints of its own would lack the shards of others."""
    asked: list[str] = []
    plugin = SimpleNamespace(state_dict_type=kind, set_state_dict_type=asked.append)
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))
    assert write_whole_models(accelerator, saves_on_each_node=on_each_node) == in_shards
    assert asked == ([] if kind == "FULL_STATE_DICT" else ["FULL_STATE_DICT"])
    assert write_whole_models(SimpleNamespace(state=SimpleNamespace()), saves_on_each_node=False) is False
