"""The arguments of a trainer, once: every check, the plan and the session read them here."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn
from transformers import Trainer

from hf_dpopt.huggingface.arguments import DPTrainingArguments


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerInputs:
    """Arguments of a trainer; see `DPTrainerMixin` and transformers' `Trainer`.

    Attributes:
        trainer_class: class of the trainer, which errors name.
        peft_config: adapter that the trainer itself puts around the model; None for no adapter.
    """

    args: DPTrainingArguments
    trainer_class: type = Trainer
    model: Any = None
    train_dataset: Any = None
    eval_dataset: Any = None
    data_collator: Any = None
    processing_class: Any = None
    model_init: Any = None
    compute_loss_func: Any = None
    compute_metrics: Any = None
    preprocess_logits_for_metrics: Any = None
    optimizers: Any = (None, None)
    optimizer_cls_and_kwargs: Any = None
    peft_config: Any = None
    per_example_loss_func: Any = None
    public_dataset: Any = None
    preclip: Any = None
    postprocess: Sequence[Any] = ()

    @classmethod
    def of(
        cls, make: Callable[..., Any], positional: Sequence[Any], named: Mapping[str, Any], **own: Any
    ) -> TrainerInputs:
        """Read the arguments of a call.

        Args:
            make: the constructor behind the mixin, which names what was given by place.
            positional: its arguments by place.
            named: its arguments by name.
            **own: those of the mixin.
        """
        try:
            stock = inspect.signature(make).bind_partial(*positional, **named).arguments
        except TypeError as error:
            fix = " Since transformers 5 it is processing_class=." if "tokenizer" in named else ""
            raise TypeError(f"{make.__qualname__}: {error}.{fix}") from None
        known = {field.name for field in dataclasses.fields(cls)} - own.keys()
        return cls(**{name: value for name, value in stock.items() if name in known}, **own)

    @property
    def has_final_model(self) -> bool:
        """Whether the model is trained as it was given: some trainers load it or wrap it in an adapter themselves."""
        return isinstance(self.model, nn.Module) and self.peft_config is None
