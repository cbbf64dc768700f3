"""Options that decide a record's gradient: a resumed run must share them, besides the plan, with the first run.

No (key, step) is used twice whatever these options are; but a run that continues with others is not the one that the
statement describes, and not bit-equal to one that was never interrupted.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import nn

from hf_dpopt.records.losses import RecordLosses, base_model

# Of configurations: names, versions, formats, and what the model writes there itself.
NO_PART_OF_THE_GRADIENT = frozenset(
    {
        "_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache", "id2label",
        "label2id", "problem_type", "output_hidden_states", "output_attentions", "return_dict", "initializer_range",
        "task_specific_params", "base_model_name_or_path", "revision", "inference_mode", "peft_version",
        "auto_mapping", "init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
        "megatron_config", "megatron_core", "pad_to_multiple_of", "return_tensors",
    }
)  # fmt: skip
KNOWN_COLLATORS = ("transformers.", "trl.")  # their fields are options; those of others may be data


def gradient_options(model: nn.Module, losses: RecordLosses, *, bf16: bool, collator: Any) -> dict[str, Any]:
    """Public values that a record's gradient depends on; JSON-able.

    Args:
        model: the model as it is trained, adapters included.
        losses: losses of the run's records; what they depend on besides is the attribute `options` of their function.
        bf16: whether forwards compute in bfloat16.
        collator: collator of the training records.
    """
    adapters = getattr(model, "peft_config", {})
    dropouts = [module.p for module in model.modules() if isinstance(module, nn.modules.dropout._DropoutNd)]
    return {
        "model": type(base_model(model)).__name__,
        "config": _public(config.to_dict()) if (config := getattr(base_model(model), "config", None)) else {},
        "adapters": {name: _public(adapter.to_dict()) for name, adapter in adapters.items()},
        "trained": _trained_parameters(model),
        "dropouts": dict(Counter(map(str, dropouts))),
        "loss": _loss(model, losses),
        "label_smoothing_factor": losses.label_smoothing,
        "bf16": bf16,
        "collator": _collator(getattr(collator, "wrapped", collator)),
    } | ({"loss_options": _public(losses.loss.options)} if hasattr(losses.loss, "options") else {})


def _loss(model: nn.Module, losses: RecordLosses) -> str:
    """Kind of the loss; one name for the two of a classifier, for labels decide, and evaluation stores the choice."""
    if losses.kind != "ForSequenceClassification":
        return losses.kind if losses.kind != "custom" else _name_of(losses.loss)
    config = base_model(model).config
    is_regression = config.num_labels == 1 or config.problem_type == "regression"
    return "regression" if is_regression else "by the labels"


def _trained_parameters(model: nn.Module) -> str:
    shapes = sorted((name, tuple(p.shape)) for name, p in model.named_parameters() if p.requires_grad)
    digest = hashlib.sha256(repr(shapes).encode()).hexdigest()[:16]
    return f"{sum(p.numel() for p in model.parameters() if p.requires_grad)} numbers, names and shapes {digest}"


def _collator(collator: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"name": _name_of(collator)}
    if dataclasses.is_dataclass(collator) and type(collator).__module__.startswith(KNOWN_COLLATORS):
        fields = {field.name: getattr(collator, field.name) for field in dataclasses.fields(collator)}
        found |= {name: value for name, value in _public(fields).items() if isinstance(value, (bool, int, float, str))}
    return found


def _name_of(function: Any) -> str:
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def _public(options: Mapping[str, Any]) -> dict[str, Any]:
    return {str(name): _plain(value) for name, value in options.items() if name not in NO_PART_OF_THE_GRADIENT}


def _plain(value: Any) -> Any:
    """Convert a value to JSON types; an object, which may print its address, becomes its type."""
    if isinstance(value, enum.Enum):
        return _plain(value.value)
    if isinstance(value, Mapping):
        return _public(value)
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__
