"""The model of `recipes/glue.py`: loaded from a folder or the hub, with a head for the labels, and perhaps LoRA."""

from __future__ import annotations

import logging
from typing import Any

from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_dpopt import DPConfigError
from recipes import hub
from recipes.glue_data import ClassificationData
from recipes.glue_options import ModelArguments

logger = logging.getLogger(__name__)


def load_model(
    model_args: ModelArguments, data: ClassificationData
) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """Tokenizer and model from a folder or the hub, with a head for the labels."""
    assert model_args.model_name_or_path is not None
    source: dict[str, Any] = {
        "cache_dir": model_args.cache_dir,
        "revision": model_args.model_revision,
        "token": model_args.token,
        "trust_remote_code": model_args.trust_remote_code,
    }
    name = model_args.model_name_or_path
    config_name, tokenizer_name = model_args.config_name or name, model_args.tokenizer_name or name
    mend = "Give --model_name_or_path a local folder with config.json, the weights and the tokenizer."
    config = hub.load(
        f"The configuration of {config_name!r}", AutoConfig.from_pretrained, config_name, mend=mend, **source
    )
    own_labels = dict(config.label2id or {})
    config.num_labels = 1 if data.labels is None else len(data.labels)
    if data.labels is not None:
        order = label_order(own_labels, data.labels)
        config.label2id = {data.labels[i]: order[i] for i in range(len(data.labels))}
        config.id2label = {i: label for label, i in config.label2id.items()}
    if model_args.dropout >= 0:
        set_dropout(config, model_args.dropout)
    tokenizer = hub.load(
        f"The tokenizer of {tokenizer_name!r}",
        AutoTokenizer.from_pretrained,
        tokenizer_name,
        mend=mend,
        use_fast=model_args.use_fast_tokenizer,
        **source,
    )
    model = hub.load(
        f"The model {name!r}",
        AutoModelForSequenceClassification.from_pretrained,
        name,
        mend=mend,
        config=config,
        ignore_mismatched_sizes=model_args.ignore_mismatched_sizes,
        **source,
    )
    if tokenizer.pad_token is None:  # decoder models; the attention mask hides what stands there
        tokenizer.pad_token = tokenizer.eos_token
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return tokenizer, model


def label_order(own: dict[str, int], labels: list[str]) -> list[int]:
    """Ids for `labels`: those of the model if it was finetuned on the same names (in any order), else 0, 1, ..."""
    by_name = {name.lower(): i for name, i in own.items()}
    if sorted(by_name) == sorted(label.lower() for label in labels):
        return [by_name[label.lower()] for label in labels]
    return list(range(len(labels)))


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


def add_lora(model: PreTrainedModel, model_args: ModelArguments) -> Any:
    """LoRA on the attention layers (or `lora_target_modules`); the classification head is trained in full."""
    from peft import LoraConfig, TaskType, get_peft_model

    config = LoraConfig(
        task_type=TaskType.SEQ_CLS,  # puts the classification head into modules_to_save
        r=model_args.lora_r,
        lora_alpha=model_args.lora_alpha or 2 * model_args.lora_r,
        lora_dropout=model_args.lora_dropout,
        target_modules=model_args.lora_target_modules,
    )
    try:
        adapted = get_peft_model(model, config)
    except ValueError as error:
        raise DPConfigError(
            f"LoRA does not fit this model: {str(error).splitlines()[0]} Name layers with --lora_target_modules, e.g. "
            "query value."
        ) from error
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    logger.info(f"LoRA r={model_args.lora_r}: {trained:,} trainable parameters.")
    return adapted
