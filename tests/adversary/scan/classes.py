"""The model classes that the scan looks at: every one behind an `AutoModelFor*` whose forward takes labels."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import transformers.models.auto.modeling_auto as auto

# The first one that lists a class says what its records look like; the rest follow by the alphabet.
FIRST = (
    "CausalLM", "MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice",
    "NextSentencePrediction", "Seq2SeqLM", "ImageTextToText", "ImageClassification", "VideoClassification",
    "AudioClassification", "AudioFrameClassification", "AudioXVector", "CTC", "SpeechSeq2Seq",
)  # fmt: skip
LABELS = ("labels", "start_positions", "class_labels", "mc_labels", "next_sentence_label")


@dataclasses.dataclass(frozen=True)
class ModelClass:
    """One class of the mappings.

    Args:
        name: of the class.
        head: of the first `AutoModelFor*` that offers it, without that prefix.
        model_type: key of its config in the mappings.
    """

    name: str
    head: str
    model_type: str

    def load(self) -> tuple[Any, Any]:
        """The class of the model and that of its config."""
        mapping = _mapping(self.head)
        config = mapping._load_attr_from_module(self.model_type, mapping._config_mapping[self.model_type])
        return mapping._load_attr_from_module(self.model_type, self.name), config


def _mapping(head: str) -> Any:
    return getattr(auto, f"AutoModelFor{head}")._model_mapping


def _heads() -> list[str]:
    prefix = "AutoModelFor"
    found = sorted(name.removeprefix(prefix) for name in dir(auto) if name.startswith(prefix))
    found = [head for head in found if getattr(getattr(auto, prefix + head), "_model_mapping", None) is not None]
    return [head for head in FIRST if head in found] + [head for head in found if head not in FIRST]


def _named() -> Iterator[ModelClass]:
    """Names alone: no model file is imported."""
    seen = set()
    for head in _heads():
        for model_type, names in _mapping(head)._model_mapping.items():
            for name in names if isinstance(names, (tuple, list)) else (names,):
                if name not in seen:
                    seen.add(name)
                    yield ModelClass(name, head, model_type)


@functools.cache
def named_classes() -> dict[str, ModelClass]:
    """Every class behind an `AutoModelFor*` of the installed transformers, by name; those without labels included."""
    return {model.name: model for model in _named()}


def takes_labels(model_class: Any) -> bool:
    """Whether the forward has an argument for labels, without which there is nothing to train by."""
    return any(name in inspect.signature(model_class.forward).parameters for name in LABELS)
