"""Values, datasets, collators and models that no trainer expects."""

from __future__ import annotations

import decimal
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, BertModel

from tests.helpers import tiny

ROWS, CALLS = tiny.records(), itertools.count()


def changed(i: int, **fields: Any) -> list[Any]:
    """The records with one of them changed; a field that is ... is taken out."""
    rows = [dict(row) for row in ROWS]
    for name, value in fields.items():
        if value is ...:
            rows[i].pop(name, None)
        else:
            rows[i][name] = value
    return rows


def every(**fields: Any) -> list[Any]:
    """The records, all of them changed."""
    return [{k: v for k, v in {**row, **fields}.items() if v is not ...} for row in ROWS]


class Lying:
    """A dataset whose length, or whose records, are not what they say."""

    def __init__(self, length: Any, get: Callable[[int], Any]):
        self.length, self.get = length, get

    def __len__(self) -> int:
        if isinstance(self.length, Exception):
            raise self.length
        return self.length

    def __getitem__(self, i: Any) -> Any:
        return self.get(i)


class Endless(torch.utils.data.IterableDataset):
    """Records without an end."""

    def __iter__(self) -> Iterator[Any]:
        return itertools.cycle(ROWS)


def _raise(error: Exception) -> Any:
    raise error


def _hf(**columns: Any) -> Any:
    from datasets import Dataset

    return Dataset.from_dict(columns)


def _columns() -> dict[str, Any]:
    return {name: [row[name] for row in ROWS] for name in ROWS[0]}


NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 3, 7, 99, 10**6, 10**9, 10**12, 2**31, 2**63, 10**30, -(10**9), 0.0, -0.0, 0.5, 0.999, 1.5, 1e-300,
    5e-324, 1e-9, 1e9, 1e300, -1e300, math.inf, -math.inf, math.nan, True, False,
)  # fmt: skip
TEXTS: tuple[Any, ...] = (
    "", " ", "8", "nan", "inf", "1e9", "-1", "abc", "none", "None", "auto", "ε∞", "a" * 5000, "\x00", "a\nb", "../..",
    "{", "[]", "{}", "null", '{"a": 1}', "'; DROP", "True",
)  # fmt: skip
OBJECTS: tuple[Any, ...] = (
    None, [], [1], [None], {}, {"a": 1}, {1: 2}, (), (1, 2), set(), b"x", object(), len, int, 1j, decimal.Decimal("NaN"),
    np.float64("nan"), np.int64(3), np.float32(0.5), np.zeros(0), np.ones(3), torch.tensor(1.0), torch.ones(2, 2),
    range(3),
)  # fmt: skip
BAD_JSON = (
    "{", "}", '{"a":}', "[1, 2]", '"x"', "null", "1", "nan", '{"num_buffers": NaN}', '{"delay": 1e999}',
    '{"delay": 5} x', "{'delay': 5}", '{"delay": [[[[[[[[]]]]]]]]}', "[" * 3000, '{"a": ' * 2000, "\ufeff{}", "{} {}",
    '{"delay": 5, "delay": 6}', '{"\\u0000": 1}', "{true}", "   ", '{"clipping_norm": "5"}', '{"nu": -1e400}',
)  # fmt: skip
OPTIONS = (*NUMBERS, *TEXTS, *OBJECTS, *BAD_JSON)  # values of an option
VALUES: tuple[Any, ...] = (  # of a column
    None, ..., [], [[]], "text", 5, 2.5, math.nan, math.inf, -1, 10**12, 2**70, [1.5, 2.5], ["a", "b"], [None], [-1, 3],
    [39, 40], [10**9], [3] * 700, [3] * 200_000, [[3, 4], [5, 6]], {"a": 1}, b"\x03\x04", np.array([3, 4]), np.array([]),
    np.array([math.nan]), torch.tensor([3, 4]), torch.tensor(1), torch.ones(2, 2), torch.empty(0), (3, 4), object(), True,
    [True, False], range(3, 6), -100, 7, "1", [1], [0, 1], {3, 4}, 1j, float("1e300"),
)  # fmt: skip
DATASETS: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "[]": list,
    "one record": lambda: ROWS[:1],
    "numbers": lambda: [1, 2, 3],
    "Nones": lambda: [None] * 8,
    "texts": lambda: ["text"] * 8,
    "empty records": lambda: [{}] * 8,
    "tuples": lambda: [(1, 2)] * 8,
    "lists": lambda: [[3, 4, 5]] * 8,
    "an iterator": lambda: iter(ROWS),
    "an endless stream": Endless,
    "a dict": lambda: dict(enumerate(ROWS)),
    "a text": lambda: "train.csv",
    "a tensor": lambda: torch.ones(8, 3),
    "a set": lambda: {1, 2, 3},
    "a TensorDataset": lambda: torch.utils.data.TensorDataset(torch.ones(8, 3), torch.ones(8)),
    "longer than it is": lambda: Lying(1000, lambda i: ROWS[i]),
    "shorter than it is": lambda: Lying(3, lambda i: ROWS[i]),
    "of length -1": lambda: Lying(-1, lambda i: ROWS[i]),
    "of length None": lambda: Lying(None, lambda i: ROWS[i]),
    "whose length raises": lambda: Lying(RuntimeError("no length"), lambda i: ROWS[i]),
    "of 1e12 records": lambda: Lying(10**12, lambda i: ROWS[i % 64]),
    "of 1e8 records": lambda: Lying(10**8, lambda i: ROWS[i % 64]),
    "whose records raise": lambda: Lying(64, lambda i: _raise(OSError("disk"))),
    "one of whose records raises": lambda: Lying(64, lambda i: ROWS[i] if i != 5 else _raise(KeyError(5))),
    "whose records are None": lambda: Lying(64, lambda i: None),
    "whose records are generators": lambda: Lying(64, lambda i: iter([1])),
    "whose records change": lambda: Lying(64, lambda i: {**ROWS[i], "label": int(torch.randint(2, ()))}),
    "datasets of no rows": lambda: _hf(input_ids=[], label=[]),
    "datasets of no columns": lambda: _hf(),
    "datasets without labels": lambda: _hf(input_ids=_columns()["input_ids"]),
    "datasets without input_ids": lambda: _hf(label=_columns()["label"]),
    "datasets with None": lambda: _hf(input_ids=[None, *_columns()["input_ids"][1:]], label=_columns()["label"]),
    "datasets with labels NaN": lambda: _hf(input_ids=_columns()["input_ids"], label=[math.nan] * 64),
    "datasets of texts": lambda: _hf(text=["a b c"] * 64, label=_columns()["label"]),
    "datasets with a label of 7": lambda: _hf(input_ids=_columns()["input_ids"], label=[7, *_columns()["label"][1:]]),
    "datasets, streaming": lambda: _hf(**_columns()).to_iterable_dataset(),
    "two kinds of records": lambda: [*ROWS[:32], *({"input_ids": [3, 4], "labels": 1} for _ in range(32))],
    "keys that are numbers": lambda: [{1: [3, 4], 2: 0}] * 16,
    "the model's outputs as columns": lambda: every(logits=1, loss=2),
}


def _cut(batch: dict[str, Any], rows: slice) -> dict[str, Any]:
    return {name: value[rows] for name, value in batch.items()}


def _with(**fields: Any) -> Callable[[list[Any]], Any]:
    def collate(rows: list[Any]) -> Any:
        batch = {**tiny.collate(rows), **{k: v(rows) if callable(v) else v for k, v in fields.items()}}
        return {name: value for name, value in batch.items() if value is not ...}

    return collate


COLLATORS: dict[str, Any] = {
    "no function": 5,
    "the default": None,
    "of no arguments": dict,
    "returns None": lambda rows: None,
    "returns nothing": lambda rows: {},
    "returns a list": lambda rows: rows,
    "returns a tensor": lambda rows: torch.ones(len(rows), 3),
    "returns lists": lambda rows: {k: v.tolist() for k, v in tiny.collate(rows).items()},
    "returns arrays": lambda rows: {k: v.numpy() for k, v in tiny.collate(rows).items()},
    "returns texts": _with(input_ids=lambda rows: ["a"] * len(rows)),
    "raises": lambda rows: _raise(RuntimeError("collator")),
    "raises beside a second record": lambda rows: tiny.collate(rows) if len(rows) < 2 else _raise(IndexError("two")),
    "drops a row": lambda rows: _cut(tiny.collate(rows), slice(0, -1)),
    "drops all rows": lambda rows: _cut(tiny.collate(rows), slice(0, 0)),
    "repeats rows": lambda rows: {k: torch.cat([v, v]) for k, v in tiny.collate(rows).items()},
    "reverses rows": lambda rows: {k: v.flip(0) for k, v in tiny.collate(rows).items()},
    "adds rows up": lambda rows: {k: v.sum(0, keepdim=True) for k, v in tiny.collate(rows).items()},
    "no batch dimension": lambda rows: {k: v[0] for k, v in tiny.collate(rows).items()},
    "no labels": _with(labels=...),
    "no mask": _with(attention_mask=...),
    "labels out of range": _with(labels=lambda rows: torch.full((len(rows),), 9)),
    "labels of -100": _with(labels=lambda rows: torch.full((len(rows),), -100)),
    "labels of NaN": _with(labels=lambda rows: torch.full((len(rows),), math.nan)),
    "labels in a column": _with(labels=lambda rows: torch.zeros(len(rows), 1, dtype=torch.long)),
    "labels for every token": _with(labels=lambda rows: tiny.collate(rows)["input_ids"]),
    "ids in floats": _with(input_ids=lambda rows: tiny.collate(rows)["input_ids"].float()),
    "ids in bool": _with(input_ids=lambda rows: tiny.collate(rows)["input_ids"].bool()),
    "ids out of the vocabulary": _with(input_ids=lambda rows: tiny.collate(rows)["input_ids"] + 100),
    "no tokens": _with(input_ids=lambda rows: torch.zeros(len(rows), 0, dtype=torch.long)),
    "a mask of another shape": _with(attention_mask=lambda rows: torch.ones(len(rows), 3)),
    "a mask of zeros": _with(attention_mask=lambda rows: torch.zeros_like(tiny.collate(rows)["input_ids"])),
    "meta tensors": lambda rows: {k: v.to("meta") for k, v in tiny.collate(rows).items()},
    "sparse tensors": lambda rows: {k: v.to_sparse() for k, v in tiny.collate(rows).items()},
    "tensors with gradients": _with(extra=torch.ones(1, requires_grad=True)),
    "unknown keys": _with(nonsense=torch.ones(1)),
    "keys that are numbers": lambda rows: {5: torch.ones(len(rows))},
    "noise of its own": _with(input_ids=lambda rows: torch.randint(3, 40, (len(rows), 5)), attention_mask=...),
    "padding to a million": _with(
        input_ids=lambda rows: torch.zeros(len(rows), 10**6, dtype=torch.long), attention_mask=...
    ),
    "a counter": _with(labels=lambda rows: torch.full((len(rows),), next(CALLS) % 2)),
}  # fmt: skip


class Returns(nn.Module):
    """A model that returns what it was told to."""

    def __init__(self, what: Callable[[torch.Tensor], Any]):
        super().__init__()
        self.inner, self.what = nn.Linear(4, 2), what

    def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> Any:
        return self.what(self.inner(torch.ones(len(input_ids), 4)))


def _filled(value: float, name: str, how: str = "fill") -> Any:
    model = tiny.model()
    with torch.no_grad():
        parameter = dict(model.named_parameters())[name]
        if how == "one":
            parameter.view(-1)[0] = value
        else:
            parameter.fill_(value)
    return model


def _configured(**changes: Any) -> Any:
    model = tiny.model()
    for name, value in changes.items():
        setattr(model.config, name, value)
    return model


def _frozen(but: str | None = None) -> Any:
    model = tiny.model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == but)
    return model


def _nan_in_frozen() -> Any:
    model = _filled(math.nan, "bert.encoder.layer.0.output.dense.weight", "one")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("classifier"))
    return model


def _with_part(name: str, part: Callable[[], Any]) -> Any:
    model = tiny.model()
    setattr(model, name, part())
    return model


HEAD = "classifier.weight"
INNER = "bert.encoder.layer.0.output.dense.weight"
MODELS: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "a text": lambda: "bert-base-uncased",
    "a class": lambda: type(tiny.model()),
    "a linear layer": lambda: nn.Linear(4, 2),
    "no parameters": nn.Identity,
    "returns logits": lambda: Returns(lambda y: {"logits": y}),
    "returns a tuple": lambda: Returns(lambda y: (y.mean(), y)),
    "returns a mean loss": lambda: Returns(lambda y: {"loss": y.mean(), "logits": y}),
    "returns a constant loss": lambda: Returns(lambda y: {"loss": torch.zeros(())}),
    "raises": lambda: Returns(lambda y: _raise(RuntimeError("model"))),
    "no head": lambda: BertModel(tiny.model().config),
    "another head": lambda: BertForMaskedLM(tiny.model().config),
    "NaN in one weight": lambda: _filled(math.nan, INNER, "one"),
    "NaN in the head": lambda: _filled(math.nan, HEAD),
    "NaN in a frozen weight": _nan_in_frozen,
    "inf in one weight": lambda: _filled(math.inf, INNER, "one"),
    "1e38 in the head": lambda: _filled(1e38, HEAD),
    "zeros in the head": lambda: _filled(0.0, HEAD),
    "frozen": _frozen,
    "all but the head frozen": lambda: _frozen("classifier.bias"),
    "bfloat16": lambda: tiny.model().bfloat16(),
    "on no device": lambda: tiny.model().to("meta"),
    "num_labels 0": lambda: _configured(num_labels=0),
    "num_labels 1": lambda: tiny.model(num_labels=1),
    "num_labels 1000": lambda: tiny.model(num_labels=1000),
    "unknown problem": lambda: _configured(problem_type="nonsense"),
    "regression": lambda: _configured(problem_type="regression"),
    "several labels": lambda: _configured(problem_type="multi_label_classification"),
    "no configuration": lambda: _with_part("config", lambda: None),
    "a configuration of another": lambda: _with_part("config", BertConfig),
    "batch norm": lambda: _with_part("extra", lambda: nn.BatchNorm1d(4)),
    "an unused layer": lambda: _with_part("extra", lambda: nn.Linear(3, 3)),
    "an empty parameter": lambda: _with_part("extra", lambda: nn.Parameter(torch.empty(0))),
    "a complex parameter": lambda: _with_part("extra", lambda: nn.Parameter(torch.ones(2, dtype=torch.complex64))),
    "a lazy layer": lambda: _with_part("extra", lambda: nn.LazyLinear(3)),
    "in DataParallel": lambda: nn.DataParallel(tiny.model()),
    "in inference mode": lambda: _inference(),
}


def _inference() -> Any:
    with torch.inference_mode():
        return tiny.model()
