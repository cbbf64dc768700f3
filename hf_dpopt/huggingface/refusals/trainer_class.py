"""Refusals of trainers that compute a loss of the batch, or override methods that the private step needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer

from hf_dpopt.common.errors import DPConfigError, Refusal, refuses
from hf_dpopt.huggingface.arguments import DPTrainingArguments
from hf_dpopt.huggingface.inputs import TrainerInputs

# TRL's trainers whose loss is of pairs or of the batch: the reason, and the alternative.
PREFERENCES = {
    "dpo_trainer": ("compares two answers in one loss.", "Use hf_dpopt.DPDPOTrainer with hf_dpopt.DPDPOConfig."),
    "reward_trainer": (
        "compares two answers in one loss.",
        "Use hf_dpopt.DPRewardTrainer with hf_dpopt.DPRewardConfig.",
    ),
    "kto_trainer": (
        "estimates a divergence from the other records of the batch, so a record's loss depends on them.",
        "Finetune on the desirable completions instead (those with label True): DPSFTTrainer, with columns prompt and "
        "completion.",
    ),
}
OTHER_TRL = (
    "computes a loss of the whole batch.",
    "Of TRL's trainers three can be private: DPSFTTrainer, DPDPOTrainer and DPRewardTrainer.",
)
OFFLOADING = (  # of activations, by TRL
    "`activation_offloading` keeps layers' inputs where the capture of per-record gradients does not see them. "
    "Set activation_offloading=False; use gradient_checkpointing."
)


def check_arguments_given(args: Any, trainer_class: type) -> None:
    """Refuse training arguments that know no privacy."""
    if not isinstance(args, DPTrainingArguments):
        raise DPConfigError(
            f"{trainer_class.__name__} got {type(args).__name__}. Replace it by hf_dpopt.DPTrainingArguments "
            "(a Seq2SeqTrainer takes hf_dpopt.DPSeq2SeqTrainingArguments, TRL's trainers hf_dpopt.DPSFTConfig, "
            "DPDPOConfig or DPRewardConfig), and set target_epsilon."
        )
    if issubclass(trainer_class, Seq2SeqTrainer) and not isinstance(args, Seq2SeqTrainingArguments):
        raise DPConfigError(
            f"{trainer_class.__name__} got {type(args).__name__}, which does not say how to generate. Use "
            "hf_dpopt.DPSeq2SeqTrainingArguments."
        )


def check_loss(inputs: TrainerInputs) -> None:
    """Refuse losses of the whole batch.

    With `per_example_loss_func` training uses nothing else; evaluation still uses the others.

    Raises:
        DPConfigError: naming a way out.
    """
    trainer_class: Any = inputs.trainer_class
    if trainer_class.refuse_losses is not None:
        trainer_class.refuse_losses(inputs)
        return
    stock: tuple[Any, ...] = (Trainer.compute_loss, Seq2SeqTrainer.compute_loss)  # replaced by losses of records
    owner = _owner(trainer_class, "compute_loss").__module__
    if owner == "trl.trainer.sft_trainer":
        _check_sft(inputs.args)
        stock = (*stock, trainer_class.compute_loss)
    elif owner.startswith("trl."):
        what, fix = PREFERENCES.get(owner.rpartition(".")[2], OTHER_TRL)
        raise DPConfigError(f"{_owner(trainer_class, 'compute_loss').__name__} {what} {fix}")
    if inputs.per_example_loss_func is not None:
        return
    fix = (
        "Pass per_example_loss_func=f, with f(outputs, labels) or f(outputs, labels, inputs) -> one loss per record, "
        "shape (batch,)."
    )
    if inputs.compute_loss_func is not None:
        raise DPConfigError(f"A compute_loss_func returns one number for the batch, which mixes records. {fix}")
    if trainer_class.compute_loss not in stock:
        raise DPConfigError(
            f"{trainer_class.__name__} overrides compute_loss, which returns one number for the batch and would not "
            f"be used. {fix} Training then uses that, and evaluation goes on using compute_loss."
        )


def _owner(cls: type, method: str) -> type:
    """The class that defines a method."""
    return next(base for base in cls.__mro__ if method in vars(base))


@refuses
def _check_sft(args: Any) -> Iterator[Refusal]:
    """Refusals for TRL's SFTTrainer, whose default loss is the token mean, taken record by record here."""
    if not hasattr(args, "loss_type"):
        yield (
            True,
            f"SFTTrainer would replace {type(args).__name__} by one without a budget. Use hf_dpopt.DPSFTConfig.",
        )
        return
    yield (
        args.loss_type != "nll",
        f"SFTTrainer's loss_type={args.loss_type!r} is not taken record by record. Use loss_type='nll', the default.",
    )
    yield (
        args.packing or args.padding_free,
        "`packing` and `padding_free` put several records into one row, where they would be clipped as one. Set "
        "packing=False and padding_free=False.",
    )
    yield args.activation_offloading, OFFLOADING


HOOK_POINTS = (
    "create_accelerator_and_postprocess", "get_train_dataloader", "set_initial_training_values", "training_step",
    "_prepare_for_training", "_finalize_training", "_save_rng_state", "_get_output_dir",
)  # fmt: skip


BATCHES = "Batches are drawn by --sampling; prepare records in the dataset, and batches in the data collator."
LOSSES = "Pass per_example_loss_func for a loss of your own, and use callbacks for what happens around a step."
NOTHING = "Leave the method out."
NOT_CALLED = {  # methods of stock training that private training replaces -> the way out
    "_get_train_sampler": BATCHES,
    "get_train_dataloader": BATCHES,
    "get_total_train_batch_size": BATCHES,
    "training_step": LOSSES,
    "_get_num_items_in_batch": LOSSES,
    "get_optimizer_cls_and_kwargs": "Pass optimizers or optimizer_cls_and_kwargs, or override create_optimizer.",
    "_save_rng_state": NOTHING,
    "_load_rng_state": NOTHING,
    "floating_point_ops": NOTHING,
}
KNOWN = ("transformers.", "trl.")  # packages whose overrides do nothing that private training lacks


def check_overrides(trainer_class: type, mixin: type) -> None:
    """Refuse trainers that override the private step, or stock methods that it does not call."""
    replaced = [n for n in HOOK_POINTS if getattr(trainer_class, n) is not getattr(mixin, n)]
    if replaced:
        raise DPConfigError(
            f"{trainer_class.__name__} replaces {', '.join(replaced)}, through which gradients are clipped, noised "
            "and charged. Name DPTrainerMixin first among its bases and leave these methods out; use callbacks."
        )
    for base in trainer_class.__mro__:
        for name, fix in NOT_CALLED.items():
            if name in vars(base) and base is not mixin and not base.__module__.startswith(KNOWN):
                raise DPConfigError(f"{base.__name__}.{name}: private training does not call this override. {fix}")


def check_order(trainer_class: type, mixin: type) -> None:
    """Refuse classes in which a Trainer comes before the mixin, so that its methods replace the private ones."""
    order = trainer_class.__mro__
    for base in order[1 : order.index(mixin)]:
        if issubclass(base, Trainer) and not issubclass(base, mixin):
            name = trainer_class.__name__
            raise DPConfigError(
                f"{name}: {base.__name__} comes before {mixin.__name__}, so its methods would replace the "
                f"private ones. Write class {name}({mixin.__name__}, {base.__name__})."
            )
