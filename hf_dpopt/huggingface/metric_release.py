"""The usual bound on a loss, for noisy numbers of a training and of a private evaluation set."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.huggingface.arguments import DPTrainingArguments
from hf_dpopt.records.losses import RecordLosses, base_model, problem_type

TOKENS = ("ForCausalLM", "ForMaskedLM", "ForConditionalGeneration")


def complete_metrics(args: DPTrainingArguments, model: Any, per_example_loss_func: Any) -> None:
    """Put the bound on a loss into the arguments, where metrics are asked for without one.

    Raises:
        DPConfigError: for a loss that nothing public bounds.
    """
    options: Any = args.private_metrics_kwargs or {}
    if args.log_private_metrics is None or not isinstance(options, Mapping) or "loss_bound" in options:
        return
    asked = f"log_private_metrics={args.log_private_metrics}"
    declare = """--private_metrics_kwargs '{"loss_bound": 5}'"""
    bound = usual_bound(model, per_example_loss_func, asked, declare)
    args.private_metrics_kwargs = {**options, "loss_bound": bound}


def usual_bound(model: Any, per_example_loss_func: Any, asked: str, declare: str) -> float:
    """Bound on losses that most records keep, from the size of the model's output.

    Five times the loss of a guess for classification, that of a guess for language models. To three digits.

    Args:
        model: the model; one that is not loaded yet has no usual bound.
        per_example_loss_func: the loss, which has none either; None for the model's own.
        asked: the option that needs a bound.
        declare: how another bound is declared.

    Raises:
        DPConfigError: if there is no usual bound.
    """
    is_own = isinstance(model, nn.Module) and per_example_loss_func is None
    size = _output_size(model) if is_own else 0
    if size > 1:
        return round(math.log(size), 3)
    raise DPConfigError(
        f"{asked} needs a bound on the loss of a record, and this loss has no usual one. Declare it: {declare}; "
        "losses above count as that."
    )


def _output_size(model: nn.Module) -> int:
    """Classes, or entries of the vocabulary; of a classification to the fifth power, 0 where they say nothing."""
    kind, config = RecordLosses(model).kind, base_model(model).config
    if kind in TOKENS:
        return getattr(config, "vocab_size", 0) or getattr(config.get_text_config(), "vocab_size", 0)
    is_single = kind == "ForSequenceClassification" and problem_type(model) == "single_label_classification"
    return config.num_labels**5 if is_single or kind == "ForTokenClassification" else 0
