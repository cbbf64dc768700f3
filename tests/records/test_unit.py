"""Rows that are blocks or windows are recognised, and trained on only where the unit was asked for."""

from __future__ import annotations

import csv
import re
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, default_data_collator

from hf_dpopt import DPConfigError
from hf_dpopt.common import log
from hf_dpopt.records.unit import PEOPLE, recognise
from tests.helpers import tiny

VOCABULARY, LENGTH, CLS, SEP, PAD = 200, 32, 1, 2, 0


def _gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=2)
    )  # fmt: skip


def _documents(num: int = 60) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [[CLS, *rng.integers(5, VOCABULARY, rng.integers(3, 40)).tolist(), SEP] for _ in range(num)]


def _blocks(*, with_labels: bool, remainder: bool = False, **more: int) -> dict[str, list]:
    """As `group_texts` of run_clm.py and run_mlm.py makes them."""
    text = [token for document in _documents() for token in document]
    stop = len(text) if remainder else len(text) // LENGTH * LENGTH
    ids = [text[i : i + LENGTH] for i in range(0, stop, LENGTH)]
    columns: dict[str, list] = {"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]}
    if with_labels:
        columns["labels"] = [list(row) for row in ids]
    return columns | {name: [[value] * len(row) for row in ids] for name, value in more.items()}


def _windows(stride: int = 10) -> dict[str, list]:
    """As run_qa.py makes them: a question, and its context in windows that overlap."""
    rng = np.random.default_rng(1)
    rows: dict[str, list] = {"input_ids": [], "attention_mask": [], "start_positions": [], "example": []}
    for i in range(20):
        question = [CLS, *rng.integers(5, VOCABULARY, 4).tolist(), SEP]
        context = rng.integers(5, VOCABULARY, 20 + 30 * (i % 3 == 0)).tolist()
        room = 40 - len(question) - 1
        for start in range(0, max(1, len(context) - stride), room - stride):
            row = [*question, *context[start : start + room], SEP]
            rows["input_ids"].append(row + [PAD] * (40 - len(row)))
            rows["attention_mask"].append([1] * len(row) + [0] * (40 - len(row)))
            rows["start_positions"].append(0)
            rows["example"].append(i)
    rows["end_positions"] = rows["start_positions"]
    return rows


def _as_list(columns: dict[str, list]) -> list[dict[str, Any]]:
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


class _Lazy(torch.utils.data.Dataset):
    def __init__(self, columns: dict[str, list]):
        self.rows = _as_list(columns)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {name: torch.tensor(value) for name, value in self.rows[i].items()}


KINDS = {"arrow": Dataset.from_dict, "torch format": lambda c: Dataset.from_dict(c).with_format("torch"),
         "list": _as_list, "torch dataset": _Lazy,
         "transform": lambda c: Dataset.from_dict(c).with_transform(lambda batch: dict(batch))}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "columns",
    [
        _blocks(with_labels=True),
        _blocks(with_labels=False),
        _blocks(with_labels=False, special_tokens_mask=0),
        _blocks(with_labels=True, remainder=True, token_type_ids=0),
    ],
)
def test_blocks_are_recognised(columns, kind):
    found = recognise(KINDS[kind](columns), model=_gpt2())
    assert found is not None and found.kind == "blocks", found


@pytest.mark.parametrize("kind", KINDS)
def test_windows_are_recognised_where_their_ids_were_dropped(kind):
    columns = {name: values for name, values in _windows().items() if name != "example"}
    found = recognise(KINDS[kind](columns), padding_id=PAD)
    assert found is not None and found.kind == "windows" and "share a long piece" in found.seen


@pytest.mark.parametrize("name", ["overflow_to_sample_mapping", "example_id", "id", "document_id"])
def test_windows_are_recognised_by_their_ids(name):
    columns = _windows(stride=0)
    columns[name] = columns.pop("example")
    found = recognise(Dataset.from_dict(columns))
    assert found is not None and found.kind == "windows" and name in found.seen
    numbered = {**columns, name: list(range(len(columns[name])))}
    assert recognise(Dataset.from_dict(numbered)) is None


def test_packed_rows_of_trl_are_blocks():
    columns = {"input_ids": [[5] * 30, [6] * 20], "seq_lengths": [[10, 20], [20]]}
    found = recognise(Dataset.from_dict(columns), model=_gpt2())
    assert found is not None and "seq_lengths" in found.seen


def _fixed(num: int = 50, length: int = LENGTH) -> list[list[int]]:
    return np.random.default_rng(2).integers(5, VOCABULARY, (num, length)).tolist()


NO_ALARM: dict[str, dict[str, list]] = {
    "classification of one length": {"input_ids": _fixed(), "labels": [0, 1] * 25},
    "classification, label": {"input_ids": _fixed(), "label": [0, 1] * 25},
    "tags of one length": {"input_ids": _fixed(), "labels": [[0] * LENGTH] * 50},
    "prompts that are no targets": {"input_ids": _fixed(), "labels": [[-100, *row[1:]] for row in _fixed()]},
    "completions": {"input_ids": _fixed(), "completion_mask": [[1] * LENGTH] * 50},
    "texts cut at one length behind [CLS]": {"input_ids": [[CLS, *row] for row in _fixed()]},
    "padded texts": {
        "input_ids": _fixed(),
        "attention_mask": [[1] * (LENGTH - i % 3) + [0] * (i % 3) for i in range(50)],
    },
    "texts of unlike lengths": {"input_ids": _documents()},
    "short": {"input_ids": _fixed(length=8)},
    "the same text twice": {"input_ids": [row for row in _fixed() for _ in range(2)], "labels": [0, 1] * 50},
    "several questions to one context": {
        "input_ids": [
            [CLS, 7, 8, *question, SEP, *_fixed(1, 25)[0], SEP] for question in _fixed(40, 3)
        ],
        "start_positions": [9] * 40,
    },
    "ids that start anew": {"input_ids": _documents(), "idx": [*range(30), *range(30)]},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", NO_ALARM)
def test_records_are_left_alone(case, kind):
    columns = NO_ALARM[case]
    if kind == "torch dataset" and "label" in columns:
        columns = {**columns, "label": columns["label"]}
    assert recognise(KINDS[kind](columns), model=_gpt2(), padding_id=PAD) is None


@pytest.mark.parametrize("padding", ["max_length", False])
@pytest.mark.parametrize("task", ["glue-sst2", "glue-rte", "glue-cola"])
def test_no_alarm_on_real_records(task, padding, shared_data, minilm_path):
    """Classification and masked language modelling, one text per row, cut and padded or not."""
    path = shared_data / task / "train.tsv"
    with path.open(encoding="utf-8") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[1:1501]
    tokenizer = AutoTokenizer.from_pretrained(minilm_path)
    text = max(range(len(rows[0])), key=lambda i: len(rows[0][i]))
    batch = dict(tokenizer([row[text] for row in rows], truncation=True, max_length=16, padding=padding))
    model = BertForMaskedLM(
        BertConfig(vocab_size=99, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    )
    for more in ({}, {"labels": batch["input_ids"]}, {"label": [0] * len(rows)}):
        assert recognise(Dataset.from_dict({**batch, **more}), model=model, padding_id=0) is None


def _trainer(tmp_path, columns, **changes):
    return tiny.trainer(
        tmp_path / "out", model=_gpt2(), train_dataset=Dataset.from_dict(columns), max_steps=1,
        private_state_dir=str(tmp_path / "keys"), data_collator=default_data_collator, **changes,
    )  # fmt: skip


def _statement(tmp_path) -> str:
    return (tmp_path / "out" / "privacy" / "statement.md").read_text()


def test_blocks_are_refused_until_the_unit_is_asked_for(tmp_path):
    columns = _blocks(with_labels=True)
    with pytest.raises(DPConfigError, match=r"look like blocks.*--privacy_unit block.*--line_by_line.*document_id"):
        _trainer(tmp_path, columns)
    trainer = _trainer(tmp_path, columns, privacy_unit="block")
    trainer.train()
    assert trainer.privacy_spent().unit == "block"
    statement = _statement(tmp_path)
    assert "differential privacy for single *blocks* (rows that may hold text of several documents" in statement
    assert "No document and no person is protected as a whole" in statement


def test_rows_may_be_declared_to_be_records(tmp_path):
    """The statement says so in words that are the same for rows that look like blocks, and for others."""
    blocks, said = _blocks(with_labels=True), []
    for folder, rows in (("blocks", blocks), ("others", {k: [row[:12] for row in v] for k, v in blocks.items()})):
        _trainer(tmp_path / folder, rows, rows_are_records=True).train()
        statement = _statement(tmp_path / folder)
        assert "for single *examples*" in statement
        said.append(re.search(r"The user declared that each row is a whole record.*?\n\n", statement, re.DOTALL))
    assert said[0] is not None and said[1] is not None and said[0][0] == said[1][0]
    assert "look like blocks: " not in statement and str(LENGTH) not in said[0][0]


def test_the_document_is_the_unit_through_its_number(tmp_path):
    """Documents cut one by one, with the column that the refusal asks for."""
    cut = [(d, row[i : i + LENGTH]) for d, row in enumerate(_documents()) for i in range(0, len(row) - LENGTH, 4)]
    columns = {"input_ids": [row for _, row in cut], "labels": [row for _, row in cut]}
    with pytest.raises(DPConfigError, match="cut from one example|look like blocks"):
        _trainer(tmp_path, columns, expected_batch_size=3)
    columns["document_id"] = [d for d, _ in cut]
    changes = dict(privacy_unit="user", user_id_column="document_id", records_per_user=4, expected_batch_size=3)
    trainer = _trainer(tmp_path, columns, remove_unused_columns=True, **changes)
    trainer.train()
    assert trainer.plan.num_users == len(set(columns["document_id"]))


def test_what_a_trainer_makes_of_the_dataset_is_looked_at_too(tmp_path):
    trainer = _trainer(tmp_path, {"input_ids": _documents(), "labels": _documents()})
    trainer.train_dataset = Dataset.from_dict(_blocks(with_labels=True)).select(range(40))
    with pytest.raises(DPConfigError, match="look like blocks"):
        trainer.train()


def test_columns_of_people_are_recognised_by_their_names():
    people = "user users user_id userId author customer_id Patient ID customer-no username subject_id speaker"
    names = [*people.replace("Patient ID", "").split(), "Patient ID"]
    assert [name for name in names if not PEOPLE.fullmatch(name)] == []
    others = (
        "text label id idx subject input_ids labels document_id authority user_agent customer_review speakers_text"
    )
    assert [name for name in others.split() if PEOPLE.fullmatch(name)] == []


@pytest.mark.parametrize("kind", ["stored", "list"])
def test_a_column_of_people_that_is_not_used_is_named_once(tmp_path, kind, caplog, monkeypatch):
    monkeypatch.setattr(log, "_told", set())
    records = [{**record, "patient_id": i // 2} for i, record in enumerate(tiny.records())]
    dataset = Dataset.from_list(records) if kind == "stored" else records
    tiny.trainer(tmp_path, train_dataset=dataset)
    found = [r.getMessage() for r in caplog.records if "patient_id" in r.getMessage()]
    assert len(found) == 1 and found[0].endswith("--privacy_unit user --user_id_column patient_id.")


def test_people_who_are_protected_are_not_named(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(log, "_told", set())
    records = [{**record, "patient_id": i // 2} for i, record in enumerate(tiny.records())]
    tiny.trainer(tmp_path, train_dataset=records, privacy_unit="user", user_id_column="patient_id", records_per_user=2)
    assert "has the column" not in caplog.text
