"""The loader's path: each step's records once, on one rank, in one physical batch, with and without workers."""

from __future__ import annotations

import copy
import functools
import pickle
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import datasets
import pytest
import torch
from accelerate.data_loader import skip_first_batches
from torch.utils.data import DataLoader

from hf_dpopt import PrivacyConfig, PrivateRun, make_plan
from hf_dpopt.common.collectives import Ranks
from hf_dpopt.records.rows import spread
from hf_dpopt.run.batches import (
    LogicalBatch,
    LogicalBatchSampler,
    Records,
    StepIndices,
    keep_uncollated,
)
from hf_dpopt.users.user_batches import of_rows

NUM_RECORDS, NUM_STEPS = 50, 12
SAMPLINGS = ["poisson", "truncated_poisson", "fixed_order"]


def records(num_records: int = NUM_RECORDS) -> list[dict[str, Any]]:
    return [{"input_ids": list(range(1 + (7 * i) % 11)), "labels": i} for i in range(num_records)]


class _Plain(torch.utils.data.Dataset):
    """Only what a map-style dataset must have."""

    def __init__(self, rows: list[Any]):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        assert isinstance(i, int)  # not a list of them, not a numpy scalar
        return self.rows[i]


DATASETS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "map-style": _Plain,
    "datasets": datasets.Dataset.from_list,
    "subset": lambda rows: torch.utils.data.Subset(_Plain(rows), range(len(rows))),
}


@pytest.fixture
def make_run(tmp_path):
    runs = []

    def make(
        sampling: str = "truncated_poisson", expected: int = 8, num_steps: int = NUM_STEPS, num_examples=NUM_RECORDS
    ) -> PrivateRun:
        config = PrivacyConfig(
            noise_multiplier=1.0, expected_batch_size=expected, sampling=sampling, adjacency="zero_out"
        )
        plan = make_plan(config, num_examples=num_examples, num_steps=num_steps)
        folder = tmp_path / str(len(runs))
        runs.append(PrivateRun(plan, output_dir=folder / "out", private_state_dir=folder / "keys"))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


def loader(run: PrivateRun, dataset: Any, num_workers: int = 0) -> DataLoader:
    sampler = LogicalBatchSampler(run.plan.sampler.steps_per_epoch, lambda: run)
    return DataLoader(
        Records(dataset, of_rows), batch_sampler=sampler, collate_fn=keep_uncollated, num_workers=num_workers
    )


def served(batches: Any) -> dict[int, list[int]]:
    """Step -> which records, by the label that numbers them."""
    batches = list(batches)
    assert all(type(batch) is LogicalBatch for batch in batches)
    assert len({batch.step for batch in batches}) == len(batches)
    return {batch.step: sorted(record["labels"] for record in batch.records) for batch in batches}


def drawn(run: PrivateRun, steps: Any) -> dict[int, list[int]]:
    return {step: sorted(run.draw(step).tolist()) for step in steps}


# --- the loader ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", DATASETS)
def test_an_item_is_a_step(kind, num_workers, make_run):
    run = make_run()
    steps = range(1, run.plan.sampler.steps_per_epoch + 1)
    items = loader(run, DATASETS[kind](records()), num_workers)
    assert len(items) == len(steps)
    assert served(items) == drawn(run, steps)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("num_steps", [1, 7, 12, 20])
def test_epochs_together_serve_every_step_once(sampling, num_steps, make_run):
    """Seven steps make an epoch here: less than one, exactly one, more, and with a rest."""
    run = make_run(sampling, num_steps=num_steps)
    items, seen = loader(run, records()), {}
    for epoch in range(-(-num_steps // len(items))):
        items.batch_sampler.batch_sampler.set_epoch(epoch)  # as the Trainer does
        part = served(items)
        assert not part.keys() & seen.keys()
        seen |= part
    assert seen == drawn(run, range(1, num_steps + 1))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_empty_batches_are_items_too(num_workers, make_run):
    """At rate 1/20, 36% of the batches are empty: none among 60 has probability 3e-12, and none full likewise."""
    run = make_run("poisson", expected=1, num_steps=60, num_examples=20)
    seen: dict[int, list[int]] = {}
    items = loader(run, records(20), num_workers)
    for epoch in range(3):
        items.batch_sampler.set_epoch(epoch)
        seen |= served(items)
    assert seen == drawn(run, range(1, 61))
    assert [] in seen.values() and any(seen.values())


def test_nothing_is_looked_up_for_an_empty_batch():
    class Untouchable:
        def __getitem__(self, i):
            raise AssertionError

        __getitems__ = __getitem__

    batch = Records(Untouchable(), of_rows).__getitems__(StepIndices([], 4))
    assert batch.records == [] and batch.step == 4


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("skip", [0, 1, 3, 6])
@pytest.mark.parametrize("epoch", [0, 1])
def test_skipping_ahead_reaches_the_same_batches(epoch, skip, num_workers, make_run):
    """What the Trainer does on a resume: skip first, then set the epoch through accelerate's wrapper."""
    run = make_run(num_steps=14)
    items = skip_first_batches(loader(run, records(), num_workers), skip)
    items.batch_sampler.batch_sampler.set_epoch(epoch)
    assert served(items) == drawn(run, range(7 * epoch + skip + 1, 7 * epoch + 8))


def test_a_key_is_needed_only_when_iteration_starts(make_run):
    """The Trainer makes the loader, and asks for its length, before the run is opened."""
    box: list[PrivateRun] = []
    sampler = LogicalBatchSampler(7, lambda: box[0])
    items = DataLoader(Records(records(), of_rows), batch_sampler=sampler, collate_fn=keep_uncollated)
    assert len(items) == 7
    box.append(make_run())
    assert served(items) == drawn(box[0], range(1, 8))


# --- ranks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_shares_of_the_ranks_are_a_partition(sampling, world_size, make_run):
    """Every record of a step on exactly one rank; with 64 ranks most shares are empty, and are items all the same."""
    run = make_run(sampling)
    shares = []
    for rank in range(world_size):
        run.ranks = Ranks(world_size, rank)
        shares.append(served(loader(run, records())))
    want = drawn(run, range(1, 8))
    assert all(share.keys() == want.keys() for share in shares)
    for step, indices in want.items():
        dealt = [i for share in shares for i in share[step]]
        assert sorted(dealt) == indices and len(set(dealt)) == len(dealt)
        sizes = [len(share[step]) for share in shares]
        assert max(sizes) - min(sizes) <= 1


# --- what travels to workers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("indices", [[], [3], [5, 1, 4]])
@pytest.mark.parametrize("travel", [lambda x: pickle.loads(pickle.dumps(x)), copy.copy, copy.deepcopy])
def test_indices_keep_their_step(indices, travel):
    """A subclass of list loses its attributes on the way unless it says how it is made."""
    there = travel(StepIndices(indices, 17))
    assert type(there) is StepIndices and there.step == 17 and there == indices


# --- physical batches ------------------------------------------------------------------------------------------------


def _collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [-1] * (width - len(row["input_ids"])) for row in rows])
    labels = torch.tensor([row["labels"] for row in rows])
    return {"input_ids": ids, "attention_mask": (ids >= 0).long(), "labels": labels}


@pytest.mark.parametrize("size", [1, 3, 4, 49, 50, 1000])
def test_no_record_is_lost_or_doubled(size):
    rows = records()
    batches = list(LogicalBatch(rows, 1).physical(size, _collate))
    assert Counter(i for b in batches for i in b["labels"].tolist()) == Counter(range(NUM_RECORDS))
    sizes = [len(b["labels"]) for b in batches]
    assert all(s == size for s in sizes[:-1]) and 0 < sizes[-1] <= size


def test_physical_batches_are_ordered_by_length():
    """Ten of fifty records each: no batch is padded further than the next one begins."""
    rows = records()
    masks = [b["attention_mask"] for b in LogicalBatch(rows, 1).physical(10, _collate)]
    lengths = [mask.sum(dim=1).tolist() for mask in masks]
    flat = [n for batch in lengths for n in batch]
    assert flat == sorted((len(row["input_ids"]) for row in rows), reverse=True)
    assert all(mask.size(1) == max(batch) for mask, batch in zip(masks, lengths, strict=True))


@pytest.mark.parametrize("tokens", [1, 5, 24, 60, 10_000])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_limit_on_tokens_holds_for_every_batch_of_several_records(size, tokens):
    batches = list(LogicalBatch(records(), 1).physical(size, _collate, tokens))
    assert Counter(i for b in batches for i in b["labels"].tolist()) == Counter(range(NUM_RECORDS))
    shapes = [tuple(b["input_ids"].shape) for b in batches]
    most = min(tokens, size * shapes[0][1])  # `size` of the longest are the bound of memory
    assert all(num == 1 or num * width <= most for num, width in shapes)
    for num, width in shapes[:-1]:  # and no batch could take one record more
        assert (num + 1) * width > most, (num, width)


def _beside_tokens(kind: str, i: int) -> dict[str, Any]:
    """A record that is more than the tokens that it is sorted by: the first has most of those, the others more rest."""
    first, many = i == 0, 64
    if kind == "prompts of pairs":
        return {"prompt_ids": [5] * (2 if first else many), "chosen_ids": [6] * (many if first else 2),
                "rejected_ids": [7] * (many if first else 2)}  # fmt: skip
    ids = [5] * (many if first else 2)
    rest: dict[str, Any] = {"targets of a decoder": [6] * (2 if first else many), "a picture": [[0.5] * 32] * 4}
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": rest.get(kind, 0), "place": i}


def _collate_more(kind: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    if kind == "prompts of pairs":
        pairs = pytest.importorskip("hf_dpopt.huggingface.preferences", reason="TRL is in the test extra")
        return pairs.PairCollator(pairs.DPOTrainer.__init__.__globals__["DataCollatorForPreference"](0))(rows)
    if kind == "what the model does not take":  # the longest
        rows = [{**row, "input_ids": [5, 5]} for row in rows if len(row["input_ids"]) < 64]
    width, last = max(len(row["input_ids"]) for row in rows), [row["labels"] for row in rows]
    ids = torch.tensor([row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows])
    targets = torch.tensor([row + [-100] * (64 - len(row)) for row in last] if "decoder" in kind else last)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": targets,
            "texts": [str(row["place"]) for row in rows]}  # fmt: skip


@pytest.mark.parametrize(
    "kind", ["targets of a decoder", "a picture", "prompts of pairs", "what the model does not take"]
)
def test_a_batch_that_is_filled_takes_no_more_memory_than_that_of_the_largest(kind):
    """Else a record that is drawn decides whether a step has room, and an end for want of it tells of the record."""
    size, rows = 3, [_beside_tokens(kind, i) for i in range(40)]
    batches = list(LogicalBatch(rows, 1).physical(size, functools.partial(_collate_more, kind), sys.maxsize))
    assert sum(len(b["input_ids"]) for b in batches) == 40 - (kind == "what the model does not take")
    largest = [max(v[0].numel() for v in b.values() if isinstance(v, torch.Tensor)) for b in batches]
    assert all(len(b["input_ids"]) * n <= size * max(largest) for b, n in zip(batches, largest, strict=True))
    for b in batches if kind != "prompts of pairs" else ():
        assert len(b["texts"]) == len(b["input_ids"])


def test_the_logical_batch_is_left_as_it_was():
    rows = records()
    batch = LogicalBatch(rows, 1)
    first = [b["labels"].tolist() for b in batch.physical(7, _collate)]
    assert batch.records is rows and rows == records()
    assert [b["labels"].tolist() for b in batch.physical(7, _collate)] == first


def test_an_empty_batch_has_no_physical_batch():
    """No collator takes an empty list."""
    assert list(LogicalBatch([], 1).physical(4, _collate)) == []


@pytest.mark.parametrize("kind", ["several records in a row", "several rows of a record", "a record left out"])
def test_a_row_is_a_record(kind):
    """The clip bounds rows: a record in two of them would count twice. What a collator does to a batch, it cannot do
    to one record; a record of which it makes two rows adds nothing."""
    collate, left = {
        "several records in a row": (_flattening, 4),
        "several rows of a record": (
            lambda part: {name: x.repeat_interleave(2, dim=0) for name, x in _collate(part).items()},
            0,
        ),
        "a record left out": (lambda part: _collate(part[1:] or part), 4),
    }[kind]
    found = [i for b in LogicalBatch(records(4), 1).physical(4, collate) for i in b["labels"].tolist()]
    assert sorted(found) == list(range(left))


def _flattening(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    ids = torch.tensor([[i for row in rows for i in row["input_ids"]]])
    return {"input_ids": ids, "labels": torch.tensor([rows[0]["labels"]])}


def test_a_sample_is_spread_over_what_there_is():
    assert spread(50, 3) == [0, 24, 49] and spread(1, 2) == [0]


def test_rows_without_a_mask_are_not_padded():
    """Without a mask, padding is text: one long record moves the gradients of the others (3.4 C measured)."""

    def unmasked(rows):
        return {name: x for name, x in _collate(rows).items() if name != "attention_mask"}

    batches = list(LogicalBatch(records(), 1).physical(50, unmasked))
    assert Counter(i for b in batches for i in b["labels"].tolist()) == Counter(range(NUM_RECORDS))
    assert all((b["input_ids"] >= 0).all() for b in batches)
    same_length = [{"input_ids": [1, 2, 3], "labels": i} for i in range(4)]
    assert len(list(LogicalBatch(same_length, 1).physical(2, unmasked))) == 2
