"""The model of `recipes/glue.py`: loaded from a folder or the hub, with a head for the labels."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_dpopt import DPConfigError
from recipes import models
from recipes.glue_data import ClassificationData
from recipes.pooled_model import PooledConfig, PooledForSequenceClassification, is_pooled
from recipes.warm_start import fill_pooling

# here what was saved is read by the code of this repository, and needs no trust
AutoConfig.register(PooledConfig.model_type, PooledConfig)
AutoModelForSequenceClassification.register(PooledConfig, PooledForSequenceClassification)


def load_model(model_args: Any, data: ClassificationData) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """Tokenizer and model from a folder or the hub, with a head for the labels."""
    config = models.load_config(model_args)
    own_labels = dict(config.label2id or {})
    config.num_labels = 1 if data.labels is None else len(data.labels)
    if data.labels is not None:
        order = label_order(own_labels, data.labels)
        config.label2id = {data.labels[i]: order[i] for i in range(len(data.labels))}
        config.id2label = {i: label for label, i in config.label2id.items()}
    tokenizer = models.load_tokenizer(model_args)
    fill_pooling(model_args, config, tokenizer, data)
    pooling = model_args.pooling or (config.pooling if is_pooled(config) else ["model"])
    if pooling == ["model"] and not is_pooled(config):
        model = models.load_weights(
            AutoModelForSequenceClassification,
            model_args,
            config,
            ignore_mismatched_sizes=model_args.ignore_mismatched_sizes,
        )
    else:
        model = load_pooled(model_args, config, pooling)
    models.set_padding(tokenizer, model)
    return tokenizer, model


def load_pooled(model_args: Any, config: Any, pooling: list[str]) -> PooledForSequenceClassification:
    """Load a model that reads pooled states: one that was saved as such, or an encoder with a new head.

    Raises:
        DPConfigError: for ways or layers that the model does not have.
    """
    num_layers, layers = config.num_hidden_layers, model_args.pooling_layers
    if "model" in pooling or any(not -1 <= layer <= num_layers for layer in layers or ()):
        raise DPConfigError(
            f"pooling={pooling} of the layers {layers or [-1]} does not fit: 'model' stands alone, and layers go from "
            f"0 (embeddings) to {num_layers}, or -1 for the last. Use --pooling mean."
        )
    if not is_pooled(config):
        labels = {name: getattr(config, name) for name in ("num_labels", "id2label", "label2id")}
        made = PooledConfig(config, pooling, layers or [-1], pad_token_id=config.pad_token_id, **labels)
        return PooledForSequenceClassification(made, models.load_weights(AutoModel, model_args, config))
    mismatched = model_args.ignore_mismatched_sizes
    found = models.load_weights(
        PooledForSequenceClassification, model_args, config, ignore_mismatched_sizes=mismatched
    )  # fmt: skip
    saved = (config.pooling, config.pooling_layers)
    now = (pooling, layers or saved[1])
    if now == saved:
        return found
    if not mismatched:
        raise DPConfigError(
            f"The head of this model reads {saved[0]} of the layers {saved[1]}, not {now[0]} of {now[1]}. Leave "
            "--pooling out, or add --ignore_mismatched_sizes true for a head that starts anew."
        )
    config.pooling, config.pooling_layers = now
    return PooledForSequenceClassification(config, found.encoder)


def save_merged(model: Any, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Save a model of pooled states with its adapters merged in, so that it loads by itself.

    `peft` would put the adapters on the model that they name, with a head of its own class: what they were trained
    with is nowhere but here.
    """
    merged = copy.deepcopy(model).merge_and_unload()
    merged.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def label_order(own: dict[str, int], labels: list[str]) -> list[int]:
    """Ids for `labels`: those of the model if it was finetuned on the same names (in any order), else 0, 1, ..."""
    by_name = {name.lower(): i for name, i in own.items()}
    if sorted(by_name) == sorted(label.lower() for label in labels):
        return [by_name[label.lower()] for label in labels]
    return list(range(len(labels)))
