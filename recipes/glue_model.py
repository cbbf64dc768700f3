"""The model of `recipes/glue.py`: loaded from a folder or the hub, with a head for the labels."""

from __future__ import annotations

from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from recipes import models
from recipes.glue_data import ClassificationData
from recipes.glue_options import ModelArguments


def load_model(
    model_args: ModelArguments, data: ClassificationData
) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """Tokenizer and model from a folder or the hub, with a head for the labels."""
    config = models.load_config(model_args)
    own_labels = dict(config.label2id or {})
    config.num_labels = 1 if data.labels is None else len(data.labels)
    if data.labels is not None:
        order = label_order(own_labels, data.labels)
        config.label2id = {data.labels[i]: order[i] for i in range(len(data.labels))}
        config.id2label = {i: label for label, i in config.label2id.items()}
    tokenizer = models.load_tokenizer(model_args)
    model = models.load_weights(
        AutoModelForSequenceClassification,
        model_args,
        config,
        ignore_mismatched_sizes=model_args.ignore_mismatched_sizes,
    )
    models.set_padding(tokenizer, model)
    return tokenizer, model


def label_order(own: dict[str, int], labels: list[str]) -> list[int]:
    """Ids for `labels`: those of the model if it was finetuned on the same names (in any order), else 0, 1, ..."""
    by_name = {name.lower(): i for name, i in own.items()}
    if sorted(by_name) == sorted(label.lower() for label in labels):
        return [by_name[label.lower()] for label in labels]
    return list(range(len(labels)))
