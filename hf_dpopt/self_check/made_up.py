"""Made-up records with the keys, dtypes and dimensions of a collated batch.

Shape legend: B = records, T = tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from hf_dpopt.clipping.rules import flattening
from hf_dpopt.records.limits import padding_id_of, table_of
from hf_dpopt.records.losses import IGNORED, base_model, num_records
from hf_dpopt.records.settings import settings

MAX_TOKENS = 16
NUM_CODES = 64  # of the made-up tokens where no table says how many there are
LARGE = 30.0  # times as large as other features are


@dataclasses.dataclass(frozen=True)
class Look:
    """Description of one made-up record.

    Args:
        length: share of the longest record, in (0, 1]; at least one token is left.
        kind: "ordinary" is random; "constant" repeats one ordinary token, and "large" the token that the model embeds
            with the largest norm. Features are `LARGE` times as large in large records.
    """

    length: float = 1.0
    kind: Literal["ordinary", "constant", "large"] = "ordinary"


LOOKS = (Look(1.0), Look(0.5), Look(0.9))


@dataclasses.dataclass(frozen=True)
class Columns:
    """Columns of made-up records.

    Args:
        like: one collated batch, for keys, dtypes and dimensions.
        padding_id: token of padding; None if nothing is padded.
        padding_side: "left" or "right".
    """

    like: Mapping[str, Any]
    padding_id: int | None
    padding_side: str

    @classmethod
    def of(cls, like: Mapping[str, Any], model: nn.Module) -> Columns:
        """Read the padding off the mask of a batch; off the model where none of its records is padded."""
        num_records(like)  # refuses packed batches
        ids, mask = like.get("input_ids"), like.get("attention_mask")
        if not isinstance(mask, torch.Tensor):  # nothing tells padding from text: see `Collation`
            return cls(like, None, "right")
        side, edge = ("left", 0) if bool((mask[..., 0] == 0).any()) else ("right", -1)
        padding = list[int]()
        if isinstance(ids, torch.Tensor) and ids.shape == mask.shape:
            padding = ids[..., edge][mask[..., edge] == 0].tolist()
        return cls(like, padding[0] if padding else padding_id_of(model), side)

    @property
    def is_padded(self) -> bool:
        """Whether rows of tokens are padded to one length."""
        return self.padding_id is not None and "input_ids" in self.like

    def batch(self, model: nn.Module, looks: Sequence[Look] = LOOKS) -> dict[str, Any]:
        """Made-up records with the keys, dtypes and dimensions of the collated batch.

        Records with the same look and the same place are the same, whatever the others look like. No value of `like`
        survives, except in tensors of a kind not known here, where its first row is repeated.

        Args:
            model: the model, which bounds tokens and labels.
            looks: one description for each record.
        """
        device, like = next(model.parameters()).device, self.like
        made_up = _MadeUp(model, self, looks)
        num_choices = flattening.num_choices(like)
        if num_choices is None:
            return _records(like, made_up, device)
        by_choice = {k: v[:, 0] for k, v in like.items() if isinstance(v, torch.Tensor) and v.dim() > 2}
        made_up.num_labels = num_choices
        each = [_records(by_choice, made_up, device) for _ in range(num_choices)]
        choices = {k: torch.stack([row[k] for row in each], dim=1) for k in by_choice}
        return choices | _records({k: v for k, v in like.items() if k not in by_choice}, made_up, device)


def is_per_token(value: Any, like: Mapping[str, Any]) -> bool:
    """Whether the second dimension counts input tokens; targets and features have widths of their own."""
    ids = like.get("input_ids")
    if not isinstance(value, torch.Tensor) or not isinstance(ids, torch.Tensor) or value.is_floating_point():
        return False
    return value.dim() > 1 and value.size(1) == ids.size(1)


def add_padding(
    batch: Mapping[str, Any], columns: Columns, num: int, *, targets: Sequence[str] = ()
) -> dict[str, Any]:
    """Add `num` columns of padding to the tokens of the records, and behind their `targets`."""
    assert columns.padding_id is not None
    fill = {"input_ids": columns.padding_id, "decoder_input_ids": columns.padding_id, "labels": IGNORED}
    before = (num, 0) if columns.padding_side == "left" else (0, num)
    return {
        k: torch.nn.functional.pad(v, (0, num) if k in targets else before, value=fill.get(k, 0))
        if k in targets or is_per_token(v, batch) else v
        for k, v in batch.items()
    }  # fmt: skip


class _MadeUp:
    """Values for the columns of a batch. The generator is seeded: nothing is secret, and failures can be repeated."""

    def __init__(self, model: nn.Module, columns: Columns, looks: Sequence[Look]):
        self.padding_id, self.padding_side, self.looks = columns.padding_id, columns.padding_side, looks
        self.generator = torch.Generator().manual_seed(0)
        base: Any = base_model(model)
        config: Any = getattr(base, "config", None)
        self.num_labels = max(int(getattr(config, "num_labels", 2)), 1)
        self.words, head = (table_of(base, side) for side in ("input", "output"))
        tables = [m.num_embeddings for m in base.modules() if isinstance(m, nn.Embedding)]
        # where no table is known to be that of the words, whichever of them it is that looks the tokens up
        self.vocabulary = min([NUM_CODES, *tables]) if self.words is None else len(self.words)
        # a head may know fewer tokens than are read (pictures, in Mllama)
        self.targets = None if head is None else min(self.vocabulary, len(head))
        classifies = type(base).__name__.endswith("ForSequenceClassification")
        # BART and T5 classify at the end token, and want one in every record
        self.end_id = config.eos_token_id if classifies and getattr(config, "is_encoder_decoder", False) else None
        known = {i for i in (self.padding_id, self.end_id) if i is not None}
        named = {v for _, name, v in settings(base) if name.endswith(("_token_id", "_token_index")) and type(v) is int}
        ordinary = [i for i in range(self.vocabulary) if i not in known | named]
        self.ordinary = ordinary or [i for i in range(self.vocabulary) if i not in known]

    def below(self, high: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=self.generator)

    def is_padding(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Mask of padding, (B, T): each record has a length of its own."""
        lengths_B = torch.tensor([max(1, int(look.length * shape[1])) for look in self.looks])
        padding_BT = torch.arange(shape[1]) >= lengths_B.unsqueeze(1)
        return padding_BT.flip(1) if self.padding_side == "left" else padding_BT

    def ids(self, shape: tuple[int, ...], is_masked: bool) -> torch.Tensor:
        ids_BT = torch.tensor(self.ordinary)[self.below(len(self.ordinary), shape)]
        ids_BT[[look.kind == "constant" for look in self.looks]] = self.ordinary[0]
        if any(is_large := [look.kind == "large" for look in self.looks]):
            ids_BT[is_large] = self.largest_token()
        padding_BT = self.is_padding(shape) if is_masked else torch.zeros(shape, dtype=torch.bool)
        if self.end_id is not None:
            last_B = shape[1] - 1 - (padding_BT.sum(1) if self.padding_side == "right" else 0 * padding_BT.sum(1))
            ids_BT[torch.arange(shape[0]), last_B] = self.end_id
        return ids_BT if self.padding_id is None else ids_BT.masked_fill(padding_BT, self.padding_id)

    def largest_token(self) -> int:
        """The token that is embedded with the largest norm; an ordinary one if there is no table of floats."""
        if self.words is None or not self.words.is_floating_point():
            return self.ordinary[0]
        dtype = torch.promote_types(self.words.dtype, torch.float32)
        norms_V = torch.linalg.vector_norm(self.words.detach(), dim=1, dtype=dtype)
        return self.ordinary[int(norms_V[self.ordinary].argmax())]

    def labels(self, shape: tuple[int, ...], is_per_token: bool) -> torch.Tensor:
        if len(shape) == 1 or not (is_per_token or self.targets):
            return self.below(self.num_labels, shape)
        labels_BT = self.below(self.targets or self.num_labels, shape)
        if self.targets and self.padding_id is not None:  # the padding token is no target
            labels_BT[labels_BT == self.padding_id] = (self.padding_id + 1) % self.targets
        return labels_BT.masked_fill(self.is_padding(shape), IGNORED)

    def features(self, shape: tuple[int, ...]) -> torch.Tensor:
        sizes_B = torch.tensor([LARGE if look.kind == "large" else 1.0 for look in self.looks])
        return torch.randn(shape, generator=self.generator) * sizes_B.view(-1, *[1] * (len(shape) - 1))


def _records(like: Mapping[str, Any], made_up: _MadeUp, device: torch.device) -> dict[str, Any]:
    """Made-up records with one row each, of `MAX_TOKENS` tokens at most."""
    num, is_masked = len(made_up.looks), "attention_mask" in like and made_up.padding_id is not None
    width = min([MAX_TOKENS, *(v.size(1) for v in like.values() if is_per_token(v, like))])
    batch: dict[str, Any] = {}
    for key, value in like.items():
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            batch[key] = value
            continue
        per_token = is_per_token(value, like)
        shape = (num, width, *value.shape[2:]) if per_token else (num, *value.shape[1:])
        if key == "labels" and value.is_floating_point():
            made = torch.randn(shape, generator=made_up.generator)
        elif value.is_floating_point():
            made = made_up.features(shape)
        elif key in ("input_ids", "decoder_input_ids"):
            made = made_up.ids(shape, is_masked)
        elif key.endswith("attention_mask"):
            made = ~made_up.is_padding(shape)
        elif key == "labels":
            made = made_up.labels(shape, per_token)
        elif key in ("start_positions", "end_positions"):
            made = made_up.below(width, shape)
        elif key == "token_type_ids":
            made = torch.zeros(shape)
        elif key == "position_ids" and per_token and value.dim() == 2:
            made = torch.arange(width).expand(shape)
        else:
            made = value[:1].expand(num, *value.shape[1:])
            made = made[:, torch.arange(width) % value.size(1)] if per_token else made
        batch[key] = made.to(device=device, dtype=value.dtype, copy=True)
    return batch
