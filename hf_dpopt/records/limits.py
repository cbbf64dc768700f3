"""Ranges that a model can look up (token ids, labels, positions), checked on the CPU before a forward.

An index outside of a table ends the run in the step that sampled the record (on a GPU with the process), which tells
that the record is there. Shape legend: B = rows of a batch, T = tokens.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import numpy as np
import torch
from torch import nn

from hf_dpopt.common.sharding import class_of
from hf_dpopt.records.losses import IGNORED, base_model

RESIZE = "If tokens were added: model.resize_token_embeddings(len(tokenizer))."
MORE_LABELS = "If the labels are right: load the model with num_labels=<number of labels>."
UNLABELLED = "A label of -1 marks records without a label (the test files of GLUE): leave them out."
LABELS = "the labels of the model"
CHOICES = "the choices of a record"
LABEL_COLUMNS = ("labels", "label", "label_ids")
MASKS = ("attention_mask", "decoder_attention_mask")
WRAPPED = re.compile(r"\.(base_layer|original_module|modules_to_save\.[^.]+)")  # what adapters put around a layer
POSITION_TABLE = re.compile(r"(^|\.)(position_embeddings|wpe|embed_positions|positions_embed)$")


@dataclasses.dataclass(frozen=True)
class Range:
    """Whole numbers from 0 to `below - 1`.

    Args:
        below: size of the table, >= 1.
        what: name of the table, for messages.
        may_be_ignored: `IGNORED` is allowed too, for tokens that are not targets.
        otherwise: advice if the values are right and the table is too small.
    """

    below: int
    what: str
    may_be_ignored: bool = False
    otherwise: str = ""

    def holds(self, values: Any) -> Any:
        """Elementwise test of a tensor or an array of integers."""
        inside = (values >= 0) & (values < self.below)
        return inside | (values == IGNORED) if self.may_be_ignored else inside

    def says(self, column: str, value: Any) -> str:
        """Message for a value outside: the allowed range, and the way out if the value is right."""
        ignored = " (or -100, for what is no target)" if self.may_be_ignored else ""
        found = f"{column!r} holds {value}, which is outside 0 to {self.below - 1}{ignored}, {self.what}."
        unlabelled = value == -1 and self.what in (LABELS, CHOICES)
        return f"{found} {UNLABELLED if unlabelled else self.otherwise}".rstrip()


@dataclasses.dataclass(frozen=True)
class Positions:
    """A table in which positions are looked up.

    Args:
        most: largest number of tokens of a record that have a position.
        padding: token that takes no position (RoBERTa); None if every token takes one.
    """

    most: int
    padding: int | None


@dataclasses.dataclass(frozen=True)
class Limits:
    """Values and lengths of a record that a model can take.

    Args:
        ranges: column of a batch -> the values it may hold.
        positions: column -> the table that its positions are looked up in.
        classes_are_whole: labels are classes, so they must be integers.
        per_token: columns with one value for every token.
        label_is_a_choice: a label is the number of one of its record's choices, (B, C, T).
        labels_are_targets: labels are the tokens that a decoder predicts, padded with `IGNORED` on the right.
        pooled_beside: padding token of a model that classifies at the last other token; None if it does not.
        labels_are_finite: a label of NaN or infinity has no finite loss; a custom loss may read it as missing.
        first_tokens_count: a custom loss may count places that see masked tokens alone, and eager attention over these
            depends on the width of the batch.
    """

    ranges: Mapping[str, Range] = dataclasses.field(default_factory=dict)
    positions: Mapping[str, Positions] = dataclasses.field(default_factory=dict)
    classes_are_whole: bool = False
    per_token: tuple[str, ...] = ()
    label_is_a_choice: bool = False
    labels_are_targets: bool = False
    pooled_beside: int | None = None
    labels_are_finite: bool = True
    first_tokens_count: bool = False

    @classmethod
    def of(cls, model: nn.Module, kind: str) -> Limits:
        """The limits of a model with a head of that kind (`RecordLosses.kind`)."""
        base = base_model(model)
        config: Any = getattr(base, "config", None)
        vocabulary = _vocabulary(base)
        found: dict[str, Range] = {}
        if isinstance(vocabulary, int):
            for column in ("input_ids", "decoder_input_ids"):
                found[column] = Range(vocabulary, "the model's vocabulary", otherwise=RESIZE)
        types = [m for path, m in base.named_modules() if path.endswith("token_type_embeddings")]
        if types and isinstance(types[0], nn.Embedding):
            found["token_type_ids"] = Range(types[0].num_embeddings, "the token types of the model")
        labels = _labels(base, config, kind, vocabulary)
        if labels is not None:
            found["labels"] = labels
        columns = ["input_ids", *(["labels"] if getattr(config, "is_encoder_decoder", False) else [])]
        tables = {column: table for column in columns if (table := positions(model, column)) is not None}
        if "input_ids" in tables:
            table = tables["input_ids"]
            found["position_ids"] = Range(
                table.most + (0 if table.padding is None else table.padding + 1), "positions"
            )
        per_token: tuple[str, ...] = ("attention_mask", "token_type_ids", "special_tokens_mask")
        if kind in ("ForCausalLM", "ForMaskedLM", "ForTokenClassification"):
            per_token = (*per_token, "labels")
        is_class = labels is not None and not labels.may_be_ignored
        return cls(
            found, tables, is_class, per_token,
            label_is_a_choice=kind == "ForMultipleChoice", labels_are_targets=kind == "ForConditionalGeneration",
            pooled_beside=getattr(config, "pad_token_id", None) if kind == "ForSequenceClassification" else None,
            labels_are_finite=kind != "custom",
            first_tokens_count=kind == "custom" and getattr(config, "_attn_implementation", None) in (None, "eager"),
        )  # fmt: skip

    def range_of(self, column: str) -> Range | None:
        """The values that a column of the dataset may hold; None for any."""
        return self.ranges.get("labels" if column in LABEL_COLUMNS else column)

    def failing(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """Rows that the model cannot take, (B,) bool; `batch` is collated and on the CPU."""
        sizes = [len(v) for v in batch.values() if isinstance(v, torch.Tensor) and v.dim() > 0]
        failing_B = torch.zeros(sizes[0], dtype=torch.bool) | self.empty(batch)
        if self.lacks_targets(batch):
            return torch.ones_like(failing_B)
        for column, values, allowed in self._looked_up(batch):
            if not values.is_floating_point():
                failing_B |= ~allowed.holds(values).reshape(len(values), -1).all(dim=1)
            elif column != "labels" or (self.classes_are_whole and values.dim() == 1):
                return torch.ones_like(failing_B)
        for column, table in self.positions.items():
            ids = batch.get(column)
            if isinstance(ids, torch.Tensor) and ids.dim() in (2, 3) and ids.size(-1) > table.most:
                failing_B |= _num_positions(ids, batch, table) > table.most
        return failing_B

    def lacks_targets(self, batch: Mapping[str, Any]) -> bool:
        """Whether not every token of a collated batch has a target where it should: padding would shift them."""
        ids, labels = batch.get("input_ids"), batch.get("labels")
        if "labels" not in self.per_token or not (isinstance(ids, torch.Tensor) and isinstance(labels, torch.Tensor)):
            return False
        return ids.dim() == labels.dim() == 2 and ids.shape != labels.shape

    def _looked_up(self, batch: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor, Range]]:
        """Columns of a collated batch, and the values that they may hold."""
        ids, ranges = batch.get("input_ids"), dict(self.ranges)
        if self.label_is_a_choice and isinstance(ids, torch.Tensor) and ids.dim() == 3:
            ranges["labels"] = Range(ids.size(1), CHOICES)
        for column, allowed in ranges.items():
            values = batch.get(column)
            if isinstance(values, torch.Tensor) and values.dim() > 0:
                yield column, values, allowed

    def empty(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """Rows with nothing to attend to, (B,) or one value for all; `batch` is collated and on the CPU.

        Attention over a row that is masked everywhere is uniform over its columns, and how many there are depends on
        the longest record of the batch.
        """
        empty_B, ids = torch.zeros(1, dtype=torch.bool), batch.get("input_ids")
        for column in MASKS:
            mask = batch.get(column)
            if not isinstance(mask, torch.Tensor):
                continue
            is_of_ids = column == "attention_mask" and isinstance(ids, torch.Tensor) and mask.shape == ids.shape
            if not is_of_ids and mask.dim() != 2:
                continue  # one of queries and keys, in a layout of its model
            counts = mask != 0
            if is_of_ids and self.pooled_beside is not None:
                counts &= ids != self.pooled_beside
            empty_B = empty_B | (~counts.any(dim=-1)).view(len(mask), -1).any(dim=1)  # one choice of several is enough
        return empty_B

    def is_too_wide(self, batch: Mapping[str, Any]) -> bool:
        """Whether padding reaches beyond the positions (`pad_to_multiple_of`), even if no record is too long."""
        tables = {column: table for column, table in self.positions.items() if table.padding is None}
        pairs = ((batch.get(column), table.most) for column, table in tables.items())
        return any(
            isinstance(ids, torch.Tensor) and ids.dim() in (2, 3) and ids.size(-1) > most for ids, most in pairs
        )

    def first_outside(self, batch: Mapping[str, Any]) -> str:
        """Message about the first value of a collated batch that the model cannot look up; empty if there is none."""
        for column, values, allowed in self._looked_up(batch):
            outside = values[:0] if values.is_floating_point() else values[~allowed.holds(values)]
            if outside.numel():
                return allowed.says(column, int(outside.flatten()[0]))
        return (
            "labels are floats, or more tokens come than the model has positions." if self.failing(batch).any() else ""
        )

    def misfit(self, record: Any) -> str:
        """Say why the lengths of a tokenized record do not fit; empty if they do."""
        if not isinstance(record, Mapping):
            return ""
        for column, table in self.positions.items():
            if num_entries(record.get(column)) > 0 and _num_places(record[column], table) > table.most:
                cut = f"tokenizer(.., truncation=True, max_length={table.most})"
                return f"{column!r} is longer than the {table.most} positions of the model: {cut}"
        for column in MASKS if self.first_tokens_count else ():
            mask: Any = record.get(column)
            if is_flat(mask) and len(mask) and not mask[0] and any(mask):
                return f"{column!r} masks its first tokens, and per_example_loss_func may count them"
        ids: Any = record.get("input_ids")
        if is_flat(ids):
            for column in self.per_token:
                values: Any = record.get(column)
                if is_flat(values) and len(values) != len(ids):
                    return f"{column!r} has {len(values)} values for the {len(ids)} tokens of 'input_ids'"
        return ""

    def is_empty(self, record: Any) -> bool:
        """Whether a tokenized record has no token, and so nothing to contribute."""
        return isinstance(record, Mapping) and is_flat(record.get("input_ids")) and len(record["input_ids"]) == 0


def positions(model: nn.Module, column: str) -> Positions | None:
    """The smallest table that reads the tokens of `column` (input_ids, or labels of a decoder); None if computed."""
    config = getattr(model, "config", None)
    has_encoder = getattr(config, "is_encoder_decoder", False)
    found = []
    for path, module in model.named_modules():
        name = WRAPPED.sub("", path)
        of_decoder = re.search(r"(^|\.)decoder\.", name) is not None
        if not POSITION_TABLE.search(name) or (has_encoder and of_decoder != (column == "labels")):
            continue
        # subclasses may grow or clamp; learned tables that start at an offset are looked up as they are
        if class_of(module) is not nn.Embedding and not class_of(module).__name__.endswith(
            "LearnedPositionalEmbedding"
        ):
            continue
        first = getattr(module, "offset", None)
        padding = module.padding_idx if first is None else None  # type: ignore[union-attr]
        rows = module.num_embeddings - (first or 0 if padding is None else padding + 1)  # type: ignore[operator]
        declared = getattr(config, "max_position_embeddings", None) or rows
        found.append(Positions(min(rows, declared) - _num_virtual_tokens(model), padding))
    return min(found, key=lambda table: table.most, default=None)


def _num_virtual_tokens(model: nn.Module) -> int:
    """Number of positions that prompts and prefixes of adapters take."""
    configs = getattr(model, "peft_config", None)
    return sum(
        getattr(c, "num_virtual_tokens", 0) or 0 for c in (configs.values() if isinstance(configs, dict) else ())
    )


def num_entries(row: Any) -> int:
    """Length of a row; 0 of what has none, such as a number, also where it is a tensor."""
    try:
        return len(row) if isinstance(row, Sized) else 0
    except TypeError:
        return 0


def padding_id_of(model: nn.Module) -> int:
    """The model's token of padding; 0 where its config names none, or one that it could not look up."""
    base = base_model(model)
    padding_id, vocabulary = getattr(getattr(base, "config", None), "pad_token_id", None), _vocabulary(base)
    if not isinstance(padding_id, int) or padding_id < 0:
        return 0
    return 0 if isinstance(vocabulary, int) and padding_id >= vocabulary else padding_id


def is_flat(values: Any) -> bool:
    """Whether these values form a flat list, one for each token of a record."""
    if isinstance(values, (torch.Tensor, np.ndarray)):
        return values.ndim == 1
    return isinstance(values, (list, tuple)) and not (values and isinstance(values[0], (list, tuple)))


def _num_places(tokens: Any, table: Positions) -> int:
    if len(tokens) <= table.most or table.padding is None:
        return len(tokens)
    return sum(int(token) != table.padding for token in tokens)


def _num_positions(ids: torch.Tensor, batch: Mapping[str, Any], table: Positions) -> torch.Tensor:
    """Number of positions that each row takes without its padding, of several choices (B, C, T) the most; (B,)."""
    mask = batch.get("attention_mask")
    if table.padding is not None:
        num = (ids != table.padding).sum(dim=-1)
    elif not isinstance(mask, torch.Tensor) or mask.shape != ids.shape:
        return torch.full((len(ids),), ids.size(-1))
    else:
        places_T = torch.arange(1, ids.size(-1) + 1)
        num = (mask.ne(0) * places_T).amax(dim=-1)  # padding on the left shifts the places of the text
    return num.view(len(ids), -1).amax(dim=1)


def _labels(base: Any, config: Any, kind: str, vocabulary: Any) -> Range | None:
    if kind in ("ForCausalLM", "ForMaskedLM", "ForConditionalGeneration"):
        head = table_of(base, "output")
        below = vocabulary if head is None else len(head)
        what = "the vocabulary that the model predicts"
        return Range(below, what, True, RESIZE) if isinstance(below, int) else None
    num_labels = getattr(config, "num_labels", None)
    if not isinstance(num_labels, int) or num_labels < 2:
        return None
    problem = getattr(config, "problem_type", None) or "single_label_classification"
    if kind == "ForTokenClassification" or (kind, problem) == (
        "ForSequenceClassification",
        "single_label_classification",
    ):
        return Range(num_labels, LABELS, kind == "ForTokenClassification", MORE_LABELS)
    return None


def _vocabulary(base: Any) -> Any:
    """Number of tokens the model reads; None for one that reads none."""
    words = table_of(base, "input")
    return getattr(getattr(base, "config", None), "vocab_size", None) if words is None else len(words)


def table_of(base: Any, side: str) -> torch.Tensor | None:
    """The table of a model's words ("input"), or of its head ("output"), (V, D); None if it has none."""
    try:
        weight = getattr(getattr(base, f"get_{side}_embeddings", lambda: None)(), "weight", None)
    except (NotImplementedError, AttributeError):  # models of sound and pictures
        return None
    return weight if isinstance(weight, torch.Tensor) and weight.dim() == 2 else None
