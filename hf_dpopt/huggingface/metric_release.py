"""Noisy numbers in the log of a trainer: the usual bound on a loss, and what the start of a run says of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.log import logger
from hf_dpopt.huggingface.arguments import DPTrainingArguments
from hf_dpopt.records.losses import RecordLosses, base_model, problem_type
from hf_dpopt.run.run import PrivateRun

TOKENS = ("ForCausalLM", "ForMaskedLM", "ForConditionalGeneration")


def complete_metrics(args: DPTrainingArguments, model: Any, per_example_loss_func: Any) -> None:
    """Put the bound on a loss into the arguments, where metrics are asked for without one.

    Raises:
        DPConfigError: for a loss that nothing public bounds.
    """
    options: Any = args.private_metrics_kwargs or {}
    if args.log_private_metrics is None or not isinstance(options, Mapping) or "loss_bound" in options:
        return
    bound = usual_bound(model, per_example_loss_func) if isinstance(model, nn.Module) else None
    if bound is None:
        raise DPConfigError(
            f"log_private_metrics={args.log_private_metrics} needs a bound on the loss of a record, and this loss has "
            "no usual one. Declare it: --private_metrics_kwargs '{\"loss_bound\": 5}'; losses above count as that."
        )
    args.private_metrics_kwargs = {**options, "loss_bound": bound}


def usual_bound(model: nn.Module, per_example_loss_func: Any = None) -> float | None:
    """Bound on losses that most records keep, from the size of the model's output; None where that says nothing.

    Five times the loss of a guess for classification, that of a guess for language models. To three digits.
    """
    if per_example_loss_func is not None:
        return None
    kind, config = RecordLosses(model).kind, base_model(model).config
    size: Any = 0
    if kind in TOKENS:
        size = getattr(config, "vocab_size", None) or getattr(config.get_text_config(), "vocab_size", 0)
    elif kind == "ForTokenClassification":
        size = config.num_labels**5
    elif kind == "ForSequenceClassification":
        size = config.num_labels**5 if problem_type(model) == "single_label_classification" else 0
    return round(math.log(size), 3) if size > 1 else None


def announce_metrics(run: PrivateRun) -> None:
    """Say in the log what the numbers take; nothing without them."""
    spec = run.plan.private_metrics
    if spec is not None:
        logger.info(
            f"Private metrics take {spec.share:.3g} of each step's budget: the noise of the gradients is "
            f"{1 / math.sqrt(1 - spec.share) - 1:.2%} larger, epsilon the same. Losses are cut to {spec.loss_bound:g}."
        )
