"""From a table of any origin to a classification dataset: which columns hold the text, which labels exist."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict

from hf_dpopt import DPConfigError
from recipes.tables import Table, check_columns, columns_in

logger = logging.getLogger(__name__)

# The labels GLUE declares, in the order of their ids; None is regression.
GLUE_LABELS: dict[str, list[str] | None] = {
    "cola": ["unacceptable", "acceptable"],
    "mnli": ["entailment", "neutral", "contradiction"],
    "mrpc": ["not_equivalent", "equivalent"],
    "qnli": ["entailment", "not_entailment"],
    "qqp": ["not_duplicate", "duplicate"],
    "rte": ["entailment", "not_entailment"],
    "sst2": ["negative", "positive"],
    "stsb": None,
    "wnli": ["not_entailment", "entailment"],
}
# (text, second text) under the names of the hub and of GLUE's own files; the first pair that is there is taken.
TEXT_COLUMNS: list[tuple[str, str | None]] = [
    ("#1 String", "#2 String"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("premise", "hypothesis"),
    ("sentence1", "sentence2"),
    ("sentence", None),
    ("text", None),
]
LABEL_COLUMNS = ["label", "labels", "gold_label", "Quality", "is_duplicate", "score"]
NOT_TEXT = {"idx", "index", "id", "source", "mark", "#1 ID", "#2 ID"}
MAX_LABELS = 1000


@dataclass(frozen=True)
class Columns:
    """Names of the columns that are used; `pair` is None for single sentences, `label` for unlabelled tables."""

    text: str
    pair: str | None
    label: str | None


@dataclass(frozen=True)
class ClassificationData:
    """Splits with the columns `text`, `pair` (if any) and `label`.

    Args:
        splits: train, validation (or mnli's two), test; as far as they were given.
        labels: names in the order of their ids; None for regression.
        description: what was loaded, for the last lines of a run.
        task: GLUE task whose labels these are; None for others.
    """

    splits: DatasetDict
    labels: list[str] | None
    description: str
    task: str | None = None

    @property
    def has_pairs(self) -> bool:
        return "pair" in next(iter(self.splits.values())).column_names


def find_columns(
    table: Table,
    *,
    text: str | None = None,
    pair: str | None = None,
    label: str | None = None,
    user: str | None = None,
) -> Columns:
    """The columns to use: the named ones, and known names for the rest.

    Raises:
        DPConfigError: if a named column does not exist, or no text column is recognised.
    """
    names = list(table.columns)
    named = {"text_column": text, "text_pair_column": pair, "label_column": label, "user_id_column": user}
    check_columns(table, {n: option for option, n in named.items() if n is not None}, "Name columns that are there.")
    label = label or next((name for name in LABEL_COLUMNS if name in names), None)
    if text is None:
        known = (found for found in TEXT_COLUMNS if set(found) - {None} <= set(names) - {label})
        rest = [name for name in names if name != label and name not in NOT_TEXT]
        text, found_pair = next(known, (rest[0] if len(rest) == 1 else None, None))
        pair = pair or found_pair
    if text is None:
        raise DPConfigError(
            f"{table.name}: no text column recognised among {columns_in(table)}. Name it with --text_column (and "
            "--text_pair_column)."
        )
    return Columns(text, pair, label)


def read_label_list(text: str) -> list[str]:
    """`negative,positive` -> names in the order of their ids."""
    labels = [name.strip() for name in text.split(",")]
    if len(labels) == 1 and Path(text).is_file():
        raise DPConfigError(
            f"label_list={text!r} is a file, and names are wanted: negative,positive. Write "
            f'--label_list "$(paste -sd, {text})" for a file with a name in each line.'
        )
    if len(labels) < 2 or len(set(labels)) < len(labels) or "" in labels:
        raise DPConfigError(
            f"label_list={text!r} is not a list of two or more different names. Write e.g. negative,positive."
        )
    return labels


def labels_of(table: Table, column: str) -> list[str] | None:
    """Distinct labels of a table, sorted; None if they are decimal numbers (regression).

    Raises:
        DPConfigError: if there is one label only, or so many that the column can hardly be the label.
    """
    values = table.columns[column]
    distinct = sorted({_label_text(table, row, value) for row, value in enumerate(values)})
    if all(map(_is_number, distinct)):
        if not all(text.lstrip("+-").isdigit() for text in distinct):
            return None
        distinct.sort(key=int)
    if len(distinct) < 2:
        raise DPConfigError(
            f"{table.name}: every label is {distinct[0]!r}. Training needs at least two; check --label_column."
        )
    if len(distinct) > MAX_LABELS:
        raise DPConfigError(
            f"{table.name}: column {column!r} holds {len(distinct)} different labels. Name the right column with "
            "--label_column."
        )
    return distinct


def _label_text(table: Table, row: int, value: Any) -> str:
    text = "" if value is None or isinstance(value, float) and math.isnan(value) else str(value).strip()
    if not text:
        raise DPConfigError(
            f"{table.where(row)}: the label is empty. Give every record a label, or remove the record."
        )
    return text


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def encode_labels(table: Table, column: str, labels: list[str] | None) -> list[int] | list[float]:
    """Ids (or scores) of a label column: names are looked up; numbers are taken as ids where no name is a number.

    Raises:
        DPConfigError: naming the row, the label and what is allowed.
    """
    values = table.columns[column]
    if labels is None:
        return [_score(table, row, value) for row, value in enumerate(values)]
    ids = {name: i for i, name in enumerate(labels)}
    numbers = {} if any(map(_is_number, labels)) else {str(i): i for i in range(len(labels))}
    encoded = []
    for row, value in enumerate(values):
        text = _label_text(table, row, value)
        if text not in ids | numbers:
            allowed = ", ".join(map(repr, labels[:20])) + (" ..." if len(labels) > 20 else "")
            number = f", nor their number from 0 to {len(labels) - 1}" * (_is_number(text) and bool(numbers))
            raise DPConfigError(
                f"{table.where(row)}: label {text!r} is not one of {allowed}{number}. Correct the row, or add "
                f"{text!r} to --label_list."
            )
        encoded.append((ids | numbers)[text])
    if numbers and str(values[0]).strip() in numbers:
        meaning = ", ".join(f"{i} is {name}" for i, name in enumerate(labels[:10]))
        logger.info(f"The labels of {table.name} are numbers from 0, in the order of the names: {meaning}.")
    return encoded


def _score(table: Table, row: int, value: Any) -> float:
    text = _label_text(table, row, value)
    if not _is_number(text):
        raise DPConfigError(
            f"{table.where(row)}: {text!r} is not a finite number, which a regression target has to be."
        )
    return float(text)


def build(
    tables: Mapping[str, Table],
    *,
    task: str | None = None,
    text_column: str | None = None,
    text_pair_column: str | None = None,
    label_column: str | None = None,
    label_list: list[str] | None = None,
    user_id_column: str | None = None,
) -> ClassificationData:
    """Splits with common columns and ids.

    The set of labels is public input: `label_list`, else GLUE's for a GLUE task, else the distinct labels of the
    training table, which are then published with the model. A log line says so.

    Args:
        tables: split name -> table; the test split may be unlabelled.
        task: a GLUE task, which declares the labels.
        user_id_column: of the training table, which is kept.

    Raises:
        DPConfigError: if columns or labels are missing or do not fit together.
    """
    named = {"text": text_column, "pair": text_pair_column, "label": label_column, "user": user_id_column}
    first = next(iter(tables.values()))
    used = {split: _columns_of_split(split, table, named) for split, table in tables.items()}
    labels = _declared_labels(tables.get("train", first), used.get("train", used[next(iter(used))]), task, label_list)
    num_texts = {split: 1 + (columns.pair is not None) for split, columns in used.items()}
    if len(set(num_texts.values())) > 1:
        found = "; ".join(
            f"{tables[s].name}: {c.text!r}" + (f", {c.pair!r}" if c.pair else "") for s, c in used.items()
        )
        raise DPConfigError(
            f"The splits differ in their text columns ({found}). Name them with --text_column, --text_pair_column."
        )
    splits = DatasetDict({split: _dataset(split, table, used[split], labels) for split, table in tables.items()})
    if user_id_column is not None and "train" in tables:
        ids = list(tables["train"].columns[user_id_column])
        splits["train"] = splits["train"].add_column(user_id_column, ids)
    return ClassificationData(
        splits, labels, ", ".join(f"{len(table)} records of {table.name}" for table in tables.values()), task
    )


def _columns_of_split(split: str, table: Table, named: dict[str, str | None]) -> Columns:
    is_test = split.startswith("test")
    if is_test and named["label"] not in table.columns:
        named = {**named, "label": None}
    if split != "train":
        named = {**named, "user": None}
    columns = find_columns(table, **named)
    if columns.label is None and not is_test:
        raise DPConfigError(
            f"{table.name}: no label column recognised among {columns_in(table)}. Name it with --label_column."
        )
    user = named["user"]
    if user is not None and user in ("text", "pair", "label", *vars(columns).values()):
        raise DPConfigError(
            f"user_id_column={user!r}: texts or labels of {table.name} have this name. Name the column of user ids, "
            "or rename it."
        )
    return columns


def _declared_labels(
    table: Table, columns: Columns, task: str | None, label_list: list[str] | None
) -> list[str] | None:
    if label_list is not None:
        return label_list
    if task is not None:
        return GLUE_LABELS[task]
    assert columns.label is not None
    labels = labels_of(table, columns.label)
    if labels is not None:
        shown = ", ".join(labels[:10]) + (" ..." if len(labels) > 10 else "")
        logger.warning(
            f"The list of labels ({shown}) is read from {table.name} and treated as public: it is published with the "
            "model. Declare it with --label_list if that is not so."
        )
    return labels


def _dataset(split: str, table: Table, columns: Columns, labels: list[str] | None) -> Dataset:
    data: dict[str, Any] = {"text": _texts(table, columns.text)}
    if columns.pair is not None:
        data["pair"] = _texts(table, columns.pair)
    if columns.label is not None and not (split.startswith("test") and _is_unlabelled(table.columns[columns.label])):
        data["label"] = encode_labels(table, columns.label, labels)
    return Dataset.from_dict(data)


def _is_unlabelled(values: Sequence[Any]) -> bool:
    """GLUE's public test sets carry -1 (hub) or nothing (files) as label."""
    return all(str(value).strip() in ("-1", "-1.0", "", "None") for value in values)


def _texts(table: Table, column: str) -> list[str]:
    values = list(table.columns[column])
    wrong = next((row for row, value in enumerate(values) if not isinstance(value, str)), None)
    if wrong is not None:
        raise DPConfigError(
            f"{table.where(wrong)}: column {column!r} holds {type(values[wrong]).__name__}, not text. Name another "
            "with --text_column, or correct the row."
        )
    return values
