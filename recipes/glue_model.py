"""The model of `recipes/glue.py`: loaded from a folder or the hub, with a head for the labels."""

from __future__ import annotations

import copy
from collections.abc import Callable
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
from recipes.classifiers import (
    PooledConfig,
    PooledForSequenceClassification,
    PromptConfig,
    PromptForSequenceClassification,
    is_pooled,
    is_prompted,
)
from recipes.glue_data import ClassificationData
from recipes.prompts import Prompt, fill, make_prompt, word_ids
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
        model: PreTrainedModel = load_prompted(model_args, config, tokenizer, data)
    elif model_args.pooling or is_pooled(config):
        model = load_pooled(model_args, config)
    else:
        model = _load_classifier(AutoModelForSequenceClassification, model_args, config)
    models.set_padding(tokenizer, model)
    return tokenizer, model


def _load_classifier(auto: Any, model_args: Any, config: Any) -> Any:
    mismatched = model_args.ignore_mismatched_sizes
    return models.load_weights(auto, model_args, config, ignore_mismatched_sizes=mismatched)


def load_pooled(model_args: Any, config: Any) -> PooledForSequenceClassification:
    """Load a model that reads pooled states: one that was saved as such, or an encoder with a new head.

    Raises:
        DPConfigError: for layers that the model does not have, or other ones than it was saved with.
    """
    if is_pooled(config):
        saved = (config.pooling, config.pooling_layers)
        now = (model_args.pooling or saved[0], model_args.pooling_layers or saved[1])
        if now != saved:
            raise DPConfigError(
                f"The head of this model reads {saved[0]} of the layers {saved[1]}, not {now[0]} of {now[1]}. Leave "
                "--pooling and --pooling_layers out, or use the model that it was made of."
            )
        return _load_classifier(PooledForSequenceClassification, model_args, config)
    num_layers, layers = config.num_hidden_layers, model_args.pooling_layers or [-1]
    if any(not -1 <= layer <= num_layers for layer in layers):
        raise DPConfigError(
            f"pooling_layers={layers}: layers go from 0 (embeddings) to {num_layers}, or -1 for the last. Use those."
        )
    made = PooledConfig(config, model_args.pooling, layers, pad_token_id=config.pad_token_id, **_labels_of(config))
    return PooledForSequenceClassification(made, models.load_weights(AutoModel, model_args, config))


def load_prompted(
    model_args: Any, config: Any, tokenizer: PreTrainedTokenizerBase, data: ClassificationData
) -> PromptForSequenceClassification:
    """Load a language model that classifies by label words, or one that was saved as such.

    Raises:
        DPConfigError: for a prompt that does not fit the data, the model or its tokens, and for a model without a
            language head.
    """
    gap = tokenizer.mask_token_id
    if is_prompted(config):
        flags = ("prompt", "label_words", "pooling", "warm_start_epsilon")
        given = [f"--{name}" for name in flags if getattr(model_args, name) is not None]
        if given or gap != config.mask_token_id:
            raise DPConfigError(
                f"This model was trained with the prompt {config.template!r}. Leave "
                f"{' and '.join(given) or '--tokenizer_name'} out."
            )
        prompt = Prompt(config.template, tuple(map(str, config.label_word_ids)))  # ids stand for the words
        prompt.check(data.labels, has_pairs=data.has_pairs, is_causal=gap is None)
        return models.load_weights(PromptForSequenceClassification, model_args, config)  # type: ignore[return-value]
    if is_pooled(config):
        raise DPConfigError("This model was saved with a head on pooled states. Leave --prompt out, or use its base.")
    prompt = make_prompt(
        model_args.prompt, model_args.label_words, data.task, labels=data.labels, is_causal=gap is None
    )
    prompt.check(data.labels, has_pairs=data.has_pairs, is_causal=gap is None)
    auto = AutoModelForCausalLM if gap is None else AutoModelForMaskedLM
    lm, found = models.load_weights(auto, model_args, config, output_loading_info=True)
    if missing := sorted(found["missing_keys"]):
        raise DPConfigError(
            f"{model_args.model_name_or_path} has no language head ({', '.join(missing[:3])} are not in it), and one "
            "of random weights knows no words. Use a model that was saved with it, or --pooling mean."
        )
    by_id = dict(
        zip((config.label2id[label] for label in data.labels or ()), word_ids(prompt, tokenizer), strict=True)
    )
    made = PromptConfig(
        lm.config, prompt.template, [by_id[i] for i in sorted(by_id)], gap, pad_token_id=config.pad_token_id,
        **_labels_of(config),
    )  # fmt: skip
    return PromptForSequenceClassification(made, lm)


def _labels_of(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name) for name in ("num_labels", "id2label", "label2id")}


def make_encoder(
    tokenizer: PreTrainedTokenizerBase, config: Any, max_length: int
) -> Callable[..., dict[str, list[Any]]]:
    """A function from texts (of pairs: both lists) to columns of tokens, in the template of the model if any."""
    if not is_prompted(config):
        return lambda *texts: dict(tokenizer(*texts, max_length=max_length, truncation=True))
    put = fill(config.template, tokenizer, max_length)

    def encode(*texts: list[str]) -> dict[str, list[Any]]:
        rows = [put(*record) for record in zip(*texts, strict=True)]
        return {name: [row[name] for row in rows] for name in rows[0]}

    return encode


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
