"""Models of the recipes: configuration, tokenizer and weights from a folder or the hub, dropout, LoRA."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from hf_dpopt import DPConfigError
from hf_dpopt.common.extras import import_extra
from recipes import hub
from recipes.options import ModelArguments

logger = logging.getLogger(__name__)

FIX = "Give --model_name_or_path a local folder with config.json, the weights and the tokenizer."


def source(model_args: ModelArguments) -> dict[str, Any]:
    """What every `from_pretrained` is told about the place of the files."""
    return {
        "cache_dir": model_args.cache_dir,
        "revision": model_args.model_revision,
        "token": model_args.token,
        "trust_remote_code": model_args.trust_remote_code,
    }


def load_config(model_args: ModelArguments) -> Any:
    """The configuration, with the dropout that was asked for."""
    name = model_args.config_name or model_args.model_name_or_path
    config = hub.load(
        f"The configuration of {name!r}", AutoConfig.from_pretrained, name, fix=FIX, **source(model_args)
    )
    if model_args.dropout >= 0:
        set_dropout(config, model_args.dropout)
    return config


def load_tokenizer(model_args: ModelArguments) -> PreTrainedTokenizerBase:
    name = model_args.tokenizer_name or model_args.model_name_or_path
    return hub.load(
        f"The tokenizer of {name!r}",
        AutoTokenizer.from_pretrained,
        name,
        fix=FIX,
        use_fast=model_args.use_fast_tokenizer,
        **source(model_args),
    )


def load_weights(auto_class: Any, model_args: ModelArguments, config: Any, **kwargs: Any) -> PreTrainedModel:
    """The model of one of transformers' Auto classes.

    Raises:
        DPConfigError: if it cannot be loaded, or was saved with a head for other labels.
    """
    name = model_args.model_name_or_path
    if model_args.attn_implementation is not None:
        kwargs["attn_implementation"] = model_args.attn_implementation
    try:
        return hub.load(
            f"The model {name!r}",
            auto_class.from_pretrained,
            name,
            fix=FIX,
            config=config,
            **kwargs,
            **source(model_args),
        )
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise DPConfigError(
            f"The model {name!r} was saved with a head for another number of labels than the data have. Use data with "
            "its labels, or add --ignore_mismatched_sizes true for a head that starts anew."
        ) from error


def set_padding(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """A padding token for those that have none: decoder models. The attention mask hides what stands there."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id


def set_dropout(config: Any, dropout: float) -> None:
    """Sets every dropout rate of a configuration, nested ones included: dropout adds noise to noise."""
    changed = []
    for name, value in vars(config).items():
        if hasattr(value, "to_dict"):
            set_dropout(value, dropout)
        elif "drop" in name and isinstance(value, (int, float)) and not isinstance(value, bool) and value != dropout:
            setattr(config, name, dropout)
            changed.append(f"{name} {value:g}")
    if changed:
        logger.info(
            f"Dropout is set to {dropout:g} (was {', '.join(changed)}), as recommended for private training; "
            "--dropout -1 keeps the model's own."
        )


def outputs(
    model: PreTrainedModel, records: Sequence[dict[str, Any]], collate: Any, size: int = 16
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield logits and labels of `size` records at a time; the model is in evaluation mode."""
    for first in range(0, len(records), size):
        batch = dict(collate(records[first : first + size]))
        labels = batch.pop("labels")
        with torch.no_grad():
            yield model(**batch).logits.float(), labels


def choose_trained(model: PreTrainedModel, model_args: ModelArguments, task: str) -> Any:
    """Adapt or freeze the model as the flags say.

    Args:
        model: a model with its head.
        model_args: `lora_r` and `freeze`, of which one at most is set.
        task: name of a `peft.TaskType`; with SEQ_CLS the classification head is trained in full.

    Raises:
        DPConfigError: if the model has no such layers, or nothing would be left to train.
    """
    if model_args.lora_r:
        return add_lora(model, model_args, task)
    if model_args.freeze == "encoder":
        freeze_encoder(model)
    return model


def freeze_encoder(model: PreTrainedModel) -> None:
    """Leave all but the head as it is.

    Raises:
        DPConfigError: if nothing would be left to train.
    """
    base = model.base_model
    frozen = set() if base is model else set(base.parameters())
    left = sum(p.numel() for p in model.parameters() if p not in frozen)
    if not frozen or not left:
        raise DPConfigError(
            f"--freeze encoder leaves {'all' if left else 'nothing'} of {type(model).__name__} to train. Use "
            "--lora_r 8."
        )
    for parameter in frozen:
        parameter.requires_grad_(False)
    logger.info(f"Frozen: encoder; {left:,} parameters are trained.")


def linear_layers(model: PreTrainedModel) -> list[str]:
    """Names of all linear layers of a model but its head, and those of attention that never calls its own layers."""
    head = model.get_output_embeddings()
    called = set(model.base_model.modules()) - {head}
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            called -= set(module.modules())
    return [name for name, one in model.named_modules() if isinstance(one, (nn.Linear, Conv1D)) and one in called]


def add_lora(model: PreTrainedModel, model_args: ModelArguments, task: str) -> Any:
    """LoRA on all linear layers but the head, or on `lora_target_modules`.

    Args:
        task: name of a `peft.TaskType`; with SEQ_CLS the classification head is trained in full.

    Raises:
        DPConfigError: if the model has no such layers.
    """
    peft = import_extra("peft", "--lora_r")
    config = peft.LoraConfig(
        task_type=peft.TaskType[task],
        r=model_args.lora_r,
        lora_alpha=model_args.lora_alpha or 2 * model_args.lora_r,
        lora_dropout=model_args.lora_dropout,
        target_modules=model_args.lora_target_modules or linear_layers(model),
    )
    try:
        adapted = peft.get_peft_model(model, config)
    except ValueError as error:
        raise DPConfigError(
            f"LoRA does not fit this model: {str(error).splitlines()[0]} Name layers with --lora_target_modules, e.g. "
            "query value."
        ) from error
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    logger.info(f"LoRA r={model_args.lora_r}: {trained:,} trainable parameters.")
    return adapted
