"""Trainers that compute a loss of the batch, or replace what the private step stands on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hf_dpopt.errors import DPConfigError
from hf_dpopt.refusals.table import Refusal, raise_first


def check_loss(trainer_class: type, stock_compute_loss: tuple[Any, ...], compute_loss_func: Any, args: Any) -> None:
    """Refuses losses of the whole batch."""
    if trainer_class.compute_loss.__module__ == "trl.trainer.sft_trainer":  # type: ignore[attr-defined]
        raise_first(_on_sft(args))
        stock_compute_loss = (*stock_compute_loss, trainer_class.compute_loss)  # type: ignore[attr-defined]
    mend = "Pass per_example_loss_func=f, with f(outputs, labels) -> one loss per record, shape (batch,)."
    if compute_loss_func is not None:
        raise DPConfigError(f"compute_loss_func returns one number for the batch, in which records are mixed. {mend}")
    if trainer_class.compute_loss not in stock_compute_loss:  # type: ignore[attr-defined]
        raise DPConfigError(
            f"{trainer_class.__name__} overrides compute_loss, which returns one number for the batch and would not "
            f"be used. {mend}"
        )


def _on_sft(args: Any) -> Iterator[Refusal]:
    """TRL's SFTTrainer: its default loss is the token mean, which is taken record by record here."""
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
        "packing and padding_free put several records into one row, where they would be clipped as one.",
        "Set packing=False and padding_free=False.",
    )
    yield (
        args.activation_offloading,
        "activation_offloading keeps layers' inputs where the capture of per-record gradients does not see them.",
        "Set activation_offloading=False; use gradient_checkpointing.",
    )


HOOK_POINTS = (
    "create_accelerator_and_postprocess", "get_train_dataloader", "set_initial_training_values", "training_step",
    "_prepare_for_training", "_finalize_training", "_save_rng_state",
)  # fmt: skip


def check_hooks(trainer_class: type, mixin: type) -> None:
    """Refuses trainers in which another class stands in front of the private step."""
    replaced = [n for n in HOOK_POINTS if getattr(trainer_class, n) is not getattr(mixin, n)]
    if replaced:
        raise DPConfigError(
            f"{trainer_class.__name__} replaces {', '.join(replaced)}, through which gradients are clipped, noised "
            "and charged. Name DPTrainerMixin first among its bases and leave these methods out; use callbacks."
        )
