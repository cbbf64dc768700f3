"""The model of `recipes/glue.py`: loaded from a folder or the hub, with a head for the labels."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_dpopt import DPConfigError
from recipes import models
from recipes.glue_data import ClassificationData
from recipes.pooled_model import PooledConfig, PooledForSequenceClassification, is_pooled
from recipes.prompt_model import PromptConfig, PromptForSequenceClassification, is_prompted
from recipes.prompts import Prompt, make_prompt, word_ids
from recipes.warm_start import fill_pooling

# here what was saved is read by the code of this repository, and needs no trust
for _config, _model in (
    (PooledConfig, PooledForSequenceClassification),
    (PromptConfig, PromptForSequenceClassification),
):
    AutoConfig.register(_config.model_type, _config)
    AutoModelForSequenceClassification.register(_config, _model)


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
    if model_args.prompt is not None or is_prompted(config):
        return tokenizer, load_prompted(model_args, config, tokenizer, data)
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


def load_prompted(
    model_args: Any, config: Any, tokenizer: PreTrainedTokenizerBase, data: ClassificationData
) -> PromptForSequenceClassification:
    """Load a language model that classifies by label words, or one that was saved as such.

    Raises:
        DPConfigError: for a prompt that does not fit the data, the model or its tokens, and for a model without a
            language head.
    """
    is_causal = tokenizer.mask_token_id is None
    asked = None
    if model_args.prompt is not None:
        asked = make_prompt(
            model_args.prompt, model_args.label_words, data.task, labels=data.labels, is_causal=is_causal
        )
    if is_prompted(config):
        return _load_saved_prompt(model_args, config, tokenizer, data, asked)
    assert asked is not None
    if is_pooled(config):
        raise DPConfigError("This model was saved with a head on pooled states. Leave --prompt out, or use its base.")
    asked.check(data.labels, has_pairs=data.has_pairs, is_causal=is_causal)
    labels = {name: getattr(config, name) for name in ("num_labels", "id2label", "label2id")}
    lm = _load_language_model(model_args, config, is_causal=is_causal)
    words, padding = _words_by_id(asked, tokenizer, config, data), config.pad_token_id
    made = PromptConfig(
        lm.config, asked.template, words, tokenizer.mask_token_id, pad_token_id=padding, **labels
    )  # fmt: skip
    model = PromptForSequenceClassification(made, lm)
    models.set_padding(tokenizer, model)
    return model


def _load_saved_prompt(
    model_args: Any,
    config: Any,
    tokenizer: PreTrainedTokenizerBase,
    data: ClassificationData,
    asked: Prompt | None,
) -> PromptForSequenceClassification:
    """Load what was saved, if the data and what is asked for are what it was trained for."""
    saved = Prompt(config.template, tuple(map(str, config.label_word_ids)))  # ids stand for the words
    saved.check(data.labels, has_pairs=data.has_pairs, is_causal=config.mask_token_id is None)
    if model_args.pooling is not None or model_args.warm_start_epsilon is not None:
        raise DPConfigError(
            "This model classifies by label words. Leave --pooling, --start and --warm_start_epsilon out."
        )
    is_other = asked is not None and (
        asked.template != config.template or _words_by_id(asked, tokenizer, config, data) != config.label_word_ids
    )
    if is_other or tokenizer.mask_token_id != config.mask_token_id:
        raise DPConfigError(
            f"This model was trained with the prompt {config.template!r}, other words or another tokenizer. Leave "
            "--prompt, --label_words and --tokenizer_name out."
        )
    model = models.load_weights(PromptForSequenceClassification, model_args, config)
    models.set_padding(tokenizer, model)
    return model


def _words_by_id(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, config: Any, data: ClassificationData) -> list:
    """Token of the word of every label, in the order of the model's ids."""
    order = [config.label2id[label] for label in data.labels or ()]
    ids = dict(zip(order, word_ids(prompt, tokenizer), strict=True))
    return [ids[i] for i in sorted(ids)]


def _load_language_model(model_args: Any, config: Any, *, is_causal: bool) -> PreTrainedModel:
    """Load a model with the language head that it was pretrained with.

    Raises:
        DPConfigError: if there is none: a random one knows no words.
    """
    auto = AutoModelForCausalLM if is_causal else AutoModelForMaskedLM
    lm, found = models.load_weights(auto, model_args, config, output_loading_info=True)
    missing = sorted(found["missing_keys"])
    if missing:
        raise DPConfigError(
            f"{model_args.model_name_or_path} has no language head ({', '.join(missing[:3])} are not in it), and one "
            "of random weights knows no words. Use a model that was saved with it, or --pooling mean."
        )
    return lm


def save_merged(model: Any, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Save a model of one of this repository's classes with its adapters merged in, so that it loads by itself.

    `peft` would put the adapters on the model that they name, with a head of its own class: what they were trained
    with is nowhere but here.
    """
    merged = copy.deepcopy(model).merge_and_unload()
    merged.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def is_own(config: Any) -> bool:
    """Whether the class of the model is one of this repository."""
    return is_pooled(config) or is_prompted(config)


def label_order(own: dict[str, int], labels: list[str]) -> list[int]:
    """Ids for `labels`: those of the model if it was finetuned on the same names (in any order), else 0, 1, ..."""
    by_name = {name.lower(): i for name, i in own.items()}
    if sorted(by_name) == sorted(label.lower() for label in labels):
        return [by_name[label.lower()] for label in labels]
    return list(range(len(labels)))
