"""The last linear layer of a classifier: finding it, reading its inputs, and replacing it by a trained head.

Shape legend: K = labels, H = hidden size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from hf_dpopt.common.errors import DPConfigError, UnsupportedModuleError

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
