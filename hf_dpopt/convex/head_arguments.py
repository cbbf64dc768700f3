"""`HeadTrainingArguments`: the command line of a convex head, with defaults within its theorems."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from hf_dpopt.common.checks import check_count, check_mapping
from hf_dpopt.convex.head_plan import HeadConfig
from hf_dpopt.convex.refusals import SUBSPACE, check_convex_arguments
from hf_dpopt.convex.subspace_plan import SubspaceHeadConfig
from hf_dpopt.huggingface.arguments import DPTrainingArguments
from hf_dpopt.plan.options import HeadOptions
from hf_dpopt.plan.size_limits import steps_of

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
