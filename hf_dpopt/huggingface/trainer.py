"""`DPTrainer`: the stock Trainer with a private step. Hook points only; the mathematics is in the stages."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import Seq2SeqTrainer, Trainer
from transformers.trainer_callback import DefaultFlowCallback, PrinterCallback, ProgressCallback
from transformers.trainer_utils import BestRun, TrainOutput

from hf_dpopt.accounting.meaning import no_protection
from hf_dpopt.clipping import UnprivatizedStatistics, choose_engine, explain, make_engine, unruled
from hf_dpopt.clipping.capture import Capture
from hf_dpopt.common import collectives, log
from hf_dpopt.common.durable import remove_links
from hf_dpopt.common.errors import DPConfigError, UnsupportedModuleError
from hf_dpopt.common.log import is_secret_key, logger
from hf_dpopt.common.sharding import any_sharded, give_back
from hf_dpopt.common.storage import naming
from hf_dpopt.huggingface import refusals, stage_options
from hf_dpopt.huggingface.advice_log import announce
from hf_dpopt.huggingface.arguments import DPTrainingArguments, RefuseStockTraining
from hf_dpopt.huggingface.checkpoints import Checkpoints, loading, written_on_this_machine
from hf_dpopt.huggingface.data_mark import check_same_everywhere, data_mark
from hf_dpopt.huggingface.kept_state import KeptState, changed_by_a_forward, refuse_spoilt
from hf_dpopt.huggingface.loader import TrainingRecords
from hf_dpopt.huggingface.preemption import Preemption
from hf_dpopt.huggingface.preparation import padding_of, pair_of_records
from hf_dpopt.huggingface.private_evaluation import PrivateEvaluation, check_private_evaluation, refuse_exact
from hf_dpopt.huggingface.private_metrics import announce_metrics, complete_metrics
from hf_dpopt.huggingface.processes import warn_if_alone
from hf_dpopt.huggingface.recipe import Recipe, choose_recipe, complete_recipe, typed_batch
from hf_dpopt.huggingface.release import ReleaseGuard, TokenizerLengths
from hf_dpopt.huggingface.room import check_is_whole, room_for_noise
from hf_dpopt.huggingface.search import search
from hf_dpopt.huggingface.self_check import check_influence, longest_record, self_check
from hf_dpopt.huggingface.self_check.made_up import rows
from hf_dpopt.huggingface.self_check.sharded import self_check_of_shards
from hf_dpopt.huggingface.shards import (
    is_in_shards,
    load_weights,
    optimizer_in_files,
    whole_state,
    write_whole_models,
)
from hf_dpopt.huggingface.storage import explains_storage_faults
from hf_dpopt.huggingface.workload import workload_of
from hf_dpopt.noise.registry import check_length, is_independent
from hf_dpopt.noise.streams import measure_speed
from hf_dpopt.plan.bounds import check_sizes, steps_of
from hf_dpopt.plan.choose import fit_backend, leaves_backend_open, make_plan, with_backend
from hf_dpopt.plan.compare import as_text
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.plan.plan import PrivacyPlan
from hf_dpopt.plan.record import PlanRecord
from hf_dpopt.postprocess import Postprocess
from hf_dpopt.preclip import Preclip
from hf_dpopt.public.gradients import PublicGradients
from hf_dpopt.randomness.framework import reseed_from_the_system, secret_randomness
from hf_dpopt.records.inspection import refuse_malformed
from hf_dpopt.records.limits import Limits
from hf_dpopt.records.losses import RecordLosses
from hf_dpopt.records.overlap import TrainingRows
from hf_dpopt.records.unit import check_unit
from hf_dpopt.run.batches import (
    LogicalBatch,
    Records,
    explain_out_of_memory,
)
from hf_dpopt.run.dataset_ledger import check_is_open, check_run
from hf_dpopt.run.earlier import earlier_runs_for
from hf_dpopt.run.journal import GIGABYTE
from hf_dpopt.run.keys import private_folder
from hf_dpopt.run.run import PrivacySpent, PrivateRun, reading_plan, recorded_plan, spent_for
from hf_dpopt.run.stages import Stages
from hf_dpopt.run.step import digest_of, private_step, replay_step
from hf_dpopt.sampling.check import ParticipationCheck
from hf_dpopt.users import UserData
from hf_dpopt.users.batches import UsersBatch

STEPS_BETWEEN_REPLICA_CHECKS = 50
CHECKED_TOGETHER = 4  # records of the dataset, for a loss function of the user
UNITS_AT_ONCE = 1024  # that are read together for a query over all of them


if TYPE_CHECKING:  # the mixin stands in front of a Trainer; the class itself has no base
    _Trainer = Trainer
else:
    _Trainer = object


class DPTrainerMixin(_Trainer):
    """Mix in front of a `Trainer` subclass: `class DPMyTrainer(DPTrainerMixin, MyTrainer)`.

    Formal guarantee: see the privacy statement written to `output_dir/privacy/statement.md`. What the methods below
    release (parameters, optimizer state, logs, checkpoints) depends on the records only through `private_step`.

    Args:
        per_example_loss_func: (outputs, labels) or (outputs, labels, inputs) -> one loss per record, (B,). Replaces
            `compute_loss_func` and an overridden `compute_loss` in training. `inputs` is the collated batch, with
            columns that the model does not read if ``remove_unused_columns=False``.
        public_dataset: records like those of train_dataset that are public, labels included; for what learns from
            them (``preconditioner="adadps"``).
        preclip: a preconditioner of one's own, in place of the one that the arguments name.
        postprocess: maps of the noisy mean gradient of one's own, after those of the arguments.
        *args, **kwargs: arguments of the Trainer; `args` must be `DPTrainingArguments`.

    Raises:
        DPConfigError: before anything is touched, for every option that cannot be private.
        UnsupportedModuleError: for a model whose records cannot be told apart, or a layer that is not covered.
    """

    args: Any  # DPTrainingArguments; the Trainer's own type does not know the fields
    model: Any
    optimizer: Any

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        refusals.check_order(cls, DPTrainerMixin)

    @explains_storage_faults
    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *positional: Any,
        per_example_loss_func: Any = None,
        public_dataset: Any = None,
        preclip: Preclip | None = None,
        postprocess: Sequence[Postprocess] = (),
        **kwargs: Any,
    ):
        if not isinstance(args, DPTrainingArguments):
            raise DPConfigError(
                f"{type(self).__name__} needs DPTrainingArguments, got {type(args).__name__}. Replace "
                "TrainingArguments by hf_dpopt.DPTrainingArguments and set target_epsilon."
            )
        self.args = args
        log.show(args.process_index == 0)
        warn_if_alone(os.environ, args.world_size)
        given = inspect.signature(super().__init__).bind_partial(model, args, *positional, **kwargs).arguments
        own = {"per_example_loss_func": per_example_loss_func, "public_dataset": public_dataset, "preclip": preclip}
        self._made_of = {**given, **own, "postprocess": tuple(postprocess)}
        refusals.check_loss(
            type(self),
            (Trainer.compute_loss, Seq2SeqTrainer.compute_loss),
            given.get("compute_loss_func"),
            args,
            per_example_loss_func,
        )
        refusals.check_hooks(type(self), DPTrainerMixin)
        refusals.check_arguments(args)
        check_is_open(args.dataset_budget(), str(args.output_dir))
        refusals.check_model_given(model, given, type(self))
        datasets = {name: given.get(name) for name in ("train_dataset", "eval_dataset")}
        refusals.check_datasets(**datasets, public_dataset=public_dataset)
        refusals.check_public(public_dataset)
        check_private_evaluation(args, given)
        # Some trainers load the model or wrap it in an adapter themselves; it is checked when they are through.
        is_final = isinstance(model, nn.Module) and given.get("peft_config") is None
        if is_final:
            self._check_model(model, given.get("train_dataset"), per_example_loss_func)
        expected = typed_batch(args)
        if expected is None:
            expected = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
        self._public_dataset, self._own_preclip, self._own_postprocess = public_dataset, preclip, tuple(postprocess)
        self._users: UserData | None = None
        self._training_rows, self._held_out = TrainingRows(None), cast(tuple[Any, ...], ())
        self.unit_declared: str | None = None
        refusals.check_stages(args, preclip, given, public_dataset, postprocess)
        asked = ("model", "peft_config", "optimizers", "optimizer_cls_and_kwargs")
        self._per_example_loss_func = per_example_loss_func
        self._recipe, self._given = Recipe(), {"preclip": preclip, **{key: given.get(key) for key in asked}}
        self.plan: PrivacyPlan | None = self._make_plan(args, given, expected)
        self._take_over_batching(args, args.expected_batch_size or expected)
        self._run: PrivateRun | None = None
        self._kept: KeptState | None = None  # during a training: the state that no forward may change
        self._self_check = "not run"
        self._preemption, self._begins_anew = Preemption(), True
        self._unprivatized = UnprivatizedStatistics()
        self._checkpoints = Checkpoints(self)
        self._stops_on_signals = bool(args.enable_jit_checkpoint)
        args.enable_jit_checkpoint = False  # transformers' own would save between a gradient and its update
        super().__init__(model, args, *positional, **kwargs)
        args.enable_jit_checkpoint = self._stops_on_signals
        self.remove_callback(RefuseStockTraining)
        if not is_final and model is not None:
            self._check_model(self.model, self.train_dataset, per_example_loss_func)
        if not is_final:
            self._complete_recipe(args)
        self._check_records_are_kept()
        self._lengths = TokenizerLengths(self.processing_class, self.data_collator)
        self._release = ReleaseGuard(self)
        self._private_evaluation = PrivateEvaluation(self)

    # --- plan --------------------------------------------------------------------------------------------------------

    def _take_over_batching(self, args: DPTrainingArguments, expected_batch_size: int) -> None:
        """One loader item is one logical batch: the user's accumulation became part of its expected size."""
        args.expected_batch_size = expected_batch_size
        args.gradient_accumulation_steps = 1
        args.average_tokens_across_devices = False  # a token count over the batch would couple the records

    def _make_plan(self, args: DPTrainingArguments, given: dict[str, Any], expected: int) -> PrivacyPlan | None:
        train_dataset = given.get("train_dataset")
        if train_dataset is None:  # evaluation only
            return None
        self._training_rows = TrainingRows(train_dataset)
        refusals.check_data(self._training_rows, given.get("eval_dataset"), given.get("data_collator"))
        self._check_unit(train_dataset, {**given, "args": args})
        complete_metrics(args, given.get("model"), self._per_example_loss_func)
        config = args.privacy_config(expected)
        num_examples = len(train_dataset)
        if config.privacy_unit == "user":
            output_dir = Path(str(args.output_dir))
            folder = functools.partial(private_folder, args.private_state_dir, output_dir)
            self._users = UserData.of(train_dataset, args.user_id_column, config, folder, args.local_users_at_once)
            num_examples = self._users.num_sampled
        check_same_everywhere(train_dataset)
        recorded = self._choose_recipe(args, config, num_examples, expected)
        settled = self._recipe.applied_to(args)  # args themselves change once there is a plan
        refusals.check_batch(settled, expected, num_examples)
        expected = settled.expected_batch_size or expected
        config = settled.privacy_config(expected)
        num_steps = args.max_steps if args.max_steps > 0 else steps_of(args.num_train_epochs, num_examples, expected)
        check_sizes(num_examples, num_steps)
        if recorded is None:  # noise that was tuned stays
            check_length(config.noise_mechanism, num_steps, config.noise_restart_every)
        workload = None if is_independent(config.noise_mechanism) else workload_of(settled, num_steps, given)

        def planned() -> PrivacyPlan:
            # A run that goes on keeps the noise it began with; what was asked for now is the budget it must stay in.
            is_open = leaves_backend_open(config) and recorded is None
            plan = make_plan(
                with_backend(config, {}) if is_open else config,
                num_examples=num_examples,
                num_steps=num_steps,
                workload=workload,
                recorded=recorded,
                preclip=self._own_preclip,
                recipe=self._recipe.recorded,
                earlier=earlier_runs_for(args.earlier_runs, str(args.output_dir), recorded, args.private_state_dir),
            )
            if not is_open:
                return plan
            trained, room = room_for_noise(check_is_whole(given.get("model"), given.get("peft_config")), args.device)
            return fit_backend(plan, coordinates=trained, room=room, speed=measure_speed(args.device))

        # tuning on other hardware may end in other digits
        with reading_plan(recorded, str(args.output_dir)):
            plan = collectives.current_ranks().same(planned)
        # the cost of a run that continues is known when its ledger and keys are open
        collectives.current_ranks().same(lambda: check_run(args.dataset_budget(), plan, recorded))
        self._recipe.apply(args)
        return plan

    def _choose_recipe(
        self, args: DPTrainingArguments, config: PrivacyConfig, num_units: int, batch: int
    ) -> PlanRecord | None:
        """Choose what was left open; the plan that was recorded here, if this run goes on."""

        def chosen() -> tuple[PlanRecord | None, Recipe]:
            keeps_budget = config.target_epsilon is not None
            recorded = recorded_plan(
                str(args.output_dir), args.private_state_dir, keeps_budget=keeps_budget, num_examples=num_units
            )
            given = self._given
            with reading_plan(recorded, str(args.output_dir)):
                before = None if recorded is None else recorded.recipe or {}
                return recorded, choose_recipe(args, given, num_units=num_units, batch=batch, recorded=before)

        recorded, self._recipe = collectives.current_ranks().same(chosen)
        return recorded

    def _complete_recipe(self, args: DPTrainingArguments) -> None:
        """Choose the learning rate of a model that the trainer has loaded by itself."""
        if self.plan is None:
            return
        self._given["model"] = self.model
        self._recipe = complete_recipe(self._recipe, args, self._given, self.plan)
        self._recipe.apply(args)
        self.plan = dataclasses.replace(self.plan, recipe=self._recipe.recorded)

    @staticmethod
    def _check_model(model: nn.Module, train_dataset: Any, per_example_loss_func: Any) -> None:
        refusals.check_model(model)
        Capture(model)
        if train_dataset is not None:
            kind = RecordLosses(model, per_example_loss_func or "auto").kind  # an unknown head is found here
            refuse_malformed(train_dataset, Limits.of(model, kind), form=None)

    def _check_unit(self, dataset: Any, given: Mapping[str, Any]) -> None:
        """A row must be what the statement will call it: a record, a block, or rows of a user."""
        tokenizers = (given.get("processing_class"), getattr(given.get("data_collator"), "tokenizer", None))
        known = [getattr(tokenizer, "pad_token_id", None) for tokenizer in tokenizers if tokenizer is not None]
        padding_id = next((i for i in known if i is not None), None)
        self.unit_declared = check_unit(dataset, given["args"], model=given.get("model"), padding_id=padding_id)

    def _check_records_are_kept(self) -> None:
        """Some trainers prepare the dataset they are given: a record must stay one record."""
        dataset: Any = self.train_dataset
        if self.plan is not None:
            self._check_unit(dataset, vars(self))
        if self._users is not None and dataset is not None:
            self._users.check(dataset)
        elif self.plan is not None and len(dataset) != self.plan.num_examples:
            raise DPConfigError(
                f"{type(self).__name__} made {len(dataset)} training records of {self.plan.num_examples} (packing, "
                "splitting or filtering), so the plan does not fit. Prepare the dataset before the trainer."
            )

    def privacy_spent(self) -> PrivacySpent:
        """Privacy charged so far in the ledger of this output_dir, over all resumes, branches and calls to `train`."""
        return spent_for(self._planned(), self._release.charged())

    def _planned(self) -> PrivacyPlan:
        if self.plan is None:
            raise DPConfigError("There is no privacy plan without a train_dataset. Pass train_dataset to train.")
        return self.plan

    # --- life of a run -----------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        refusals.check_accelerator(self.accelerator)
        self._saves_shards = write_whole_models(self.accelerator, saves_on_each_node=self.args.save_on_each_node)
        # Placement and autocast as usual, but no DistributedDataParallel: its reducer would average un-noised
        # gradients. The step does one SUM of clipped sums instead.
        prepare = self.accelerator.prepare_model
        self.accelerator.prepare_model = lambda model, device_placement=None, evaluation_mode=False: prepare(
            model, device_placement=device_placement, evaluation_mode=True
        )

    @explains_storage_faults
    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        self._planned()
        if isinstance(resume_from_checkpoint, str):  # as a command line gives it
            is_it = {"true": True, "false": False}
            resume_from_checkpoint = is_it.get(resume_from_checkpoint.lower(), resume_from_checkpoint)
        refusals.check_resume(resume_from_checkpoint)
        refusals.check_accumulation(self.args)
        refusals.check_accelerator(self.accelerator)
        checkpoint, goes_on = self._checkpoints.choose(resume_from_checkpoint)
        self._begins_anew, is_finished = not goes_on, False
        with self._preemption.watching(replaces_handlers=self._stops_on_signals):
            try:
                with self._keeping_state():
                    output = super().train(checkpoint, *args, **kwargs)
                is_finished = True
                self._checkpoints.drop_extra()
                return output
            finally:
                self._close(is_finished=is_finished)

    def _close(self, *, is_finished: bool) -> None:
        """Write the report, and close what training opened."""
        if self._run is None:
            return
        try:
            self._release.write_report()
        finally:
            self._run.close(is_finished=is_finished)
            if hasattr(self, "_stages"):  # a run may end before it has any
                self._stages.close()

    def set_initial_training_values(self, args: Any, dataloader: DataLoader) -> tuple:
        values = super().set_initial_training_values(args, dataloader)
        if values[-1] != self._planned().num_steps:
            raise DPConfigError(
                f"Training would take {values[-1]} steps, but the plan was made for {self._planned().num_steps}: "
                "arguments were changed after the trainer was made. Make a new trainer."
            )
        return values

    def _prepare_for_training(self, max_steps: int, train_dataloader: DataLoader, resume_from_checkpoint: Any) -> Any:
        model, loader = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        # Only now do parameters have their final identity.
        refusals.check_model(model)
        collectives.broadcast_parameters(model)
        self._kept = KeptState(model, has_caches=False)
        engine, self._engine_reason = self.args.clipping_engine, "as asked for"
        if engine == "auto":
            engine, self._engine_reason = choose_engine(model)
        self._engine = make_engine(model, self._planned().clipper, engine)
        self._losses = RecordLosses(
            model, self._per_example_loss_func or "auto", label_smoothing=self.args.label_smoothing_factor
        )
        if is_in_shards(model):
            refusals.check_shards(self._planned(), self.args, self._public_dataset)
        self._check_optimizer()
        self._collation, self._sample = self._records.collation(model, self._losses, self._prepare_inputs)
        with self._losses.named_first():
            self._run_self_check()
        self._kept.check()
        self._kept.release_trained()
        public = functools.partial(self._public_gradients, model)
        stage_options.check_preclip(self._planned(), self._engine, public)  # before the ledger is opened
        check_same_everywhere(self._records.dataset)
        self._release.check(Path(self.args.output_dir))  # what would refuse a save is found now
        is_resumed = resume_from_checkpoint is not None or not self._begins_anew
        digest = digest_of(self._engine.parameters) if is_in_shards(model) else None  # all ranks make it together
        self._run = PrivateRun(
            self._planned(),
            output_dir=self.args.output_dir,
            private_state_dir=self.args.private_state_dir,
            resume_step=self.state.global_step if is_resumed else None,
            checkpoint=resume_from_checkpoint,
            data_mark=self._data_mark(),
            training=self._gradient_options(model),
            journal_limit=0.0 if self.args.save_only_model else self.args.journal_limit * GIGABYTE,
            initial_weights=lambda: digest or digest_of(self._engine.parameters),
            parameters=self._engine.parameters,
            dataset=self.args.dataset_budget(),
        )
        give_back(model)  # stages keep what belongs to a parameter under its identity
        self._stages = self._make_stages(model)
        if resume_from_checkpoint is not None:
            with loading(resume_from_checkpoint):
                self._stages.load(resume_from_checkpoint)
        reseed_from_the_system()  # args.seed is public: nothing drawn from here on may depend on it
        self._release.write_report()
        self._announce()
        return model, loader

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, Any]:
        """Optimizer class and options: those of `Trainer`, and the optimizers of `hf_dpopt.optim` by their names."""
        return stage_options.optimizer_of(args) or Trainer.get_optimizer_cls_and_kwargs(args, model)

    def _data_mark(self) -> str | None:
        """Digest of the data that a resumed run has to find again, where its sampler relies on their numbers."""
        plan, users = self._planned(), self._users
        chooses_once = users is not None and users.samples_records
        if not (chooses_once or ParticipationCheck.is_needed(plan.sampler, plan.num_steps)):
            return None
        return data_mark(self._records.dataset) if users is None else users.index.digest

    def _gradient_options(self, model: nn.Module) -> dict[str, Any]:
        """Options that a resumed run has to share with this one, besides its plan."""
        return refusals.gradient_options(model, self._losses, args=self.args, collator=self.data_collator)

    def _make_stages(self, model: nn.Module) -> Stages:
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        public, num_steps = functools.partial(self._public_gradients, model), self._planned().num_steps
        return Stages(
            self._current_run(),
            self._engine,
            optimizer,
            [*stage_options.chain_of(self.args, optimizer, num_steps, public), *self._own_postprocess],
            public=public(0),
            after=stage_options.after_steps_of(self.args, model, num_steps),
        )

    def _public_gradients(self, model: nn.Module, seed: int) -> PublicGradients | None:
        dataset = self._public_dataset
        if dataset is None:
            return None
        if hasattr(dataset, "column_names") and hasattr(dataset, "remove_columns"):
            dataset = self._remove_unused_columns(dataset, description="public")
        return PublicGradients(
            model,
            self._losses,
            dataset,
            self._collate_public,
            batch_size=min(self.args.public_batch_size, len(dataset)),  # a subspace draws its own number
            seed=seed,
        )

    def _check_optimizer(self) -> None:
        stepped = {id(p) for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad}
        private = {id(p) for p in self._engine.parameters.values()}
        if not stepped <= private:
            raise DPConfigError(
                f"The optimizer updates {len(stepped - private)} tensors that are not parameters of the model, so "
                "their gradients would not be noised. Build the optimizer from model.parameters()."
            )

    def _run_self_check(self) -> None:
        if self.args.skip_self_check:
            self._self_check = "skipped by the user"
            logger.warning("The start-up self-check is off (--skip_self_check); the privacy report says so.")
            return
        padding_id, padding_side = padding_of(self._collation, self._sample, self.processing_class)
        if self._engine.is_collective:
            like = self._collation.parts(self._sample[:2])[0].batch
            found = self_check_of_shards(
                self._engine, self._losses, like, padding_id=padding_id, padding_side=padding_side
            )
            self._self_check = f"passed ({found.notes[0]})"
            logger.info(f"Self-check passed in {found.seconds:.2f} s; {found.notes[0]}.")
            return
        done = self_check(
            self._engine,
            self._losses,
            self._collation.parts(self._sample[:2])[0].batch,
            padding_id=padding_id,
            padding_side=padding_side,
            longest=longest_record(self._records.dataset),
            is_scaled=self._planned().preclip.is_scaling,
            has_units=self._users is not None,
        )
        self._self_check = "passed"  # the error itself depends on how long the first records are
        pair = pair_of_records(self._collation, self._sample)
        if pair is not None:
            check_influence(self._engine, self._losses, *pair)
        if self._losses.function:  # may mix what made-up records have in common, such as their weights
            for part in self._collation.parts(self._sample[:CHECKED_TOGETHER]):
                each = [rows(part.batch, b) for b in range(len(part.places))]
                check_influence(self._engine, self._losses, part.batch, each)
        for note in done.notes:
            logger.warning(f"Self-check: {note}.")
        logger.info(f"Self-check passed in {done.seconds:.2f} s.")

    def _announce(self) -> None:
        plan, run = self._planned(), self._run
        assert run is not None
        if said := no_protection(plan.epsilon(), "record" if plan.unit == "example" else plan.unit):
            logger.warning(f"NO PROTECTION: {said}")
        logger.info(
            f"Private training: {plan.describe_sampling()} Clipping: {plan.config.clipping} to "
            f"{plan.config.clipping_norm:g}; noise multiplier {plan.noise_multiplier:.4f} ({run.noise_generator}). "
            f"Planned epsilon {plan.epsilon():.4g} at delta {plan.delta:g} after {plan.num_steps} steps; "
            f"{sum(run.charged)} already charged"
        )
        announce(plan, self.args, {**self._given, "model": self.model}, self._recipe)
        announce_metrics(run, max(1, int(self.state.logging_steps or 1)))
        if not plan.strategy.is_independent:
            logger.info(
                f"Noise: {plan.config.noise_mechanism}, correlated over the steps ({plan.strategy.name}); draws of "
                f"{plan.draw_stddev:.4f} sensitivities of a step, {plan.cost.kept:.3g} copies of the gradient kept."
            )
        if self._users is not None and self.args.log_unprivatized:
            logger.warning(self._users.describe_unprivatized())
        if journal := run.describe_journal(sum(p.numel() for p in self._engine.parameters.values())):
            logger.info(journal)
        self._stages.announce()
        if plan.compared:
            logger.info(f"Compared for this run, the one that is taken first:\n{as_text(plan.compared)}")
        logger.info(f"Clipping engine: {self._stages.engine.name}, {self._engine_reason}.")
        if self.args.explain_clipping:
            logger.info(explain(self._engine))
        slow = unruled(self._engine)
        if slow:
            logger.warning(
                f"No clipping rule knows these layers: {', '.join(slow)}. Their gradients are exact, taken record by "
                "record: a second forward of the layer for each, and as many copies of its gradient as a physical "
                "batch has records. If that is too slow, freeze them (requires_grad_(False) on the submodule) or "
                "add a rule under hf_dpopt/clipping/rules."
            )
        if not plan.is_private:
            logger.warning("NOT PRIVATE: the noise is off or its key is fixed. Epsilon is infinite.")
        if self.args.max_grad_norm:
            logger.warning(f"max_grad_norm={self.args.max_grad_norm} clips the noisy mean gradient, after the noise.")

    # --- data --------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader:
        plan = self._planned()
        self._check_records_are_kept()  # once more: it may have been replaced since the trainer was made
        dataset, columns = self.train_dataset, None
        if hasattr(dataset, "column_names") and hasattr(dataset, "remove_columns"):
            dataset = self._remove_unused_columns(dataset, description="training")
        elif self.args.remove_unused_columns:
            self._set_signature_columns_if_needed()
            columns = self._signature_columns
        self._records = TrainingRecords(dataset, self.data_collator, columns, self._users)
        return self._records.loader(self.args, plan.sampler.steps_per_epoch, self._current_run)

    def _current_run(self) -> PrivateRun:
        assert self._run is not None
        return self._run

    def _physical_batches(self, batch: LogicalBatch) -> Iterator[Any]:
        assert self._kept is not None
        before = self._kept.content_of_trained()
        for part in batch.physical(self.args.per_device_train_batch_size, self._collation):
            yield part
            self._check_state(is_thorough=False)  # before the next one
        self._kept.check_trained(before)  # before the sum is released

    def _stand_in(self) -> Any:
        """A batch that is not added to a sum: a record, or a user of one row."""
        batch = self._collation.parts(self._sample[:1])[0].batch
        return batch if self._users is None else UsersBatch(batch, (1,), torch.ones(1, dtype=torch.float64))

    def _everything(self) -> Iterator[Any]:
        """Yield physical batches of all units of this rank."""
        for batch in self._records.everything(self._current_run(), UNITS_AT_ONCE):
            yield from self._physical_batches(batch)

    def _collate_public(self, records: list[Any]) -> Any:
        """Collate public records into a batch."""
        return self._prepare_inputs(self._records.collate(records))

    def num_examples(self, dataloader: DataLoader) -> int:
        """Number of examples that may be known: where users are protected, how many records they have may not."""
        is_training = self._users is not None and isinstance(dataloader.dataset, Records)
        return self._planned().num_examples if is_training else super().num_examples(dataloader)

    def get_total_train_batch_size(self, args: Any) -> int:
        return args.expected_batch_size or super().get_total_train_batch_size(args)

    # --- step --------------------------------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """One private step. Returns 0, not the loss: the exact training loss is data."""
        assert isinstance(inputs, LogicalBatch), type(inputs)
        run, step = self._current_run(), inputs.step
        assert step == self.state.global_step + 1, (step, self.state.global_step)
        give_back(model)  # an evaluation may have left weights whole
        self._check_unchanged()
        model.train()
        if hasattr(self.optimizer, "train") and callable(self.optimizer.train):
            self.optimizer.train()
        device = self.args.device
        assert self._kept is not None
        with (
            self._kept.in_step(is_local=self._planned().config.local_training is not None),
            explain_out_of_memory(self.args.per_device_train_batch_size, step),
            self.compute_loss_context_manager(),
            secret_randomness(run.chain.dropout_key, step, collectives.rank(), device),
        ):
            if run.recovery is not None and run.recovery.covers(step):
                self._replay(run, step)
            else:
                self._unprivatized += private_step(
                    self._stages.engine,
                    self._losses,
                    self._physical_batches(inputs),
                    run=run,
                    step=step,
                    chain=self._stages.chain,
                    everything=self._everything,
                    stand_in=self._stand_in,
                )
        if step % STEPS_BETWEEN_REPLICA_CHECKS == 1:
            collectives.check_replicas_agree(model)
        return torch.zeros((), device=device)

    def _replay(self, run: PrivateRun, step: int) -> None:
        """Take a step again from the journal; one whose release was lost is done without the optimizer."""
        if not replay_step(self._stages.engine, run=run, step=step, chain=self._stages.chain):
            self.accelerator.gradient_state._set_sync_gradients(False)  # until the next step begins

    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, model: nn.Module, trial: Any, *args: Any, **kwargs: Any
    ) -> None:
        self._preemption.between_steps(self._current_run(), self.state, self.control)
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, *args, **kwargs)
        if self._preemption.wants_save and self._checkpoints.last_saved != self.state.global_step:
            self._save_checkpoint(model, trial)  # save_strategy="best" takes back what was asked for

    def _check_unchanged(self) -> None:
        now = {id(p) for p in self.model.parameters() if p.requires_grad}
        if now != {id(p) for p in self._engine.parameters.values()}:
            raise DPConfigError(
                "Trainable parameters changed during training (a callback froze, unfroze or replaced some), so the "
                "clip no longer covers them. Decide what to train before train(), or train in two runs."
            )

    def _check_state(self, *, is_thorough: bool = True) -> None:
        """Refuse a model that a forward changed, after restoring its buffers where that was during training."""
        if self._kept is not None:
            self._kept.check(is_thorough=is_thorough)
        if is_thorough:
            refuse_spoilt(self.model)

    @contextlib.contextmanager
    def _keeping_state(self) -> Iterator[None]:
        """Restore at the end of training what no forward may change, and refuse a model that a forward changed."""
        try:
            yield
            self._check_state()
        finally:
            if self._kept is not None:
                self._kept.restore()
                self._kept = None

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> None:
        return None  # a token count over the batch is data, and no loss here is scaled by it

    def floating_point_ops(self, inputs: Any) -> int:
        return 0  # counted from the sampled batches, so it would reveal their sizes

    def _track_num_input_tokens(self, inputs: Any) -> None:
        return None

    # --- release -----------------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Un-noised training values never reach the log; `epsilon` so far joins every line."""
        logs = {key: value for key, value in logs.items() if not is_secret_key(key)}
        if self.plan is not None and self._run is not None:
            if self.args.log_unprivatized and "grad_norm" in logs:
                self._print_unprivatized()
            if "learning_rate" in logs:  # a line of training
                logs |= self._run.metrics.read()
            logs["epsilon"] = self.plan.epsilon(tuple(self._run.charged), is_for_log=True)
        super().log(logs, start_time)

    def _print_unprivatized(self) -> None:
        seen, self._unprivatized = self._unprivatized, UnprivatizedStatistics()
        if seen.num_records:
            logger.warning(
                f"UNPRIVATIZED (exact values of private data, this console only): loss "
                f"{seen.loss_sum / seen.num_records:.4f}, clipped {seen.num_clipped / seen.num_records:.1%}, records "
                f"{seen.num_records} since the last line, dropped {seen.num_dropped}"
            )

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: float) -> TrainOutput:
        self._preemption.stop(self.state)
        self._stages.finish()
        output = super()._finalize_training(trial, num_train_samples, start_time)
        metrics = {k: v for k, v in output.metrics.items() if not is_secret_key(k)}
        spent = self.privacy_spent()
        metrics |= {"epsilon": spent.epsilon, "delta": spent.delta}
        return TrainOutput(output.global_step, float("nan"), metrics)

    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self._checkpoints.folder is None else str(self._checkpoints.folder)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        save = functools.partial(super()._save_checkpoint, model, trial)
        saves_only_model = self.args.save_only_model
        self.args.save_only_model = saves_only_model and not self._preemption.is_stopping  # it has to go on from there
        folder = self._get_output_dir(trial)
        try:
            with naming(Path(folder) / f"checkpoint-{self.state.global_step}"):
                place, is_pushed = self._checkpoints.save(save, folder, is_extra=self._preemption.is_extra)
        finally:
            self.args.save_only_model = saves_only_model
        if self.args.should_save and not saves_only_model:
            self._current_run().checkpoint_written(self.state.global_step)
        if is_pushed:
            self._push_from_checkpoint(str(place))

    def _save_rng_state(self, output_dir: str) -> None:
        return None  # secret: a resume derives the states of all generators from the key

    def _load_best_model(self) -> None:
        self._checkpoints.check_best()
        super()._load_best_model()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        give_back(self.model)
        in_shards = self._saves_shards and is_in_shards(self.model)
        with optimizer_in_files(self, output_dir, saves=True, in_shards=in_shards):
            super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save or is_in_shards(self.model):
            self._stages.save(output_dir, writes=self.args.should_save, in_shards=in_shards)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with loading(checkpoint), optimizer_in_files(self, checkpoint, saves=False):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        model = self.model if model is None else model
        with loading(resume_from_checkpoint):
            if is_in_shards(model):
                load_weights(model, resume_from_checkpoint)
            else:
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        return None

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model; what is not trained has the values that it had when training began."""
        changed = [] if self._kept is None else self._kept.restore()
        refuse_spoilt(self.model)
        super().save_model(output_dir, _internal_call)
        if changed:
            raise UnsupportedModuleError(changed_by_a_forward(changed))

    @explains_storage_faults
    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        model = self.accelerator.unwrap_model(self.model)
        give_back(self.model)
        if state_dict is not None and any_sharded(state_dict.values()):
            state_dict = whole_state(state_dict, keeps=self.args.should_save)
        if self.args.should_save and folder == Path(self.args.output_dir):
            remove_links(folder)
        with naming(folder), written_on_this_machine(model, self.args), self._lengths.saved():
            super()._save(output_dir, state_dict=state_dict)
        if self.args.should_save:
            self._release.check(folder)
            self._release.note_saved(folder)

    @explains_storage_faults
    def save_state(self) -> None:
        with self._writing_results():
            super().save_state()

    @explains_storage_faults
    def save_metrics(self, split: str, metrics: dict[str, float], combined: bool = True) -> None:
        with self._writing_results():
            super().save_metrics(split, metrics, combined)

    @contextlib.contextmanager
    def _writing_results(self) -> Iterator[None]:
        folder = Path(self.args.output_dir)
        if self.args.should_save:
            remove_links(folder)
        with naming(folder):
            yield

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        with self._writing_results():
            super().create_model_card(*args, **kwargs)
        self._release.complete_model_card()

    @explains_storage_faults
    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        self._release.write_report()
        self._release.check(Path(self.args.output_dir), is_push=True)
        return super().push_to_hub(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._checkpoints.defer_push(checkpoint_folder):
            return
        self._release.write_report()
        self._release.check(Path(self.args.output_dir), is_push=True)
        super()._push_from_checkpoint(checkpoint_folder)

    @explains_storage_faults
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> dict[str, float]:
        self._check_state()
        with self._only_on_held_out(eval_dataset):
            if self.args.eval_data_privacy == "private":
                return self._evaluate_privately(eval_dataset, metric_key_prefix)
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix, **kwargs)

    def _evaluate_privately(self, dataset: Any, prefix: str) -> dict[str, float]:
        """Noisy metrics of a private set, or of several by their names, logged as the stock ones are."""
        dataset = self.eval_dataset if dataset is None else dataset
        if isinstance(dataset, str):
            sets: Any = self.eval_dataset
            dataset, prefix = sets[dataset], f"{prefix}_{dataset}"
        if isinstance(dataset, dict):
            each = [self._evaluate_privately(one, f"{prefix}_{name}") for name, one in dataset.items()]
            return {name: value for metrics in each for name, value in metrics.items()}
        metrics = self._private_evaluation.evaluate(dataset, prefix)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        refuse_exact(self.args, "evaluation_loop")
        return super().evaluation_loop(*args, **kwargs)

    @explains_storage_faults
    def predict(self, test_dataset: Any, *args: Any, **kwargs: Any) -> Any:
        refuse_exact(self.args, "predict")
        self._check_state()
        with self._only_on_held_out(test_dataset):
            return super().predict(test_dataset, *args, **kwargs)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        with self._only_on_held_out(eval_dataset):
            return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        with self._only_on_held_out(test_dataset):
            return super().get_test_dataloader(test_dataset)

    @contextlib.contextmanager
    def _only_on_held_out(self, dataset: Any) -> Iterator[None]:
        """Refuse training records, and do not look a second time at what one call hands to the next."""
        dataset = self.eval_dataset if dataset is None else dataset
        if isinstance(dataset, str) and isinstance(self.eval_dataset, dict):
            dataset = self.eval_dataset[dataset]
        before = self._held_out
        if not any(dataset is one for one in before):
            if self._training_rows.dataset is not self.train_dataset:  # some trainers prepare what they are given
                self._training_rows = TrainingRows(self.train_dataset)
            refusals.check_evaluation(dataset, self._training_rows)
        self._held_out = (*before, dataset, *(dataset.values() if isinstance(dataset, dict) else ()))
        try:
            yield
        finally:
            self._held_out = before
            give_back(self.model)

    @explains_storage_faults
    def hyperparameter_search(  # type: ignore[override]
        self,
        hp_space: Any = None,
        *,
        metric: str = "eval_loss",
        direction: str = "minimize",
        **others: Any,
    ) -> BestRun:
        """Train a random number of runs with options drawn from a space, and release the best alone.

        `target_epsilon` is for all of them; see docs/tuning.md. The best is in `output_dir` and in `self.model`.

        Args:
            hp_space: option -> values, or ``{"low": 1e-4, "high": 1e-1, "log": True}``.
            metric: score, as `evaluate` names it.
            direction: "minimize" or "maximize" it.
            **others: what stock searches take (backend, n_trials, compute_objective ..): refused.
        """
        if others:
            raise DPConfigError(
                f"`hyperparameter_search` takes no {', '.join(sorted(others))} here: a backend such as optuna learns "
                "from runs that are not released, and a number of runs that is known hides nothing. Pass hp_space, "
                "metric and direction, and set tuned_runs."
            )
        return search(self, self._like, hp_space=hp_space, metric=metric, direction=direction)

    def _like(self, model: nn.Module | None, args: Any) -> Any:
        """Make a trainer as this one was made, of another model (None: by its model_init) and other arguments."""
        return type(self)(**{**self._made_of, "model": model, "args": args})

    def after_noise(self) -> tuple[str, ...]:
        """Descriptions of what is made of the released gradients, for the report; empty before training."""
        return tuple(self._stages.made_of) if hasattr(self, "_stages") else ()

    def user_callbacks(self) -> tuple[str, ...]:
        """Callbacks beyond the Trainer's own: they see the model between steps, so the report names them."""
        stock = (DefaultFlowCallback, PrinterCallback, ProgressCallback)
        return tuple(type(c).__name__ for c in self.callback_handler.callbacks if type(c) not in stock)


class DPTrainer(DPTrainerMixin, Trainer):
    """`transformers.Trainer` with differential privacy; see `DPTrainerMixin`."""


class DPSeq2SeqTrainer(DPTrainerMixin, Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer` with differential privacy; use it with `DPSeq2SeqTrainingArguments`."""
