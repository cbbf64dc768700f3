"""`HeadTrainingArguments`: the command line of a convex head, with defaults within its theorems.

Arguments that the theorems do not cover are refused, each with the way out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hf_dpopt.common.checks import check_count, check_known, check_mapping
from hf_dpopt.common.errors import Refusal, refuses, shown
from hf_dpopt.convex.head_plan import HeadConfig
from hf_dpopt.convex.subspace_plan import SubspaceHeadConfig
from hf_dpopt.huggingface.arguments import DPTrainingArguments
from hf_dpopt.huggingface.values import check_values
from hf_dpopt.noise.registry import is_independent
from hf_dpopt.plan.options import HeadOptions
from hf_dpopt.plan.size_limits import steps_of

SUBSPACE = "subspace"  # preconditioner of a head that is trained by composition, without the last iterate's bound
SUBSPACE_OPTIONS = ("rank", "refresh_every", "eps", "adagrad", "matrix_share", "envelope")
UNSEEN = "nothing is seen of a head before its end, and metrics on training records are never covered."
COVERED: dict[str, tuple[tuple[str, ...], str]] = {  # option -> the values that are covered (none: off), and why
    "optim": (("sgd",), "a head makes its steps itself, by SGD or by AdaGrad in a public subspace."),
    "optim_args": ((), "with momentum a step depends on all steps before it."),
    "filter": ((), "it mixes gradients of several steps."),
    "average_iterate": ((), "a head by SGD returns its final weights, one in a subspace the mean of all iterates."),
    "public_mirror_descent": ((), "the steps of a head take no other gradients in."),
    "noise_restart_every": ((), "correlated noise is taken back later; the noise of a head is independent."),
    "preconditioner": (("none", "identity", SUBSPACE), "steps must be gradients of one convex loss."),
    "earlier_runs": ((), "a head is not composed with other runs: add up epsilon and delta of each."),
    "privacy_unit": (("example",), "features are bounded record by record, so single records are protected."),
    "sampling": (("auto", "poisson"), "the batches of a head are full, or Poisson."),
    "adjacency": (("auto", "add_or_remove_one"), "epsilon of a head has a proof under add_or_remove_one only."),
    "lr_scheduler_type": (("constant",), "steps are constant, without warmup; --decay 0.5 makes those of SGD fall."),
    "weight_decay": ((), "a head by SGD has --l2 for it."),
    "max_grad_norm": ((), "it clips a sum, which no head does."),
    "save_strategy": (("no",), UNSEEN),
    "eval_strategy": (("no",), UNSEEN),
    "logging_strategy": (("no",), UNSEEN),
    "load_best_model_at_end": ((), f"it chooses among iterates: {UNSEEN}"),
    "log_unprivatized": ((), f"it prints values of the training data: {UNSEEN}"),
    "log_private_metrics": ((), f"it releases numbers in every step: {UNSEEN}"),
    "unsafe_fixed_noise_key": ((), "it makes nothing private; --noise_multiplier 0 runs without noise."),
}


@refuses
def check_convex_arguments(args: Any, *, lora_r: int = 0) -> Iterator[Refusal]:
    """Refuse training arguments that no theorem on heads covers.

    Args:
        args: `DPTrainingArguments`, with ``optim="sgd"``, ``lr_scheduler_type="constant"`` and no saving, logging and
            evaluation as defaults.
        lora_r: rank of the requested adapter; 0 for none.

    Raises:
        DPConfigError: with the reason and the fix.
    """
    check_values(args)
    for name, (covered, why) in COVERED.items():
        value = getattr(getattr(args, name), "value", getattr(args, name))
        fix = f"Use --{name} {covered[-1]}" if covered else "Leave it out"
        yield (
            bool(value) and value not in covered,
            f"{name}={shown(value)}: {why} {fix}, or finetune with DPTrainer.",
        )
    yield (
        not is_independent(args.noise_mechanism),
        f"noise_mechanism={args.noise_mechanism!r}: correlated noise is taken back later, and a proof for heads is "
        "one for independent noise. Use --noise_mechanism gaussian, or finetune with DPTrainer.",
    )
    yield (
        bool(args.get_warmup_steps(100)),
        f"warmup_steps={args.warmup_steps}: the steps of a head are constant, without warmup. Leave it out.",
    )
    yield (
        lora_r > 0,
        f"lora_r={lora_r}: the loss is not convex in an adapter. Leave it out.",
    )
    options = check_mapping("preconditioner_kwargs", args.preconditioner_kwargs or {}, '{"rank": 16}')
    if args.preconditioner == SUBSPACE:
        check_known(f"preconditioner={SUBSPACE!r}", options, SUBSPACE_OPTIONS)


BATCH = 1024


@dataclass
class HeadTrainingArguments(HeadOptions, DPTrainingArguments):
    """`DPTrainingArguments` for a head of which only the final weights leave.

    ``learning_rate`` is the step size; 0 takes one that is safe. Steps: ``max_steps``, or ``num_train_epochs``.
    Training arguments outside the theorems are refused; see `check_convex_arguments`. ``preconditioner="subspace"``
    asks for a `SubspaceHeadConfig`, whose rank, refresh_every and eps are ``preconditioner_kwargs``.
    """

    optim: str = field(default="sgd", metadata={"help": "sgd; nothing else is covered."})
    learning_rate: float = field(
        default=0.0, metadata={"help": "Step size; 0: 1 / (feature_norm^2 / 2 + 2 l2), half of what is allowed."}
    )
    lr_scheduler_type: str = field(default="constant", metadata={"help": "constant; see --decay."})
    save_strategy: str = field(default="no", metadata={"help": "no: only the final weights leave."})
    eval_strategy: str = field(default="no", metadata={"help": "no: only the final weights are evaluated."})
    logging_strategy: str = field(default="no", metadata={"help": "no: nothing is seen of the run before its end."})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.remove_unused_columns = False

    def head_config(self, num_examples: int, *, has_bias: bool = True) -> HeadConfig:
        """The checked config that these arguments ask for; a `SubspaceHeadConfig` with the preconditioner "subspace".

        Raises:
            DPConfigError: for anything outside the theorems, or values out of range.
        """
        check_convex_arguments(self)
        is_in_subspace = self.preconditioner == SUBSPACE  # full batches there, as in its paper
        batch = self.expected_batch_size or (num_examples if is_in_subspace else min(BATCH, num_examples))
        check_count("num_examples", num_examples)
        steps = self.max_steps if self.max_steps > 0 else steps_of(self.num_train_epochs, num_examples, batch)
        given = {f.name for f in dataclasses.fields(HeadConfig)} & {f.name for f in dataclasses.fields(self)}
        values = {name: getattr(self, name) for name in given}
        values |= {"expected_batch_size": batch, "learning_rate": self.learning_rate or None}
        values |= {"num_steps": steps, "has_bias": has_bias}
        if is_in_subspace:
            options = check_mapping("preconditioner_kwargs", self.preconditioner_kwargs or {}, '{"rank": 16}')
            return SubspaceHeadConfig(**values, **options)
        return HeadConfig(**values)
