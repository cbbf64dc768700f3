"""The plan of a trainer: what was given becomes a plan, its advice and its units, before the trainer is made."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from hf_dpopt.common.collectives import Ranks
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.huggingface.advisor import Advised, ask_advisor, ask_again, typed_batch
from hf_dpopt.huggingface.arguments import DPTrainingArguments
from hf_dpopt.huggingface.inputs import TrainerInputs
from hf_dpopt.huggingface.refusals.data import check_batch
from hf_dpopt.huggingface.refusals.gradient_stages import check_public_records
from hf_dpopt.huggingface.workload import workload_of
from hf_dpopt.noise.registry import check_length, is_independent
from hf_dpopt.plan.choose import make_plan
from hf_dpopt.plan.plan import PrivacyPlan
from hf_dpopt.plan.record import PlanRecord
from hf_dpopt.plan.size_limits import check_sizes, steps_of
from hf_dpopt.records.data_mark import check_same_everywhere
from hf_dpopt.records.overlap import TrainingRows
from hf_dpopt.records.scores import usual_bound
from hf_dpopt.records.unit import check_unit
from hf_dpopt.run.earlier import earlier_runs_for, reading_plan, recorded_plan
from hf_dpopt.users import UserData


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """A run as it was planned, and what of the records decides it.

    Attributes:
        plan: its plan.
        advised: what the advisor chose for it.
        users: the users whose rows the records are; None where records are protected.
    """

    plan: PrivacyPlan
    advised: Advised
    users: UserData | None

    def completed(self, inputs: TrainerInputs) -> PlannedRun:
        """The same with a learning rate for a model that the trainer loaded by itself."""
        advised = ask_again(self.advised, inputs, self.plan)
        advised.apply(inputs.args)
        plan = dataclasses.replace(self.plan, advised=advised.recorded)
        return dataclasses.replace(self, plan=plan, advised=advised)

    def check_length(self, num_steps: int) -> None:
        """Refuse a training of another length than the planned one."""
        if num_steps != self.plan.num_steps:
            raise DPConfigError(
                f"Training would take {num_steps} steps, but the plan was made for {self.plan.num_steps}: arguments "
                "were changed after the trainer was made. Make a new trainer."
            )

    def check_records(self, inputs: TrainerInputs) -> None:
        """Refuse records to train on that the plan does not fit: some trainers prepare those that they are given.

        Args:
            inputs: what the trainer has now.

        Raises:
            DPConfigError: if a record did not stay one record, or public records are training records.
        """
        check_rows(inputs)
        dataset = inputs.train_dataset
        if self.users is not None:
            self.users.check(dataset)
        elif len(dataset) != self.plan.num_examples:
            made = f"{inputs.trainer_class.__name__} made {len(dataset)} training records of {self.plan.num_examples}"
            longest = getattr(inputs.args, "max_length", None)  # of TRL's trainers
            if longest is not None and len(dataset) < self.plan.num_examples:
                raise DPConfigError(
                    f"max_length={longest}: {made}, because TRL leaves out what does not fit, and the plan counts it. "
                    "Set a larger max_length (None: no limit), or take such records out of the dataset before."
                )
            raise DPConfigError(
                f"{made} (packing, splitting or filtering), so the plan does not fit. Prepare it before the trainer."
            )
        check_public_records(inputs, TrainingRows(dataset))


def to_train(planned: PlannedRun | None) -> PlannedRun:
    """Return the planned run of a trainer that trains.

    Raises:
        DPConfigError: for one that only evaluates.
    """
    if planned is None:
        raise DPConfigError("There is no privacy plan without a train_dataset. Pass train_dataset to train.")
    return planned


def plan_run(inputs: TrainerInputs, ranks: Ranks) -> PlannedRun | None:
    """Plan the training of the records that a trainer was given; None if it was given none, to evaluate only.

    Sets in `inputs.args` what the advisor chose, and the logical batch: one loader item is one logical batch, and the
    user's accumulation becomes part of its expected size.

    Args:
        inputs: what the trainer was given, after `check_inputs`.
        ranks: processes of the run, which all plan the same.

    Raises:
        DPConfigError: for what cannot be planned, naming the option.
    """
    args, typed = inputs.args, typed_batch(inputs.args)
    product = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    expected = product if typed is None else typed  # where the advisor chooses none
    planned = None if inputs.train_dataset is None else _plan_run(inputs, ranks, expected)
    args.expected_batch_size = args.expected_batch_size or expected
    args.gradient_accumulation_steps = 1
    args.average_tokens_across_devices = False  # a token count over the batch would couple the records
    return planned


def check_rows(inputs: TrainerInputs) -> None:
    """Refuse rows that are not what the statement will call them: a record, a block, or rows of a user."""
    tokenizers = (inputs.processing_class, getattr(inputs.data_collator, "tokenizer", None))
    known = [getattr(tokenizer, "pad_token_id", None) for tokenizer in tokenizers if tokenizer is not None]
    padding_id = next((i for i in known if i is not None), None)
    unit, declared = inputs.args.privacy_unit, inputs.args.rows_are_records
    check_unit(inputs.train_dataset, unit, rows_are_records=declared, model=inputs.model, padding_id=padding_id)


def _complete_metrics(args: DPTrainingArguments, model: Any, per_example_loss_func: Any) -> None:
    """Put the bound on a loss into the arguments, where metrics are asked for without one.

    Raises:
        DPConfigError: for a loss that nothing public bounds.
    """
    options: Any = args.private_metrics_kwargs or {}
    if args.log_private_metrics is None or not isinstance(options, Mapping) or "loss_bound" in options:
        return
    asked = f"log_private_metrics={args.log_private_metrics}"
    declare = """--private_metrics_kwargs '{"loss_bound": 5}'"""
    bound = usual_bound(model, per_example_loss_func, asked, declare)
    args.private_metrics_kwargs = {**options, "loss_bound": bound}


def _plan_run(inputs: TrainerInputs, ranks: Ranks, expected: int) -> PlannedRun:
    _complete_metrics(inputs.args, inputs.model, inputs.per_example_loss_func)
    args = inputs.args
    check_rows(inputs)
    config = args.privacy_config(expected)
    output_dir, num_examples, users = str(args.output_dir), len(inputs.train_dataset), None
    if config.privacy_unit == "user":
        assert args.user_id_column  # `privacy_config` refuses users without it
        users = UserData.of(inputs.train_dataset, args.user_id_column, config)
        num_examples = users.num_sampled
    check_same_everywhere(inputs.train_dataset)

    def chosen() -> tuple[PlanRecord | None, Advised]:
        recorded = recorded_plan(
            output_dir, args.private_state_dir, keeps_budget=config.target_epsilon is not None,
            num_examples=num_examples,
        )  # fmt: skip
        before = None if recorded is None else recorded.advised or {}
        return recorded, ask_advisor(inputs, num_units=num_examples, batch=expected, recorded=before)

    recorded, advised = ranks.same(chosen)
    settled = copy.copy(args)  # args themselves change once there is a plan
    advised.apply(settled)
    check_batch(settled, expected, num_examples)
    expected = settled.expected_batch_size or expected
    config = settled.privacy_config(expected)
    num_steps = args.max_steps if args.max_steps > 0 else steps_of(args.num_train_epochs, num_examples, expected)
    check_sizes(num_examples, num_steps)
    if recorded is None:  # noise that was tuned stays
        check_length(config.noise_mechanism, num_steps, config.noise_restart_every)
    workload = None
    if not is_independent(config.noise_mechanism):
        workload = workload_of(dataclasses.replace(inputs, args=settled), num_steps)

    def planned() -> PrivacyPlan:
        earlier = earlier_runs_for(args.earlier_runs, output_dir, recorded, args.private_state_dir)
        # A run that goes on keeps the noise it began with; what was asked for now is the budget it must stay in.
        return make_plan(
            config,
            num_examples=num_examples,
            num_steps=num_steps,
            workload=workload,
            recorded=recorded,
            preclip=inputs.preclip,
            advised=advised.recorded,
            earlier=earlier,
        )

    # tuning on other hardware may end in other digits
    with reading_plan(output_dir, is_trusted=recorded is None or recorded.delta is not None):
        plan = ranks.same(planned)
    advised.apply(args)
    return PlannedRun(plan, advised, users)
