"""Features of a frozen model: computed once, kept as private data, and shortened to a public norm; and its head.

The norm bounds what one record can change. Shape legend: N = records, H = hidden size, D = H and the constant feature
of the bias.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm.auto import tqdm

from hf_dpopt.common.errors import DPConfigError, UnsupportedModuleError
from hf_dpopt.common.log import logger
from hf_dpopt.records.collation import Collation
from hf_dpopt.run.kept_state import KeptState, refuse_spoilt
from hf_dpopt.run.keys import read_state, write_state
from hf_dpopt.run.step import digest_of
from hf_dpopt.self_check import Columns, Look
from hf_dpopt.self_check.comparisons import check_outputs
from hf_dpopt.self_check.conditions import device_of, in_mode

TOKENS_AT_ONCE = 2048  # of a batch: 4,000 sentences of SST-2 take 17 s in place of 21; 1024 and 4096 are level


def compute_features(
    model: nn.Module,
    inputs: Sequence[Mapping[str, Any]],
    collate: Callable[[list[Any]], Any],
    *,
    batch_size: int = 64,
    cache: Path | None = None,
    progress: str | None = None,
) -> torch.Tensor:
    """Features that the head of a frozen model sees of each record, in evaluation mode.

    Formal guarantee: the features of a record depend on that record alone, up to rounding in float32. Only records
    with the same number of tokens share a batch, so nothing is padded: models exist whose outputs change with the
    padding, and one record more would change the features of others.

    Args:
        model: a classifier, in float32; see `find_head`. It is not changed.
        inputs: tokenized records, without labels.
        collate: makes a batch of records.
        batch_size: records that fit into memory together, >= 1. A batch has more of them if they are short, up to
            `TOKENS_AT_ONCE` tokens. Changes speed and memory, the features only by rounding.
        cache: private folder to keep the features in, under a digest of the frozen weights and of all inputs;
            features of private records are private data. None to keep nothing.
        progress: label of the progress bar; None for no bar. None is drawn into what is no terminal, such as a log.

    Returns:
        float32, (N, H).
    """
    _check_model(model)
    path = None if cache is None else cache / f"features-{_digest(model, inputs)}.pt"
    if path is not None and path.exists():
        if (kept := read_state(path)) is not None:
            return kept["features"]
        logger.warning(f"{path} is damaged: the features are computed again, which takes time and changes nothing.")
    logger.info("Features: every record goes through the frozen model once, which takes minutes on a CPU.")
    with torch.no_grad(), features_instead_of_logits(model), in_mode(model, training=False):
        start = KeptState(model, has_caches=True)
        try:
            features = _in_order(model, inputs, collate, batch_size, progress, start)
        finally:
            start.restore()
    refuse_spoilt(model)
    if path is not None:
        write_state(path, {"features": features})
    return features


def _in_order(
    model: nn.Module,
    inputs: Sequence[Mapping[str, Any]],
    collate: Callable[[list[Any]], Any],
    batch_size: int,
    progress: str | None,
    start: KeptState,
) -> torch.Tensor:
    found: torch.Tensor | None = None
    collation = Collation.of(collate)
    hidden = True if progress is None else None  # None: tqdm looks whether it writes to a terminal
    with tqdm(total=len(inputs), desc=progress, unit=" records", disable=hidden) as bar:
        for some in _of_equal_length(inputs, batch_size):
            parts = collation.parts([inputs[i] for i in some])
            if sum(len(part.places) for part in parts) != len(some):
                raise DPConfigError(
                    "The collator makes no row of some of the records. Correct these records or leave them out."
                )
            for part in parts:
                if found is None:
                    _check_outputs(model, part.batch, start)
                features_BH = _of_batch(model, part.batch)
                start.check(is_thorough=False)
                if found is None:
                    found = torch.empty(len(inputs), features_BH.size(1))
                found[[some[place] for place in part.places]] = features_BH
            bar.update(len(some))
    if found is None:
        raise DPConfigError("There are no records to compute features of. Give a training set.")
    return found


def _of_batch(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    features_BH = model(**{k: v.to(device_of(model)) for k, v in batch.items()}).logits.float().cpu()
    if features_BH.dim() != 2:
        raise DPConfigError(
            f"{type(model).__name__} gives {features_BH.dim()}-dimensional features. Use a classifier of whole texts."
        )
    return features_BH


def _check_outputs(model: nn.Module, like: Mapping[str, torch.Tensor], start: KeptState) -> None:
    """Refuse a model that mixes or remembers made-up records of one length, or that changes itself."""
    columns, others = Columns(like, None, "right"), (Look(), Look(kind="constant"), Look(kind="large"))
    batches = [columns.batch(model, (Look(), other, other)) for other in others]
    check_outputs(lambda batch: _of_batch(model, batch), batches)
    start.check()


def _of_equal_length(inputs: Sequence[Mapping[str, Any]], size: int) -> Iterator[list[int]]:
    """Yield places of records with the same number of tokens: `size` of them, or as many as are few tokens."""
    lengths = np.array([len(inputs[i]["input_ids"]) for i in range(len(inputs))])
    for length in np.unique(lengths):
        mine = np.flatnonzero(lengths == length).tolist()
        at_once = max(size, TOKENS_AT_ONCE // max(1, int(length)))
        for first in range(0, len(mine), at_once):
            yield mine[first : first + at_once]


def _check_model(model: nn.Module) -> None:
    """Refuse models in which the features of one record depend on others, by more than rounding."""
    kinds = {p.dtype for p in model.parameters() if p.is_floating_point()} - {torch.float32, torch.float64}
    if kinds:
        raise DPConfigError(
            f"The model is in {', '.join(map(str, kinds))}: rounding depends on the other records of a batch, and is "
            "no small matter there. Load it in float32 (model.float())."
        )
    names = {str(getattr(getattr(part, "config", None), "model_type", "")) for part in model.modules()}
    if any("big" in name and "bird" in name for name in names):
        raise DPConfigError(
            f"{type(model).__name__} changes its attention for all records when one is short. Use another model."
        )


def _digest(model: nn.Module, inputs: Sequence[Mapping[str, Any]]) -> str:
    head = f"{find_head(model)}."  # whose weights features do not depend on
    weights = digest_of({name: value for name, value in model.state_dict().items() if not name.startswith(head)})
    digest = hashlib.blake2b(weights.encode(), digest_size=16)
    for record in inputs:
        for name in sorted(record):
            values = np.asarray(record[name])
            digest.update(f"{name} {values.shape}".encode() + values.tobytes())
    return digest.hexdigest()


def clip_features(features: torch.Tensor, feature_norm: float, bias_feature: float = 0.0) -> torch.Tensor:
    """Shorten features, with the constant one, to a norm of at most `feature_norm`, each record by itself.

    Args:
        features: features of the records, (N, H).
        feature_norm: R, > 0.
        bias_feature: value of the constant feature, < R; 0 for none.

    Returns:
        float32, (N, D). A record with a feature that is not finite is all zero but for the constant.
    """
    assert 0 <= bias_feature < feature_norm
    room = (feature_norm**2 - bias_feature**2) ** 0.5 * (1 - 1e-6)  # rounding must not lead beyond R
    features_ND = features.double()
    is_fine_N1 = features_ND.isfinite().all(dim=1, keepdim=True)
    features_ND = torch.where(is_fine_N1, features_ND, torch.zeros_like(features_ND))
    norms_N1 = features_ND.norm(dim=1, keepdim=True)
    clipped_ND = (features_ND * (room / norms_N1.clamp(min=room))).float()
    if not bias_feature:
        return clipped_ND
    return torch.cat([clipped_ND, torch.full_like(clipped_ND[:, :1], bias_feature)], dim=1)


# --- the head, the last linear layer: found, replaced by a trained one; K = labels -----------------------------------


_FIX = (
    "Use a model of AutoModelForSequenceClassification whose head ends in one linear layer, such as BERT, RoBERTa, "
    "DistilBERT, ELECTRA, GPT-2 or Llama; other models can be finetuned with DPTrainer, where every step counts."
)


def find_head(model: nn.Module) -> str:
    """The name of the linear layer whose outputs are the logits.

    Raises:
        UnsupportedModuleError: if there is none: the loss is not convex in any other layer.
        DPConfigError: for a regression model.
    """
    num_labels = int(getattr(model.config, "num_labels", 0))
    if num_labels < 2:
        raise DPConfigError(
            f"A convex head is softmax regression, and the model has {num_labels} label(s). Use two labels or more."
        )
    last = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Linear)][-1:]
    if not last or last[0][1].out_features != num_labels:
        found = f"its last linear layer is {last[0][0]!r}, with {last[0][1].out_features} outputs" if last else "none"
        raise UnsupportedModuleError(
            f"{type(model).__name__} has no linear layer that makes its {num_labels} logits ({found}), so its loss is "
            f"convex in no layer. {_FIX}"
        )
    return last[0][0]


@contextlib.contextmanager
def features_instead_of_logits(model: nn.Module) -> Iterator[None]:
    """Make the model's ``logits`` the inputs of its head, (B, H), pooled as the model pools, inside the context."""
    name = find_head(model)
    parent, _, child = name.rpartition(".")
    owner = model.get_submodule(parent)
    head = getattr(owner, child)
    setattr(owner, child, nn.Identity())
    try:
        yield
    finally:
        setattr(owner, child, head)


@torch.no_grad()
def attach_head(model: nn.Module, weights: torch.Tensor, bias_feature: float) -> None:
    """Make a trained head the model's own, so that it can be saved, pushed and used in a pipeline.

    Features beyond the feature norm were shortened in training and are not here: their logits are longer by the same
    factor, the bias aside.

    Args:
        model: the classifier whose last layer is overwritten.
        weights: (K, H), or (K, H + 1) with the weights of the constant feature last.
        bias_feature: value of the constant feature; 0 if there is none.

    Raises:
        DPConfigError: if the model's layer has no bias and the head has one.
    """
    layer: nn.Linear = model.get_submodule(find_head(model))  # type: ignore[assignment]
    has_bias = weights.size(1) == layer.in_features + 1
    if has_bias and layer.bias is None:
        raise DPConfigError("The model's last layer has no bias, and the head has one. Train with has_bias=False.")
    layer.weight.copy_(weights[:, : layer.in_features])
    if layer.bias is not None:
        layer.bias.copy_(weights[:, -1] * bias_feature if has_bias else torch.zeros_like(layer.bias))


def head_takes_bias(model: nn.Module) -> bool:
    """Whether the model's last layer has a bias."""
    return model.get_submodule(find_head(model)).bias is not None
