"""A training from its first check to its end: everything that exists only while a trainer trains."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hf_dpopt.accounting.profile import no_protection
from hf_dpopt.clipping import UnprivatizedStatistics, choose_engine, explain, make_engine, unruled
from hf_dpopt.common import collectives
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.log import logger
from hf_dpopt.common.sharding import give_back
from hf_dpopt.huggingface import stage_options
from hf_dpopt.huggingface.advice_log import announce
from hf_dpopt.huggingface.checkpoints import loading
from hf_dpopt.huggingface.inputs import TrainerInputs
from hf_dpopt.huggingface.loader import TrainingRecords
from hf_dpopt.huggingface.planning import PlannedRun
from hf_dpopt.huggingface.refusals.model import check_model
from hf_dpopt.huggingface.refusals.training_arguments import check_shards
from hf_dpopt.huggingface.shards import is_in_shards
from hf_dpopt.public.public_gradients import PublicGradients
from hf_dpopt.randomness.framework import reseed_from_the_system, secret_randomness
from hf_dpopt.records.collation import length_of, row_of
from hf_dpopt.records.data_mark import check_same_everywhere, data_mark
from hf_dpopt.records.gradient_options import gradient_options
from hf_dpopt.records.losses import RecordLosses
from hf_dpopt.records.trial import pair_of_records
from hf_dpopt.run.batches import LogicalBatch, explain_out_of_memory, fastest_tokens
from hf_dpopt.run.journal import GIGABYTE
from hf_dpopt.run.kept_state import KeptState, keep_layout
from hf_dpopt.run.run import PrivateRun
from hf_dpopt.run.step import digest_of, private_step, replay_step
from hf_dpopt.sampling.check import ParticipationCheck
from hf_dpopt.self_check import check_influence, longest_record, self_check
from hf_dpopt.users.user_batches import UsersBatch

STEPS_BETWEEN_REPLICA_CHECKS = 50
CHECKED_TOGETHER = 4  # records of the dataset, for a loss function of the user
UNITS_AT_ONCE = 1024  # that are read together for a query over all of them


class TrainingSession:
    """The training in progress of one trainer, which has passed its checks and opened its run.

    After its end it says what was trained, until the next one begins.

    Args:
        inputs: what the trainer was given, and made of it.
        planned: its plan.
        records: its training records.
        model: the model that is trained, on its device.
        optimizer: the one that steps.
        resume_step: optimizer step to go on from, see `PrivateRun`.
        checkpoint: folder that the model was loaded from; None for none.

    Attributes:
        self_check: what the self-check found, for the report.
        is_open: whether it has not ended.

    Raises:
        DPConfigError: for what cannot be trained privately, or not from that checkpoint.
        UnsupportedModuleError: for a model that fails the self-check.
    """

    def __init__(
        self,
        inputs: TrainerInputs,
        planned: PlannedRun,
        records: TrainingRecords,
        model: nn.Module,
        optimizer: Any,
        resume_step: int | None,
        checkpoint: str | None,
    ):
        args = self._args = inputs.args
        self._inputs, self._planned, self._records = inputs, planned, records
        self.plan, self.model, self.is_open = planned.plan, model, True
        self._optimizer = optimizer
        self._unprivatized = UnprivatizedStatistics()
        with contextlib.ExitStack() as undone:
            # Only now do parameters have their final identity.
            check_model(model)
            keep_layout(model)
            collectives.broadcast_parameters(model)
            self.kept = KeptState(model, has_caches=False)
            undone.callback(self.kept.restore)
            engine, self._engine_reason = args.clipping_engine, "as asked for"
            if engine == "auto":
                engine, self._engine_reason = choose_engine(model)
            self.engine = make_engine(model, self.plan.clipper, engine)
            weights, self._tokens_at_once = list(model.parameters()), None
            if not unruled(self.engine):  # of those layers each record takes a copy of the gradient, however short
                self._tokens_at_once = fastest_tokens(sum(p.numel() for p in weights), weights[0].device)
            self.losses = RecordLosses(
                model, inputs.per_example_loss_func or "auto", label_smoothing=args.label_smoothing_factor
            )
            if is_in_shards(model):
                check_shards(self.plan, inputs)
            self._check_optimizer(optimizer)
            self._collation, self._sample = records.collation(model, self.losses)
            self._stand_in = self._make_stand_in() if self.engine.is_collective else None
            with self.losses.named_first():
                self.self_check = self._run_self_check()
            self.kept.check()
            self.kept.release_trained()
            stage_options.check_preclip(self.plan, self.engine, self._public)  # before the ledger is opened
            check_same_everywhere(records.dataset)
            self.run = self._open(resume_step, checkpoint)
            undone.callback(self.run.close, is_finished=False)
            give_back(model)  # stages keep what belongs to a parameter under its identity
            inner = getattr(optimizer, "optimizer", optimizer)
            self.stages = stage_options.make_stages(inputs, self.engine, inner, self.run, self._public)
            undone.callback(self.stages.close)
            if checkpoint is not None:
                with loading(checkpoint):
                    self.stages.load(checkpoint)
            undone.pop_all()
        reseed_from_the_system()  # args.seed is public: nothing drawn from here on may depend on it

    def end(self, *, is_finished: bool) -> None:
        """Close the run, and restore what no forward may change."""
        self.is_open = False
        try:
            self.kept.restore()
        finally:
            self.run.close(is_finished=is_finished)
            self.stages.close()

    def _check_optimizer(self, optimizer: Any) -> None:
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        private = {id(p) for p in self.engine.parameters.values()}
        if not stepped <= private:
            raise DPConfigError(
                f"The optimizer updates {len(stepped - private)} tensors that are not parameters of the model, so "
                "their gradients would not be noised. Build the optimizer from model.parameters()."
            )

    def _run_self_check(self) -> str:
        if self._args.skip_self_check:
            logger.warning("The start-up self-check is off (--skip_self_check); the privacy report says so.")
            return "skipped by the user"
        is_whole, size = not self.engine.is_collective, self._args.per_device_train_batch_size
        pair = pair_of_records(self._collation, self._sample, size)
        begin = time.perf_counter()
        notes = self_check(
            self.engine,
            self.losses,
            self._collation.parts(self._sample[:2])[0].batch if pair is None else pair[0],
            longest=longest_record(self._records.dataset) if is_whole else None,
            is_scaled=self.plan.preclip.is_scaling,
            has_units=self._planned.users is not None,
        )
        if pair is not None and is_whole:
            check_influence(self.engine, self.losses, *pair)
        if self.losses.function and is_whole:  # may mix what made-up records have in common, such as their weights
            few = self._sample[:CHECKED_TOGETHER]
            if size < 2 * CHECKED_TOGETHER:  # four in float32 may need more memory than a physical batch in bfloat16
                few = sorted(self._sample, key=length_of)[:2]
            for part in self._collation.parts(few):
                each = [row_of(part.batch, b) for b in range(len(part.places))]
                check_influence(self.engine, self.losses, part.batch, each)
        for note in notes:
            logger.warning(f"Self-check: {note}.")
        logger.info(f"Self-check passed in {time.perf_counter() - begin:.2f} s.")
        return "passed" if is_whole else f"passed ({notes[0]})"

    def _open(self, resume_step: int | None, checkpoint: str | None) -> PrivateRun:
        args, parameters, users = self._args, self.engine.parameters, self._planned.users
        digest = digest_of(parameters) if is_in_shards(self.model) else None  # all ranks make it together
        # digest of the data that a resumed run has to find again, where its sampler relies on their numbers
        mark, chooses_once = None, users is not None and users.samples_records
        if chooses_once or ParticipationCheck.is_needed(self.plan.sampler, self.plan.num_steps):
            mark = data_mark(self._records.dataset) if users is None else users.index.digest
        return PrivateRun(
            self.plan,
            output_dir=args.output_dir,  # type: ignore[arg-type]
            private_state_dir=args.private_state_dir,
            resume_step=resume_step,
            checkpoint=checkpoint,
            data_mark=mark,
            training=gradient_options(self.model, self.losses, bf16=bool(args.bf16), collator=self._records.collator),
            journal_limit=0.0 if args.save_only_model else args.journal_limit * GIGABYTE,
            initial_weights=lambda: digest or digest_of(parameters),
            parameters=parameters,
            dataset=args.dataset_budget(),
        )

    def _public(self, seed: int) -> PublicGradients | None:
        dataset = self._records.public
        if dataset is None:
            return None
        return PublicGradients(
            self.model,
            self.losses,
            dataset,
            self._records.collate,
            batch_size=min(self._args.public_batch_size, len(dataset)),  # a subspace draws its own number
            seed=seed,
        )

    def announce(self) -> None:
        """Say in the log what begins."""
        plan, run, args = self.plan, self.run, self._args
        if said := no_protection(plan.epsilon(), "record" if plan.unit == "example" else plan.unit):
            logger.warning(f"NO PROTECTION: {said}")
        logger.info(
            f"Private training: {plan.describe_sampling()} Clipping: {plan.config.clipping} to "
            f"{plan.config.clipping_norm:g}; noise multiplier {plan.noise_multiplier:.4f}. "
            f"Planned epsilon {plan.epsilon():.4g} at delta {plan.delta:g} after {plan.num_steps} steps; "
            f"{sum(run.charged)} already charged. Protected: each {'record' if plan.unit == 'example' else plan.unit} "
            f"({plan.adjacency}). Keys, to be kept private: {run.keys.folder}"
        )
        announce(plan, self._inputs, self._planned.advised)
        if (metrics := plan.private_metrics) is not None:
            logger.info(
                f"Private metrics take {metrics.share:.3g} of each step's budget: the noise of the gradients is "
                f"{1 / math.sqrt(1 - metrics.share) - 1:.2%} larger, epsilon the same. Losses are cut to "
                f"{metrics.loss_bound:g}."
            )
        if self._planned.users is not None and args.log_unprivatized:
            logger.warning(self._planned.users.describe_unprivatized())
        self.stages.announce()
        logger.debug(f"Clipping engine: {self.stages.engine.name}, {self._engine_reason}.")
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(explain(self.engine))
        if slow := unruled(self.engine):
            logger.warning(
                f"No clipping rule knows these layers: {', '.join(slow)}. Their gradients are exact but slow: a "
                "second forward and a copy of the gradient for each record. If that is too slow, freeze them "
                "(requires_grad_(False) on the submodule) or add a rule under hf_dpopt/clipping/rules."
            )
        if not plan.is_private:
            logger.warning("NOT PRIVATE: the noise is off or its key is fixed. Epsilon is infinite.")
        if args.max_grad_norm:
            logger.warning(f"max_grad_norm={args.max_grad_norm} clips the noisy mean gradient, after the noise.")

    # --- steps -------------------------------------------------------------------------------------------------------

    def take_step(self, batch: LogicalBatch) -> bool:
        """Take one private step, or take it again from the journal; return whether there is an update.

        Args:
            batch: the logical batch of the step.
        """
        run, step, args, has_update = self.run, batch.step, self._args, True
        self.model.train()
        if hasattr(self._optimizer, "train") and callable(self._optimizer.train):
            self._optimizer.train()
        with (
            self.kept.in_step(is_local=self.plan.config.local_training is not None),
            explain_out_of_memory(args.per_device_train_batch_size, step),
            secret_randomness(run.chain.dropout_key, step, collectives.rank(), args.device),
        ):
            if run.recovery is not None and run.recovery.covers(step):
                has_update = replay_step(self.stages.engine, run=run, step=step, after_noise=self.stages.after_noise)
            else:
                before = self.kept.content_of_trained()
                self._unprivatized += private_step(
                    self.stages.engine,
                    self.losses,
                    self._physical_batches(batch, before),
                    run=run,
                    step=step,
                    after_noise=self.stages.after_noise,
                    everything=self._everything(before),
                    stand_in=self._stand_in,
                )
                if run.ranks.size > 1:  # they look for a batch more, and so end, before the last one is at work
                    run.ranks.every(lambda: self.kept.check_trained(before))
        if step % STEPS_BETWEEN_REPLICA_CHECKS == 1:
            collectives.check_replicas_agree(self.model)
        return has_update

    def check_trained(self, model: nn.Module) -> None:
        """Refuse a model whose trainable parameters are not those that are clipped."""
        now = {id(p) for p in model.parameters() if p.requires_grad}
        if now != {id(p) for p in self.engine.parameters.values()}:
            raise DPConfigError(
                "Trainable parameters changed during training (a callback froze, unfroze or replaced some), so the "
                "clip no longer covers them. Decide what to train before train(), or train in two runs."
            )

    def _physical_batches(self, batch: LogicalBatch, before: dict[str, list[int]]) -> Iterator[Any]:
        size = self._args.per_device_train_batch_size
        for part in batch.physical(size, self._collation, self._tokens_at_once):
            yield part
            self.kept.check(is_thorough=False)  # before the next one
        self.kept.check_trained(before)  # before the sum is released

    def _make_stand_in(self) -> Any:
        """A batch that is not added to a sum: a record, or a user of one row."""
        batch = self._collation.parts(self._sample[:1])[0].batch
        if self._planned.users is None:
            return batch
        return UsersBatch(batch, (1,), torch.ones(1, dtype=torch.float64))

    def _everything(self, before: dict[str, list[int]]) -> Iterator[Any]:
        """Yield physical batches of all units of this rank."""
        for batch in self._records.everything(self.run, UNITS_AT_ONCE):
            yield from self._physical_batches(batch, before)

    # --- the log -----------------------------------------------------------------------------------------------------

    def line_of(self, logs: Mapping[str, float]) -> dict[str, float]:
        """A line of the log with what is released beside the gradients, and epsilon so far."""
        if self._args.log_unprivatized and "grad_norm" in logs:
            self._print_unprivatized()
        metrics = self.run.metrics.read() if "learning_rate" in logs else {}  # a line of training
        return {**logs, **metrics, "epsilon": self.plan.epsilon(tuple(self.run.charged), is_for_log=True)}

    def _print_unprivatized(self) -> None:
        seen, self._unprivatized = self._unprivatized, UnprivatizedStatistics()
        if seen.num_records:
            logger.warning(
                f"UNPRIVATIZED (exact values of private data, this console only): loss "
                f"{seen.loss_sum / seen.num_records:.4f}, clipped {seen.num_clipped / seen.num_records:.1%}, records "
                f"{seen.num_records} since the last line, dropped {seen.num_dropped}"
            )
