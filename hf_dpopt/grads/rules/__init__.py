"""Rules: how a layer is run under capture and what it contributes to each record's gradient.

A new rule is one file that defines `forward(site, *args)` and one line in `RULES`. Layers without a rule are run by
`fallback`, which is right for every module that maps records to records, and slower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_dpopt.grads.rules import conv1d, embedding, fallback, linear, norms

Rule = Callable[..., Any]

RULES: dict[type[nn.Module], Rule] = {
    nn.Linear: linear.forward,
    Conv1D: conv1d.forward,
    nn.Embedding: embedding.forward,
    nn.LayerNorm: norms.layer_norm,
}


def rule_for(module: nn.Module) -> Rule:
    """The rule of exactly this class.

    A subclass may compute something else in its forward, so it is not served by the rule of its base unless it
    inherits the forward unchanged (`torch.nn.modules.linear.NonDynamicallyQuantizableLinear`, for one).
    """
    for cls, rule in RULES.items():
        if isinstance(module, cls) and type(module).forward is cls.forward:
            return rule
    return fallback.forward
