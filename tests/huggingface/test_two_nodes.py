"""Runs on two machines that share no private folder, see `tests.huggingface.two_nodes`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.helpers import tiny
from tests.huggingface import two_node_run, two_nodes
from tests.huggingface.two_node_run import USERS, authored, collate
from tests.reference import clipping as reference

pytestmark = [pytest.mark.two_process, pytest.mark.timeout(600), pytest.mark.xdist_group("two_nodes")]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    found = tmp_path_factory.mktemp("nodes")
    two_nodes.launch(lambda: two_node_run.main(found), found)
    return found


def _facts(root: Path, name: str) -> list[dict]:
    return [json.loads((root / "facts" / f"{name}-{rank}.json").read_text()) for rank in (0, 1)]


def test_the_disks_are_two(root):
    """Else nothing here tests anything: each node has files of its own, under the paths that both use."""
    assert not any((root / "disk").iterdir())
    assert (root / "node-0/records-keys/runs").is_dir() and not (root / "node-1/records-keys").exists()


@pytest.mark.parametrize("name", ["records", "users", "killed"])
def test_a_run_has_the_weights_and_the_cost_of_one_run(root, name):
    facts = _facts(root, name)
    assert [one["world"] for one in facts] == [2, 2] and facts[0]["charged"] == facts[1]["charged"]
    assert facts[0]["epsilon"] == facts[1]["epsilon"] == facts[0]["planned"]
    weights = [torch.load(root / f"{name}-{rank}.pt") for rank in (0, 1)]
    assert all(torch.equal(value, weights[1][key]) for key, value in weights[0].items())


def test_users_are_read_on_each_machine(root, tmp_path):
    """Every node has the index, and the run is that of one process."""
    assert [one["users"] for one in _facts(root, "users")] == [11, 11]
    alone = tiny.trainer(
        tmp_path / "out", private_state_dir=str(tmp_path / "keys"), train_dataset=authored(), max_steps=4,
        data_collator=collate, model=tiny.model(dropout=0.0), **USERS,
    )  # fmt: skip
    alone.train()
    assert reference.relative_error(torch.load(root / "users-0.pt"), tiny.weights(alone.model)) < 1e-5


def test_a_killed_run_takes_its_journal_again_on_both(root):
    assert [one["recovered"] for one in _facts(root, "killed")] == [[3, 3], [3, 3]]
    assert [one["charged"] for one in _facts(root, "killed")] == [[6], [6]]


def test_a_checkpoint_that_one_machine_lacks_is_refused_by_all(root):
    """The machine without the ledger has no statement either: it could not say how many keys were used."""
    facts = _facts(root, "one_alone")
    assert "checkpoint-2 is not there on the machine of process 1" in facts[0]["error"] and facts[0] == facts[1]
    assert (root / "node-0/one/out/privacy/statement.md").exists()
    assert not (root / "node-1/one/out/privacy").exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("unlike_users", "Process 1 reads other user ids in the column 'author' than process 0"),
        ("unlike_users_in_memory", "Process 1 reads other user ids in the column 'author' than process 0"),
        ("unlike_records", "Process 1 has other training records than process 0"),
        ("fewer_records", "Process 1 has other training records than process 0"),
    ],
)
def test_machines_with_unlike_data_are_refused_on_both(root, name, said):
    """One record with two numbers could be in a batch twice; nothing is charged, and no rank waits for another."""
    facts = _facts(root, name)
    assert said in facts[0]["error"] and facts[0] == facts[1]
    assert not (root / "shared" / name / "out/privacy").exists()


def test_a_head_is_not_trained_by_each_of_several_processes(root):
    facts = _facts(root, "head")
    assert "trained by one process" in facts[0]["error"] and facts[0] == facts[1]
