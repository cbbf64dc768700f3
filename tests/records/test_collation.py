"""Collation of records and the joining of their rows, without a model."""

from __future__ import annotations

import importlib
import itertools
import random

import numpy as np
import pytest
import torch
import transformers as tf

from hf_dpopt.records.collation import KNOWN, Collation, is_known
from hf_dpopt.records.limits import Limits, Positions, Range
from hf_dpopt.records.trial import pair_of_records, try_collation
from tests.helpers import tiny


class _Subclass(tf.DataCollatorWithPadding):
    """Looks like a known collator, and is none."""


def test_records_of_no_table_meet_a_collator_with_their_like():
    """`default_data_collator` takes columns and types of a batch from its first record."""
    rows = [{"input_ids": [5, 6], "label": label} for label in (101, 0.45, 0.7)]
    parts = Collation(tf.default_data_collator).parts(rows)
    assert {i: v for part in parts for i, v in zip(part.places, part.batch["labels"].tolist(), strict=True)} == (
        pytest.approx({0: 101, 1: 0.45, 2: 0.7})
    )
    (part,) = Collation(tf.default_data_collator).parts(rows[1:])
    assert part.places == (0, 1)


def test_known_collators_are_those_that_were_read():
    for module, names in KNOWN.items():
        for name in names:
            found = getattr(importlib.import_module(module), name)
            assert is_known(found) or isinstance(found, type)
    assert is_known(tf.DataCollatorWithPadding(tokenizer=None)) and not is_known(_Subclass(tokenizer=None))
    assert not is_known(tiny.collate)


def test_rows_are_joined_as_a_padding_collator_would():
    rows = tiny.records(6)
    (part,) = Collation(tiny.collate, padding_id=0).parts(rows)
    want = tiny.collate(rows)
    assert part.places == tuple(range(6)) and part.batch.keys() == want.keys()
    assert all(torch.equal(part.batch[key], want[key]) for key in want)


def test_targets_of_another_length_are_padded_apart():
    def pairs(rows: list[dict]) -> dict:
        (row,) = rows
        source, target = torch.tensor([row["s"]]), torch.tensor([row["t"]])
        return {"input_ids": source, "attention_mask": torch.ones_like(source), "labels": target}

    (part,) = Collation(pairs, padding_id=9).parts([{"s": [1, 2, 3], "t": [4]}, {"s": [5], "t": [6, 7, 8]}])
    assert part.batch["input_ids"].tolist() == [[1, 2, 3], [5, 9, 9]]
    assert part.batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert part.batch["labels"].tolist() == [[4, -100, -100], [6, 7, 8]]


def test_a_row_that_does_not_fit_alone_does_not_fit_beside_others():
    """Whether a record is in the sum would depend on the others, if padding could make up for what it lacks."""

    def pairs(rows: list[dict]) -> dict:
        (row,) = rows
        ids = torch.tensor([row["s"]])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.tensor([row["t"]])}

    limits = Limits({"input_ids": Range(9, "words")}, {"input_ids": Positions(4, None)}, per_token=("labels",))
    unlike = [{"s": [1, 2, 3], "t": [4]}, {"s": [5], "t": [6, 7, 8]}]  # padded, they would have as many
    good, unknown, long = {"s": [1, 2], "t": [1, 2]}, {"s": [1, 9], "t": [1, 2]}, {"s": [1] * 5, "t": [1] * 5}
    collation = Collation(pairs, limits=limits)
    for others in ([], unlike, [unknown], [long], [*unlike, unknown, long]):
        for records in itertools.permutations([*others, good, good]):
            (part,) = collation.parts(records)
            assert part.places == tuple(i for i, record in enumerate(records) if record is good)
            assert part.batch["input_ids"].tolist() == [[1, 2], [1, 2]]


def test_what_padding_cannot_make_alike_stays_apart():
    def pictures(rows: list[dict]) -> dict:
        (row,) = rows
        return {"pixels": torch.zeros(1, *row["size"]), "name": [row["name"]]}

    rows = [{"size": (2, 2), "name": "a"}, {"size": (3, 3), "name": "b"}, {"size": (2, 2), "name": "c"}]
    parts = Collation(pictures).parts(rows)
    assert [part.places for part in parts] == [(0, 2), (1,)]
    assert parts[0].batch["name"] == ["a", "c"]


# --- the trial ---------------------------------------------------------------------------------------------------------


class _Words:
    """Pads, as far as transformers' collators ask."""

    padding_side, pad_token_id, deprecation_warnings = "right", 0, {}

    def pad(self, features, return_tensors=None, **_):
        width = max(len(f["input_ids"]) for f in features)
        padded = {"input_ids": [f["input_ids"] + [0] * (width - len(f["input_ids"])) for f in features]}
        padded["attention_mask"] = [[1] * len(f["input_ids"]) + [0] * (width - len(f["input_ids"])) for f in features]
        padded |= {k: [f[k] for f in features] for k in features[0] if k not in padded}
        return {k: torch.tensor(v) if return_tensors == "pt" else v for k, v in padded.items()}


class _Shifts:
    def prepare_decoder_input_ids_from_labels(self, labels):
        return torch.cat(
            [torch.zeros_like(labels[:, :1]), labels[:, :-1].masked_fill(labels[:, :-1] == -100, 0)], dim=1
        )


def test_decoder_inputs_are_labels_shifted_before_they_are_padded():
    collate = tf.DataCollatorForSeq2Seq(_Words(), model=_Shifts())
    records = [{"input_ids": [5] * n, "labels": list(range(1, n + 1))} for n in (2, 7, 4)]
    try_collation(Collation(collate), records)
    with pytest.raises(ValueError, match="mixes records: 'labels'"):
        try_collation(Collation(lambda some: _centred(collate(some))), records)


def _centred(batch):
    return {**batch, "labels": batch["labels"] - batch["labels"].float().mean().long()}


def test_choices_are_padded_in_their_last_dimension():
    def collate(some):
        width = max(len(ids) for row in some for ids in row["input_ids"])
        ids = [[choice + [0] * (width - len(choice)) for choice in row["input_ids"]] for row in some]
        ids = torch.tensor(ids)
        return {
            "input_ids": ids,
            "attention_mask": ids.ne(0).long(),
            "labels": torch.tensor([r["labels"] for r in some]),
        }

    records = [{"input_ids": [[5] * n, [6] * (n + 1)], "labels": 0} for n in (2, 7, 4)]
    try_collation(Collation(collate), records)
    (part,) = Collation(collate).parts(records)
    assert part.batch["input_ids"].tolist() == collate(records)["input_ids"].tolist()


def test_records_of_tensors_without_a_dimension():
    records = [{"input_ids": torch.arange(4), "attention_mask": torch.ones(4), "label": torch.tensor(1)}] * 2
    try_collation(Collation(tf.default_data_collator), records)
    (part,) = Collation(tf.default_data_collator).parts(records)
    assert part.batch["labels"].tolist() == [1, 1]


class _WithoutMask(_Words):
    def pad(self, features, **how):
        return {k: v for k, v in super().pad(features, **how).items() if k != "attention_mask"}


def test_a_known_collator_without_a_mask_is_not_believed():
    """Padding that nothing marks counts as text, so records of unlike lengths stay apart."""
    collation = Collation(tf.DataCollatorWithPadding(_WithoutMask()))
    parts = collation.parts([{"input_ids": [5] * n} for n in (3, 6, 3)])
    assert collation.sees_batches and [part.places for part in parts] == [(0, 2), (1,)]


class _Object:
    def __init__(self, label):
        self.label = label


IDS = {"input_ids": [5, 6], "attention_mask": [1, 1]}
VALUES = (
    1, 0.7, 2.0, True, None, "a", "longer", 2**70, np.float32(0.3), np.int64(2), torch.tensor(0.6), torch.tensor(3),
    [1, 2], [0.25, 0.75], [101, 100.45], [100.95, 100], [True, 2], [], [[]], [[], [1.0]], [[1], [2, 3]], [[0.5], [1.5]],
    [np.int64(1), np.int64(2)], [np.float64(0.5), 0.25], [np.array([1.0]), np.array([2.0])], [None, 1], (1, 2),
    [torch.tensor(1), torch.tensor(2)], [torch.tensor(0.5), torch.tensor(2)], np.array([1, 2]), np.array([1.5, 2]),
    np.array([]), np.array([1, 2], np.float32), torch.tensor([0.5, 1.5]), torch.tensor([1, 2]), torch.empty(0),
    torch.tensor([0.5, 1.5], dtype=torch.float64),
)  # fmt: skip
UNLIKE = [
    *({**IDS, name: value} for name in ("label", "labels", "label_ids", "position_ids", "weight") for value in VALUES),
    *({"input_ids": value, "attention_mask": [1, 1]} for value in VALUES),
    {"label": 0.4, **IDS}, {"attention_mask": [1, 1], "input_ids": [5, 6], "labels": 0.4}, _Object(0.5), _Object(1),
]  # fmt: skip


@pytest.mark.parametrize("collate", [tf.default_data_collator, tf.DataCollatorWithPadding(_Words())])
def test_the_row_of_a_record_does_not_depend_on_the_others(collate):
    """The stock collators take columns and types from the first record of what they are given."""

    def rows(records):
        parts = Collation(collate).parts(records)
        return {place: {k: v[b].tolist() for k, v in part.batch.items() if isinstance(v, torch.Tensor)}
                for part in parts for b, place in enumerate(part.places)}  # fmt: skip

    alone = [rows([record]).get(0) for record in UNLIKE]
    rng = random.Random()
    pairs = [[a, b] for a, b in itertools.permutations(range(len(UNLIKE)), 2) if a // len(VALUES) == b // len(VALUES)]
    crowds = [[rng.randrange(len(UNLIKE)) for _ in range(rng.randint(3, 12))] for _ in range(300)]
    for chosen in (*pairs, *crowds):
        found = rows([UNLIKE[k] for k in chosen])
        assert {i: alone[k] for i, k in enumerate(chosen) if alone[k] is not None} == found


def test_records_of_a_list_that_agree_in_types_are_collated_at_once():
    seen: list[int] = []
    collation = Collation(tf.DataCollatorWithPadding(_Words()))
    collate, collation.collate = collation.collate, lambda some: seen.append(len(some)) or collate(some)
    records = [{"input_ids": [5] * n, "label": label} for n, label in ((3, 0), (6, 1), (2, 1), (4, 0.5))]
    assert sorted(place for part in collation.parts(records) for place in part.places) == [0, 1, 2, 3]
    assert seen == [3, 1]


# --- two records of the dataset --------------------------------------------------------------------------------------


def _tokens_with_labels(rows: list[dict]) -> dict:
    def padded(name: str, value: int) -> torch.Tensor:
        widest = max(len(row["input_ids"]) for row in rows)
        return torch.tensor([row[name] + [value] * (widest - len(row[name])) for row in rows])

    mask = (padded("input_ids", 0) > 0).long()
    return {"input_ids": padded("input_ids", 0), "attention_mask": mask, "labels": padded("labels", -100)}


def _record(length: int, *, learned_from: int = 0) -> dict:
    ids = list(range(1, length + 1))
    return {"input_ids": ids, "labels": [-100] * learned_from + ids[learned_from:]}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 64])
@pytest.mark.parametrize("lengths", [[64] * 3, [64, 40, 20, 9, 3], [64, 63]])
def test_a_pair_needs_no_more_memory_than_a_physical_batch(size, lengths):
    """In float32, where training may be in bfloat16: two records count as four."""
    batch, alone = pair_of_records(Collation(_tokens_with_labels), [_record(n) for n in lengths], size)
    assert batch["input_ids"].size(1) <= min(size / 4, 1) * max(lengths)
    widths = [row["input_ids"].size(1) for row in alone]
    assert 0 < min(widths) < max(widths) == batch["input_ids"].size(1)
    assert all((row["labels"] != -100).any() for row in alone)


def test_a_pair_of_answers_keeps_what_is_learned():
    """The first quarter is the question: without the answer nothing would be compared."""
    records = [_record(64, learned_from=40), _record(64, learned_from=5)]
    batch, alone = pair_of_records(Collation(_tokens_with_labels), records, 1)
    assert batch["input_ids"].size(1) == 16 and all((row["labels"] != -100).any() for row in alone)
    batch, _ = pair_of_records(Collation(_tokens_with_labels), records[:1], 1)
    assert batch["input_ids"].size(1) == 64
