"""Columns, labels and the real GLUE files. Counts are those of the files' own descriptions."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import ClassLabel, Dataset, Features, Value

from hf_dpopt import DPConfigError
from hf_dpopt.common import log
from recipes.glue_data import (
    GLUE_LABELS,
    Columns,
    build,
    encode_labels,
    find_columns,
    labels_of,
    read_label_list,
)
from recipes.options import ModelArguments
from recipes.sources import load_tables, table_of_dataset
from recipes.tables import Table


def table(lines: bool = False, **columns: Any) -> Table:
    size = len(next(iter(columns.values())))
    return Table("train.tsv", columns, list(range(2, 2 + size)) if lines else None)


@pytest.mark.parametrize(
    "names, expected",
    [
        ("sentence label", ("sentence", None, "label")),
        ("index sentence1 sentence2 label", ("sentence1", "sentence2", "label")),
        ("index question sentence label", ("question", "sentence", "label")),
        ("id qid1 qid2 question1 question2 is_duplicate", ("question1", "question2", "is_duplicate")),
        ("premise hypothesis label idx", ("premise", "hypothesis", "label")),
        ("sentence1 sentence2 label1 gold_label", ("sentence1", "sentence2", "gold_label")),
        ("index genre sentence1 sentence2 score", ("sentence1", "sentence2", "score")),
        ("source label mark sentence", ("sentence", None, "label")),
        ("text label", ("text", None, "label")),
        ("review labels id", ("review", None, "labels")),
        ("index sentence", ("sentence", None, None)),
    ],
)
def test_columns_are_recognised(names: str, expected: tuple) -> None:
    assert find_columns(table(**{name: ["x"] for name in names.split()})) == Columns(*expected)


def test_mrpc_columns_are_recognised() -> None:
    names = ["Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"]
    assert find_columns(Table("t", {n: ["1"] for n in names})) == Columns("#1 String", "#2 String", "Quality")


def test_named_columns_win() -> None:
    given = table(sentence=["a"], body=["b"], label=["0"], kind=["1"])
    assert find_columns(given, text="body", label="kind") == Columns("body", None, "kind")
    assert find_columns(given, text="sentence", pair="body") == Columns("sentence", "body", "label")


@pytest.mark.parametrize(
    "options, mend",
    [
        ({"text": "nope"}, r"no column 'nope' \(--text_column\). It has: 'title', 'body', 'label'"),
        ({"pair": "nope"}, r"--text_pair_column"),
        ({"label": "nope"}, r"--label_column"),
        (
            {"text": "nope", "label": "none", "user": "who"},
            r"no column 'nope' \(--text_column\) or 'none' \(--label_column\) or 'who' \(--user_id_column\)",
        ),
        ({}, "Name it with --text_column"),
    ],
)
def test_missing_columns_are_refused(options: dict[str, str], mend: str) -> None:
    with pytest.raises(DPConfigError, match=mend):
        find_columns(table(title=["a"], body=["b"], label=["0"]), **options)


@pytest.mark.parametrize("user", ["label", "body", "text"])
def test_users_in_a_column_of_texts_or_labels_are_refused(user: str) -> None:
    given = table(body=["a", "b"], label=["0", "1"], text=["u", "v"])
    with pytest.raises(DPConfigError, match=f"user_id_column='{user}': .* Name the column of user ids, or rename it"):
        build({"train": given}, text_column="body", user_id_column=user)


def test_label_map() -> None:
    assert labels_of(table(label=["b", "a", "b"]), "label") == ["a", "b"]
    assert labels_of(table(label=["10", "9", "-1"]), "label") == ["-1", "9", "10"]
    assert labels_of(table(label=[1, 0]), "label") == ["0", "1"]
    assert labels_of(table(label=["3", "2.5"]), "label") is None
    assert encode_labels(table(label=["b", "a"]), "label", ["a", "b"]) == [1, 0]
    assert encode_labels(table(label=["1", "positive"]), "label", GLUE_LABELS["sst2"]) == [1, 1]
    assert encode_labels(table(label=["9", "10"]), "label", ["10", "9"]) == [1, 0]  # names that are numbers, not ids
    assert encode_labels(table(label=["3.8", 1]), "label", None) == [3.8, 1.0]


@pytest.mark.parametrize(
    "labels, value, mend",
    [
        (["a", "b"], "c", "train.tsv, line 3: label 'c' is not one of 'a', 'b'. Correct the row, or add 'c'"),
        (["a", "b"], "2", "line 3: label '2' is not one of 'a', 'b', nor their number from 0 to 1. Correct"),
        (["a", "b"], "", "line 3: the label is empty. Give every record"),
        (["a", "b"], None, "line 3: the label is empty"),
        (None, "high", "line 3: 'high' is not a finite number"),
        (None, "nan", "line 3: 'nan' is not a finite number"),
    ],
)
def test_wrong_labels_are_refused_with_their_row(labels: list[str] | None, value: Any, mend: str) -> None:
    good = "a" if labels else "1.0"
    with pytest.raises(DPConfigError, match=mend):
        encode_labels(table(lines=True, label=[good, value, good]), "label", labels)


def test_label_columns_that_cannot_be_are_refused() -> None:
    with pytest.raises(DPConfigError, match="every label is 'a'. Training needs at least two"):
        labels_of(table(label=["a", "a"]), "label")
    with pytest.raises(DPConfigError, match="2000 different labels. Name the right column"):
        labels_of(table(label=[f"x{i}" for i in range(2000)]), "label")
    for wrong in ("a", "a,a", "a,,b"):
        with pytest.raises(DPConfigError, match="Write e.g. negative,positive"):
            read_label_list(wrong)
    assert read_label_list("no, yes") == ["no", "yes"]


def test_a_file_of_labels_is_no_list_of_labels(tmp_path: Path) -> None:
    (file := tmp_path / "labels.txt").write_text("no\nyes\n")
    with pytest.raises(DPConfigError, match=r"labels.txt' is a file, and names are wanted.*paste -sd, .*labels.txt"):
        read_label_list(str(file))


def test_the_label_list_is_said_to_be_public(caplog: pytest.LogCaptureFixture) -> None:
    tables = {"train": table(text=["x", "y"], label=["b", "a"])}
    with caplog.at_level(logging.WARNING):
        assert build(tables).labels == ["a", "b"]
        assert "treated as public" in caplog.text
        caplog.clear()
        assert build(tables, label_list=["b", "a"]).splits["train"]["label"] == [0, 1]
        assert caplog.text == ""


def test_numbers_are_said_to_be_those_of_the_list(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        data = build({"train": table(text=["x", "y"], label=["1", "0"])}, label_list=["bad", "good"])
    assert data.splits["train"]["label"] == [1, 0] and "0 is bad, 1 is good" in caplog.text


def test_validation_labels_come_from_training_not_from_validation() -> None:
    train, dev = table(text=["x", "y"], label=["a", "c"]), table(text=["x"], label=["b"])
    with pytest.raises(DPConfigError, match="label 'b' is not one of 'a', 'c'"):
        build({"train": train, "validation": dev})


def test_splits_must_agree() -> None:
    train, dev = table(text=["x", "y"], label=["a", "b"]), table(sentence1=["x"], sentence2=["y"], label=["a"])
    with pytest.raises(DPConfigError, match="Name them with --text_column"):
        build({"train": train, "validation": dev})
    with pytest.raises(DPConfigError, match="no label column recognised .* Name it with --label_column"):
        build({"train": table(text=["x"], other=["a"])}, text_column="text")
    with pytest.raises(DPConfigError, match="row 2: column 'text' holds int, not text. Name another"):
        build({"train": table(text=["x", 3], label=["a", "b"])})


def test_test_splits_may_be_unlabelled() -> None:
    train = table(text=["x", "y"], label=["0", "1"])
    for test in (table(text=["z"]), table(text=["z"], label=["-1"]), table(text=["z"], label=[-1])):
        assert build({"train": train, "test": test}, task="sst2").splits["test"].column_names == ["text"]


def test_hub_datasets_give_label_names() -> None:
    features = Features({"sentence": Value("string"), "label": ClassLabel(names=["no", "yes"])})
    dataset = Dataset.from_dict({"sentence": ["a", "b"], "label": [1, -1]}, features=features)
    assert table_of_dataset("d", dataset).columns == {"sentence": ["a", "b"], "label": ["yes", "-1"]}


@pytest.mark.parametrize("unit", ["example", "user"])
def test_a_column_of_people_that_is_dropped_is_named(
    tmp_path: Path, unit: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "_told", set())
    (tmp_path / "a.csv").write_text("text,label,Author ID\nx,1,9\n")
    data_args = SimpleNamespace(files={"train": tmp_path / "a.csv"}, non_private=False, public_file=None)
    args: Any = SimpleNamespace(do_train=True, privacy_unit=unit)
    load_tables(ModelArguments(), data_args, name=None, config=None, training_args=args)
    assert ("--user_id_column 'Author ID'" in caplog.text) == (unit == "example")
