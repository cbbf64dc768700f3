"""Refusals of arguments that the theorems behind a convex head do not cover, each with the way out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hf_dpopt.common.checks import check_mapping
from hf_dpopt.common.refusal import Refusal, refuses
from hf_dpopt.huggingface.values import check_values
from hf_dpopt.noise.registry import is_independent

FINETUNE = "Leave it out, or finetune with DPTrainer, whose epsilon covers it."
FINAL_ONLY = "Only the final weights may leave, so nothing is seen of the run before its end."
SUBSPACE = "subspace"  # preconditioner of a head that is trained by composition, without the last iterate's bound
SUBSPACE_OPTIONS = ("rank", "refresh_every", "eps")
ALGORITHM = "AdaGrad in a public subspace (arXiv:2008.06570, Algorithm 1)"


@refuses
def check_convex_arguments(args: Any, *, lora_r: int = 0) -> Iterator[Refusal]:
    """Refuse training arguments under which the last iterate has no bound.

    With ``preconditioner="subspace"`` there is no such bound, and what is no part of that algorithm is refused.

    Args:
        args: `DPTrainingArguments`, with ``optim="sgd"``, ``lr_scheduler_type="constant"`` and no saving, logging and
            evaluation as defaults.
        lora_r: rank of the requested adapter; 0 for none.

    Raises:
        DPConfigError: with the reason and the fix.
    """
    check_values(args)
    is_subspace = args.preconditioner == SUBSPACE
    yield from _on_subspace(args, lora_r) if is_subspace else _on_steps(args, lora_r)
    yield from _on_records(args)
    yield from _on_schedule(args, falls="AdaGrad's matrix makes" if is_subspace else "--decay 0.5 makes")
    yield from _on_what_is_seen(args)


def _on_subspace(args: Any, lora_r: int) -> Iterator[Refusal]:
    optim = str(getattr(args.optim, "value", args.optim))
    options = check_mapping("preconditioner_kwargs", args.preconditioner_kwargs or {}, '{"rank": 16}')
    unknown = [name for name in options if name not in SUBSPACE_OPTIONS]
    yield (
        bool(unknown),
        f"The preconditioner_kwargs have {', '.join(map(repr, unknown))}, which no head in a public subspace has. It "
        f"knows: {', '.join(SUBSPACE_OPTIONS)}.",
    )
    yield (
        optim != "sgd" or bool(args.optim_args),
        f"optim={optim}, optim_args={args.optim_args!r}: {ALGORITHM} makes its steps itself, without momentum. Use "
        "--optim sgd without optim_args, or finetune with DPTrainer.",
    )
    yield (
        args.filter is not None or args.public_mirror_descent is not None or args.average_iterate is not None,
        f"Filters, mirror descent and other averages are no part of {ALGORITHM}, which returns the mean of all "
        f"iterates. {FINETUNE}",
    )
    yield (
        not is_independent(args.noise_mechanism) or bool(args.noise_restart_every),
        f"noise_mechanism={args.noise_mechanism!r}: directions change from step to step, and correlated noise is "
        "taken back within one set of directions only. Epsilon is that of independent releases. Use "
        "--noise_mechanism gaussian.",
    )
    yield (lora_r > 0, f"lora_r={lora_r}: the subspace is one of gradients of the head alone. {FINETUNE}")


def _on_steps(args: Any, lora_r: int) -> Iterator[Refusal]:
    optim = str(getattr(args.optim, "value", args.optim))
    yield (
        optim != "sgd",
        f"optim={optim} is outside every bound on the last iterate: its steps are no contractions of the weights. "
        "Use --optim sgd, or finetune with DPTrainer.",
    )
    yield (
        bool(args.optim_args),
        f"optim_args={args.optim_args!r}: with momentum a step depends on the whole past, which no bound on the last "
        f"iterate covers. {FINETUNE}",
    )
    yield (
        args.filter is not None,
        f"filter={args.filter!r} mixes gradients of several steps, which no bound on the last iterate covers. "
        f"{FINETUNE}",
    )
    yield (
        not is_independent(args.noise_mechanism) or bool(args.noise_restart_every),
        f"noise_mechanism={args.noise_mechanism!r}: later steps take correlated noise back, and what is left at the "
        f"end hides less than the bound on the last iterate needs. {FINETUNE}",
    )
    yield (
        args.preconditioner not in (None, "none", "identity"),
        "Preconditioners and adaptive clipping norms change with the data: steps are no gradients of one convex "
        f"loss. {FINETUNE}",
    )
    yield (
        args.public_mirror_descent is not None or args.average_iterate is not None,
        f"Mirror descent and averages of iterates are outside the bound on the last iterate of plain SGD. {FINETUNE}",
    )
    yield (lora_r > 0, f"lora_r={lora_r}: the loss is not convex in an adapter. {FINETUNE}")


def _on_records(args: Any) -> Iterator[Refusal]:
    yield (
        bool(args.earlier_runs),
        f"earlier_runs={args.earlier_runs}: a head's steps are not composed with those of other runs. Leave it out, "
        "and add up epsilon and delta; or finetune with DPTrainer.",
    )
    yield (
        args.privacy_unit != "example",
        f"privacy_unit={args.privacy_unit!r}: features are bounded record by record, so single records are "
        "protected. Finetune with DPTrainer, which protects users.",
    )
    yield (
        args.sampling not in ("auto", "poisson"),
        f"sampling={args.sampling!r}: the batches of a head are full, or Poisson. Use --sampling poisson.",
    )
    yield (
        args.adjacency not in ("auto", "add_or_remove_one"),
        f"adjacency={args.adjacency!r}: epsilon of a head has a proof under add_or_remove_one only. Use --adjacency "
        "add_or_remove_one.",
    )


def _on_schedule(args: Any, *, falls: str) -> Iterator[Refusal]:
    scheduler = str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
    yield (
        scheduler != "constant" or bool(args.get_warmup_steps(100)),
        f"lr_scheduler_type={scheduler}, with or without warmup: the steps of a head are constant; {falls} them "
        "fall. Use --lr_scheduler_type constant without warmup.",
    )
    yield (args.ball_radius is not None, "`ball_radius` belongs to finetuning. Use --head_radius.")
    yield (
        bool(args.weight_decay),
        f"weight_decay={args.weight_decay:g} belongs to finetuning. Leave it at 0. Use --l2 with a head by SGD.",
    )
    yield (bool(args.max_grad_norm), "`max_grad_norm` clips a sum, which no head does. Leave it at 0.")


def _on_what_is_seen(args: Any) -> Iterator[Refusal]:
    is_covered = args.preconditioner == SUBSPACE  # all iterates are, by composition
    intermediate = (
        "are not made while a head is trained." if is_covered else f"show intermediate weights. {FINAL_ONLY}"
    )
    only = "Metrics on training records are never covered." if is_covered else FINAL_ONLY
    for name, never in (("save_strategy", "no"), ("eval_strategy", "no"), ("logging_strategy", "no")):
        value = str(getattr(getattr(args, name), "value", getattr(args, name)))
        what = {"save": "Checkpoints", "eval": "Evaluations", "logging": "Logs"}[name.split("_")[0]]
        yield (value != never, f"{name}={value}: {what} {intermediate} Use --{name} no.")
    yield (bool(args.load_best_model_at_end), f"`load_best_model_at_end` chooses among iterates. {only} Leave it out.")
    yield (bool(args.log_unprivatized), f"`log_unprivatized` prints values of the training data. {only} Leave it out.")
    yield (
        args.log_private_metrics is not None,
        "`log_private_metrics` releases numbers in every step, and of a head only the final weights leave. Leave it "
        "out, or finetune with DPTrainer.",
    )
    yield (
        args.unsafe_fixed_noise_key is not None,
        "`unsafe_fixed_noise_key` makes nothing private. Leave it out; --noise_multiplier 0 runs without noise and "
        "says so.",
    )
    yield (args.world_size > 1, "A head is trained by one process. Start the recipe without accelerate launch.")
