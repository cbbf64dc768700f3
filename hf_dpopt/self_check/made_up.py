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
from hf_dpopt.records.limits import padding_id_of
from hf_dpopt.records.losses import IGNORED, base_model, num_records
from hf_dpopt.records.settings import settings

MAX_TOKENS = 32
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
    def of(
        cls, like: Mapping[str, Any], model: nn.Module, padding_id: int | None, padding_side: str | None
    ) -> Columns:
        """Read what is not known off the batch, and the padding off the model where the batch has a mask."""
        num_records(like)  # refuses packed batches
        if padding_id is None and "attention_mask" in like:
            padding_id = padding_id_of(model)
        return cls(like, padding_id, padding_side or padding_side_of(like))

    @property
    def is_padded(self) -> bool:
        """Whether rows of tokens are padded to one length."""
        return self.padding_id is not None and "input_ids" in self.like

    def batch(self, model: nn.Module, looks: Sequence[Look] = LOOKS, num_tokens: int | None = None) -> dict[str, Any]:
        """Made-up records with the keys, dtypes and dimensions of the collated batch.

        Records with the same look and the same place are the same, whatever the others look like. No value of `like`
        survives, except in tensors of a kind not known here, where its first row is repeated.

        Args:
            model: the model, which bounds tokens and labels.
            looks: one description for each record.
            num_tokens: width in tokens; None takes that of `like`, `MAX_TOKENS` at most.
        """
        device, like = next(model.parameters()).device, self.like
        made_up = _MadeUp(model, self, looks)
        if not flattening.chooses(model):
            return _records(like, made_up, device, num_tokens)
        by_choice = {k: v[:, 0] for k, v in like.items() if isinstance(v, torch.Tensor) and v.dim() > 2}
        made_up.num_labels = num_choices = next(like[k].size(1) for k in by_choice)
        each = [_records(by_choice, made_up, device, num_tokens) for _ in range(num_choices)]
        choices = {k: torch.stack([row[k] for row in each], dim=1) for k in by_choice}
        return choices | _records({k: v for k, v in like.items() if k not in by_choice}, made_up, device, num_tokens)


def is_per_token(value: Any, like: Mapping[str, Any]) -> bool:
    """Whether the second dimension counts input tokens; targets and features have widths of their own."""
    ids = like.get("input_ids")
    if not isinstance(value, torch.Tensor) or not isinstance(ids, torch.Tensor) or value.is_floating_point():
        return False
    return value.dim() > 1 and value.size(1) == ids.size(1)


def rows(batch: Mapping[str, Any], b: int) -> dict[str, Any]:
    """Take record b of a batch, alone and as wide as the batch."""
    return {k: v[b : b + 1] if isinstance(v, torch.Tensor) and v.dim() > 0 else v for k, v in batch.items()}


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


def padding_side_of(like: Mapping[str, Any]) -> str:
    """The side a collated batch is padded on, as far as its mask shows."""
    mask_BT = like.get("attention_mask")
    return "left" if isinstance(mask_BT, torch.Tensor) and bool((mask_BT[..., 0] == 0).any()) else "right"


def _answer(model: Any, method: str) -> Any:
    """Result of a model's method; None if it has or implements none (models of sounds and pictures have no tokens)."""
    try:
        return getattr(model, method, lambda: None)()
    except (NotImplementedError, AttributeError):
        return None


class _MadeUp:
    """Values for the columns of a batch. The generator is seeded: nothing is secret, and failures can be repeated."""

    def __init__(self, model: nn.Module, columns: Columns, looks: Sequence[Look]):
        self.padding_id, self.padding_side, self.looks = columns.padding_id, columns.padding_side, looks
        self.is_masked, padding_id = "attention_mask" in columns.like, columns.padding_id
        self.generator = torch.Generator().manual_seed(0)
        base = base_model(model)
        self.num_labels = max(int(getattr(getattr(base, "config", None), "num_labels", 2)), 1)
        self.embeddings = _answer(base, "get_input_embeddings")
        tables = [m.num_embeddings for m in base.modules() if isinstance(m, nn.Embedding)]
        unknown = min([NUM_CODES, *tables])  # whichever of them it is that looks the tokens up
        self.vocabulary = unknown if self.embeddings is None else getattr(self.embeddings, "num_embeddings", 2)
        head = _answer(base, "get_output_embeddings")
        self.predicts_tokens = head is not None
        weight_VD = getattr(head, "weight", None)  # a head may know fewer tokens than are read (pictures, in Mllama)
        self.targets = min(self.vocabulary, len(weight_VD)) if isinstance(weight_VD, torch.Tensor) else self.vocabulary
        config: Any = getattr(base, "config", None)
        classifies = type(base).__name__.endswith("ForSequenceClassification")
        # BART and T5 classify at the end token, and want one in every record
        self.end_id = config.eos_token_id if classifies and getattr(config, "is_encoder_decoder", False) else None
        named = [v for _, name, v in settings(base) if name.endswith(("_token_id", "_token_index")) and type(v) is int]
        self.special = {i for i in (padding_id, self.end_id, *named) if i is not None and 0 <= i < self.vocabulary}
        if len(self.special) >= self.vocabulary:
            self.special = {i for i in (padding_id, self.end_id) if i is not None}

    def below(self, high: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=self.generator)

    def padding(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Mask of padding, (B, T): each record has a length of its own."""
        lengths_B = torch.tensor([max(1, int(look.length * shape[1])) for look in self.looks])
        padding_BT = torch.arange(shape[1]) >= lengths_B.unsqueeze(1)
        return padding_BT.flip(1) if self.padding_side == "left" else padding_BT

    def ids(self, shape: tuple[int, ...]) -> torch.Tensor:
        ids_BT = self.below(self.vocabulary, shape)
        ordinary = next(i for i in range(self.vocabulary) if i not in self.special)
        for i in self.special:
            ids_BT[ids_BT == i] = ordinary
        ids_BT[[look.kind == "constant" for look in self.looks]] = ordinary
        is_large = [look.kind == "large" for look in self.looks]
        if any(is_large):
            ids_BT[is_large] = self.largest_token(ordinary)
        padding_BT = self.padding(shape) if self.padding_id is not None and self.is_masked else None
        if self.end_id is not None:
            is_padded_right = padding_BT is not None and self.padding_side == "right"
            last_B = (~padding_BT).sum(1) - 1 if is_padded_right else torch.full((shape[0],), shape[1] - 1)  # type: ignore[operator]
            ids_BT[torch.arange(shape[0]), last_B] = self.end_id
        return ids_BT if padding_BT is None else ids_BT.masked_fill(padding_BT, self.padding_id)  # type: ignore[arg-type]

    def largest_token(self, ordinary: int) -> int:
        """The token that is embedded with the largest norm; `ordinary` if there is no table of floats."""
        weight_VD = getattr(self.embeddings, "weight", None)
        if not isinstance(weight_VD, torch.Tensor) or not weight_VD.is_floating_point() or weight_VD.dim() != 2:
            return ordinary
        dtype = torch.promote_types(weight_VD.dtype, torch.float32)
        norms_V = torch.linalg.vector_norm(weight_VD.detach(), dim=1, dtype=dtype)
        norms_V[[i for i in self.special if i < len(norms_V)]] = -1.0
        return int(norms_V.argmax())

    def labels(self, shape: tuple[int, ...], is_per_token: bool) -> torch.Tensor:
        if len(shape) == 1 or not (is_per_token or self.predicts_tokens):
            return self.below(self.num_labels, shape)
        labels_BT = self.below(self.targets if self.predicts_tokens else self.num_labels, shape)
        if self.predicts_tokens and self.padding_id is not None:  # the padding token is no target
            labels_BT[labels_BT == self.padding_id] = (self.padding_id + 1) % self.targets
        return labels_BT.masked_fill(self.padding(shape), IGNORED)

    def features(self, shape: tuple[int, ...]) -> torch.Tensor:
        made = torch.randn(shape, generator=self.generator)
        sizes_B = torch.tensor([LARGE if look.kind == "large" else 1.0 for look in self.looks])
        return made * sizes_B.view(-1, *[1] * (made.dim() - 1))


def _records(
    like: Mapping[str, Any], made_up: _MadeUp, device: torch.device, num_tokens: int | None
) -> dict[str, Any]:
    """Made-up records with one row each."""
    num = len(made_up.looks)
    width = num_tokens or min([MAX_TOKENS, *(v.size(1) for v in like.values() if is_per_token(v, like))])
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
            made = made_up.ids(shape)
        elif key.endswith("attention_mask"):
            made = ~made_up.padding(shape)
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
