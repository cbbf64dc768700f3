"""Refusals of trainers that compute a loss of the batch, or override methods that the private step needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.refusal import Refusal, raise_first

# TRL's trainers whose loss is of pairs or of the batch: the reason, and the alternative.
PREFERENCES = {
    "dpo_trainer": (
        "compares two answers in one loss, and its collator makes two rows of one record (chosen and rejected), which "
        "the clip would take for two records.",
        "Finetune on the chosen answers instead: DPTrainerMixin in front of SFTTrainer, with columns prompt and "
        "completion (the chosen answer).",
    ),
    "reward_trainer": (
        "compares two answers in one loss, and its collator makes two rows of one record (chosen and rejected), which "
        "the clip would take for two records.",
        "Classify instead: two rows for each pair, the chosen answer with label 1 and the rejected one with label 0, "
        "AutoModelForSequenceClassification with num_labels=2 and DPTrainer with --privacy_unit user "
        "--user_id_column pair, so that the rows of a pair are clipped as one. The reward is the difference of the "
        "logits.",
    ),
    "kto_trainer": (
        "estimates a divergence from the other records of the batch, so a record's loss depends on them.",
        "Finetune on the desirable completions instead (those with label True): DPTrainerMixin in front of "
        "SFTTrainer, with columns prompt and completion.",
    ),
}
OTHER_TRL = (
    "computes a loss of the whole batch.",
    "Of TRL's trainers SFTTrainer can be private: DPTrainerMixin in front of it, with records that hold prompt and "
    "completion.",
)


def check_loss(
    trainer_class: type,
    stock_compute_loss: tuple[Any, ...],
    compute_loss_func: Any,
    args: Any,
    per_example_loss_func: Any = None,
) -> None:
    """Refuse losses of the whole batch.

    Args:
        trainer_class: class of the trainer.
        stock_compute_loss: methods of transformers, which are replaced by losses of records.
        compute_loss_func: the trainer's parameter of that name.
        args: training arguments of the trainer.
        per_example_loss_func: the trainer's parameter of that name; training then uses nothing else, evaluation still
            uses the others.

    Raises:
        DPConfigError: naming a way out.
    """
    owner = _owner(trainer_class, "compute_loss").__module__
    if owner == "trl.trainer.sft_trainer":
        raise_first(_on_sft(args))
        stock_compute_loss = (*stock_compute_loss, trainer_class.compute_loss)  # type: ignore[attr-defined]
    elif owner.startswith("trl."):
        what, fix = PREFERENCES.get(owner.rpartition(".")[2], OTHER_TRL)
        raise DPConfigError(f"{_owner(trainer_class, 'compute_loss').__name__} {what} {fix}")
    if per_example_loss_func is not None:
        return
    fix = (
        "Pass per_example_loss_func=f, with f(outputs, labels) or f(outputs, labels, inputs) -> one loss per record, "
        "shape (batch,)."
    )
    if compute_loss_func is not None:
        raise DPConfigError(f"A compute_loss_func returns one number for the batch, which mixes records. {fix}")
    if trainer_class.compute_loss not in stock_compute_loss:  # type: ignore[attr-defined]
        raise DPConfigError(
            f"{trainer_class.__name__} overrides compute_loss, which returns one number for the batch and would not "
            f"be used. {fix} Training then uses that, and evaluation goes on using compute_loss."
        )


def _owner(cls: type, method: str) -> type:
    """The class that defines a method."""
    return next(base for base in cls.__mro__ if method in vars(base))


def _on_sft(args: Any) -> Iterator[Refusal]:
    """Refusals for TRL's SFTTrainer, whose default loss is the token mean, taken record by record here."""
    if not hasattr(args, "loss_type"):
        yield (
            True,
            f"SFTTrainer would replace {type(args).__name__} by a plain SFTConfig, without the privacy budget.",
            "Derive them from both: @dataclass(repr=False) class DPSFTConfig(DPTrainingArguments, SFTConfig).",
        )
        return
    yield (
        args.loss_type != "nll",
        f"SFTTrainer's loss_type={args.loss_type!r} is not taken record by record.",
        "Use loss_type='nll', the default.",
    )
    yield (
        args.packing or args.padding_free,
        "`packing` and `padding_free` put several records into one row, where they would be clipped as one.",
        "Set packing=False and padding_free=False.",
    )
    yield (
        args.activation_offloading,
        "`activation_offloading` keeps layers' inputs where the capture of per-record gradients does not see them.",
        "Set activation_offloading=False; use gradient_checkpointing.",
    )


HOOK_POINTS = (
    "create_accelerator_and_postprocess", "get_train_dataloader", "set_initial_training_values", "training_step",
    "_prepare_for_training", "_finalize_training", "_save_rng_state", "_get_output_dir",
)  # fmt: skip


def check_hooks(trainer_class: type, mixin: type) -> None:
    """Refuse trainers in which another class overrides the private step."""
    replaced = [n for n in HOOK_POINTS if getattr(trainer_class, n) is not getattr(mixin, n)]
    if replaced:
        raise DPConfigError(
            f"{trainer_class.__name__} replaces {', '.join(replaced)}, through which gradients are clipped, noised "
            "and charged, and checkpoints saved whole. Name DPTrainerMixin first among its bases and leave these "
            "methods out; use callbacks."
        )
