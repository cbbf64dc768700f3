"""D10: two gloo processes release what one does: the same clipped sum, the noise once, the same epsilon, equal replicas."""

from __future__ import annotations

import json

import pytest
import torch

from tests.helpers import ranks
from tests.huggingface import two_process_run
from tests.reference import clipping as reference

HEAVY, PER_DEVICE = 3, 3  # the user with more than a physical batch of records, and that many of them

pytestmark = [
    pytest.mark.two_process,
    pytest.mark.timeout(600),  # twice 280 s at most
    pytest.mark.xdist_group("two_processes"),  # else every worker runs them
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    ranks.launch(lambda: two_process_run.main(two), 2, two)
    ranks.launch(lambda: two_process_run.main(one), 1, one)
    return one, two


def _load(folder, name, rank):
    return json.loads((folder / f"{name}-{rank}.json").read_text()), torch.load(folder / f"{name}-{rank}.pt")


def test_the_clipped_sum_equals_that_of_one_process(folders):
    one, two = folders
    facts, alone = _load(one, "sum", 0)
    facts0, rank0 = _load(two, "sum", 0)
    assert facts0["world"] == 2 and facts["world"] == 1
    assert facts0["drawn"] == facts["drawn"]
    for got, want in zip(rank0["grads"], alone["grads"], strict=True):
        assert reference.relative_error(got, want) < 1e-5


@pytest.mark.parametrize("name", ["noise", "blt", "dp2", "adadps", "users", "local", "query", "metrics"])
def test_noise_is_added_once(folders, name):
    one, two = folders
    _, alone = _load(one, name, 0)
    _, rank0 = _load(two, name, 0)
    for got, want in zip(rank0["grads"], alone["grads"], strict=True):
        assert reference.relative_error(got, want) < 1e-5  # the same key gives the same noise, not twice or half of it


def test_numbers_of_the_units_are_summed_once_over_the_ranks(folders):
    one, two = folders
    (alone, _), (rank0, _), (rank1, _) = _load(one, "metrics", 0), _load(two, "metrics", 0), _load(two, "metrics", 1)
    assert len(alone["numbers"]) >= 10  # a line each step; ranks may have had no unit
    assert rank0["numbers"] == pytest.approx(alone["numbers"], rel=1e-3)
    assert rank1["numbers"] == rank0["numbers"]


@pytest.mark.parametrize("name", [
    "sum", "noise", "empty", "private", "blt", "banded", "resumed", "dp2", "factored", "adadps", "users", "local",
    "query", "killed",
])  # fmt: skip
def test_replicas_are_bit_equal(folders, name):
    (_, rank0), (_, rank1) = _load(folders[1], name, 0), _load(folders[1], name, 1)
    assert all(torch.equal(p, rank1["weights"][n]) for n, p in rank0["weights"].items())


@pytest.mark.parametrize("name", ["noise", "private"])
def test_each_record_is_served_once(folders, name):
    (facts0, _), (facts1, _) = _load(folders[1], name, 0), _load(folders[1], name, 1)
    assert facts0["drawn"] == facts1["drawn"]
    for step, drawn in enumerate(facts0["drawn"]):
        assert sorted(facts0["served"][step] + facts1["served"][step]) == drawn


def test_a_user_is_on_one_rank(folders):
    """Also the heavy one, whose records fill several physical batches; the others' are elsewhere."""
    (facts0, _), (facts1, _) = _load(folders[1], "users", 0), _load(folders[1], "users", 1)

    assert facts0["drawn"] == facts1["drawn"] and any(HEAVY in drawn for drawn in facts0["drawn"])
    for drawn, *shares in zip(facts0["drawn"], facts0["served"], facts1["served"], strict=True):
        users = [{i % 11 if i < 40 else HEAVY for i in share} for share in shares]
        assert not users[0] & users[1] and users[0] | users[1] == set(drawn)
        num_heavy = sum(i % 11 == HEAVY if i < 40 else True for share in shares for i in share)
        assert num_heavy > PER_DEVICE or HEAVY not in drawn


@pytest.mark.parametrize("name", ["blt", "banded", "resumed"])
def test_ranks_and_worlds_have_the_same_strategy_and_epsilon(folders, name):
    facts = [_load(folders[0], name, 0)[0], *(_load(folders[1], name, rank)[0] for rank in (0, 1))]
    assert len({f["strategy"] for f in facts}) == len({f["epsilon"] for f in facts}) == 1


@pytest.mark.parametrize("world", [1, 2])
def test_a_killed_run_goes_on_on_every_rank(folders, world):
    """Rank 0 alone has the journal; the weights are those of the run in which the lost step made no update."""
    for rank in range(world):
        facts, _ = _load(folders[world - 1], "killed", rank)
        assert facts["taken_again"] == [4, 5, [5]] and facts["is_equal"]
        assert facts["spent"] == facts["planned"]


def test_empty_shares_make_noise_only_steps(folders):
    facts, tensors = _load(folders[1], "empty", 0)
    assert len(tensors["grads"]) == 5
    assert any(len(drawn) < 2 for drawn in facts["drawn"])
    assert all((g != 0).all() for step in tensors["grads"] for g in step.values())


def test_epsilon_and_wrapping(folders):
    (one, _), (two, _) = _load(folders[0], "private", 0), _load(folders[1], "private", 0)
    assert one["epsilon"] == two["epsilon"] == two["planned"]
    assert two["wrapped"] == "BertForSequenceClassification"  # no DistributedDataParallel
