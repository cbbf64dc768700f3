"""`DPTrainer`: the stock Trainer with a private step. Hook points only; what they do lies in the objects they call."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import Seq2SeqTrainer, Trainer
from transformers.trainer_utils import TrainOutput

from hf_dpopt.common import collectives, log
from hf_dpopt.common.disk_faults import naming
from hf_dpopt.common.errors import DPConfigError, UnsupportedModuleError
from hf_dpopt.common.log import is_secret_key, logger
from hf_dpopt.common.sharding import give_back
from hf_dpopt.huggingface import shards, stage_options
from hf_dpopt.huggingface.arguments import RefuseStockTraining
from hf_dpopt.huggingface.checkpoints import Checkpoints, loading
from hf_dpopt.huggingface.evaluation import EvaluationGuard
from hf_dpopt.huggingface.inputs import TrainerInputs
from hf_dpopt.huggingface.loader import TrainingRecords, prepared_as_training
from hf_dpopt.huggingface.planning import plan_run, to_train
from hf_dpopt.huggingface.preemption import Preemption
from hf_dpopt.huggingface.refusals import check_inputs
from hf_dpopt.huggingface.refusals.model import check_model_with_records
from hf_dpopt.huggingface.refusals.trainer_class import check_arguments_given, check_order, check_overrides
from hf_dpopt.huggingface.refusals.training_arguments import check_accelerator, check_accumulation
from hf_dpopt.huggingface.release_guard import ReleaseGuard, TokenizerLengths
from hf_dpopt.huggingface.session import TrainingSession
from hf_dpopt.huggingface.storage_faults import explains_storage_faults
from hf_dpopt.plan.plan import PrivacyPlan
from hf_dpopt.postprocess import Postprocess
from hf_dpopt.preclip import Preclip
from hf_dpopt.records.overlap import TrainingRows
from hf_dpopt.run.batches import LogicalBatch, Records
from hf_dpopt.run.kept_state import changed_by_a_forward, keep_layout, refuse_spoilt
from hf_dpopt.run.run import PrivacySpent

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
        preclip: custom preconditioner; overrides `args.preconditioner`.
        postprocess: extra transforms of the noised gradient, applied last.
        *args, **kwargs: arguments of the Trainer; `args` must be `DPTrainingArguments`.

    Raises:
        DPConfigError: before anything is touched, for every option that cannot be private.
        UnsupportedModuleError: for a model whose records cannot be told apart, or a layer that is not covered.
    """

    args: Any  # DPTrainingArguments; the Trainer's own type does not know the fields
    model: Any
    optimizer: Any
    _session: TrainingSession | None = None
    #: Check of the options of a trainer that brings its own losses of records; None where they are the model's.
    refuse_losses: Callable[[TrainerInputs], None] | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        check_order(cls, DPTrainerMixin)

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
        check_arguments_given(args, type(self))
        self.args = args
        log.show(args.process_index == 0, is_debug=args.log_level == "debug")
        if args.privacy_unit == "user":
            log.hide_rows()
        if not positional:  # in some trainers args are not the second one by place
            kwargs["args"] = args
        by_place = (model, args, *positional) if positional else (model,)
        inputs = TrainerInputs.of(
            super().__init__,
            by_place,
            kwargs,
            args=args,
            trainer_class=type(self),
            per_example_loss_func=per_example_loss_func,
            public_dataset=public_dataset,
            preclip=preclip,
            postprocess=tuple(postprocess),
        )
        training = TrainingRows(inputs.train_dataset)
        check_overrides(type(self), DPTrainerMixin)
        check_inputs(inputs, training)
        self._inputs, self._planned = inputs, plan_run(inputs, collectives.current_ranks())
        self._checkpoints, self._goes_on = Checkpoints(args), False
        self._preemption = Preemption()
        super().__init__(*by_place, **kwargs)
        self.remove_callback(RefuseStockTraining)
        keep_layout(self.model)
        if public_dataset is not None and self.train_dataset is not training.dataset:  # they prepare it, too
            self._inputs = dataclasses.replace(self._inputs, public_dataset=self._prepare_public(public_dataset))
        made = self._as_made()  # some trainers load the model or wrap it in an adapter themselves
        if model is not None and not inputs.has_final_model:
            check_model_with_records(made)
        if self._planned is not None and not inputs.has_final_model:
            self._planned = self._planned.completed(made)
        if self._planned is not None:
            self._planned.check_records(made)
        self._lengths = TokenizerLengths(self.processing_class, self.data_collator)
        place, remove = self._prepare_inputs, self._remove_unused_columns
        self._evaluation = EvaluationGuard(made, self.plan, training, place=place, remove=remove)

    # --- what a trainer has besides its hooks ------------------------------------------------------------------------

    @property
    def plan(self) -> PrivacyPlan | None:
        """Plan of the training; None without a train_dataset."""
        return None if self._planned is None else self._planned.plan

    def privacy_spent(self) -> PrivacySpent:
        """Privacy charged so far in the ledger of this output_dir, over all resumes, branches and calls to `train`."""
        return self._release.spent()

    @property
    def _release(self) -> ReleaseGuard:
        callbacks, evaluation = self.callback_handler.callbacks, self._evaluation
        return ReleaseGuard(
            self.args, self._planned, self._session, self.model, self.processing_class, callbacks, evaluation
        )

    @property
    def _training(self) -> TrainingSession:
        assert self._session is not None
        return self._session

    def _as_made(self) -> TrainerInputs:
        """The inputs with what the Trainer made of them so far."""
        names = ("args", "model", "train_dataset", "eval_dataset", "processing_class", "data_collator")
        return dataclasses.replace(self._inputs, **{name: getattr(self, name) for name in names})

    def _prepare_public(self, dataset: Any) -> Any:
        return prepared_as_training(self, dataset)

    @contextlib.contextmanager
    def _closing(self) -> Iterator[None]:
        """Check the model at the end of a training, write the report, and close what training opened."""
        is_finished = False
        try:
            yield
            self._check_state()
            is_finished = True
            self._checkpoints.drop_extra()
        except KeyboardInterrupt:
            logger.warning("Interrupted. Charged steps stay charged; to continue, add --resume_from_checkpoint True.")
            raise
        finally:
            if self._session is not None:
                try:
                    self._release.write_report()
                finally:
                    self._session.end(is_finished=is_finished)

    def _check_state(self) -> None:
        """Refuse a model that a forward changed, after restoring it where that was during training."""
        if self._session is not None and self._session.is_open:
            self._session.kept.check()
        refuse_spoilt(self.model)

    def _on_held_out(self, dataset: Any) -> contextlib.AbstractContextManager[Any]:
        return self._evaluation.on_held_out(dataset, self.eval_dataset, self.train_dataset, self.model)

    # --- life of a run -----------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        check_accelerator(self.accelerator)
        shards.write_whole_models(self.accelerator)
        shards.average_no_gradients(self.accelerator)

    @explains_storage_faults
    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> TrainOutput:
        to_train(self._planned)
        check_accumulation(self.args)
        check_accelerator(self.accelerator)
        self._session = None
        checkpoint, self._goes_on = self._checkpoints.choose(resume_from_checkpoint)
        with self._preemption.watching(), self._closing():
            return super().train(checkpoint, *args, **kwargs)

    def set_initial_training_values(self, args: Any, dataloader: DataLoader) -> tuple:
        values = super().set_initial_training_values(args, dataloader)
        to_train(self._planned).check_length(values[-1])
        return values

    def _prepare_for_training(self, max_steps: int, train_dataloader: DataLoader, resume_from_checkpoint: Any) -> Any:
        model, loader = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        self._release.check(self._release.output_dir)  # what would refuse a save is found now
        is_resumed = resume_from_checkpoint is not None or self._goes_on
        begun = (self.state.global_step if is_resumed else None, resume_from_checkpoint)
        planned = to_train(self._planned)
        self._session = TrainingSession(self._as_made(), planned, self._records, model, self.optimizer, *begun)
        self._evaluation.run = self._session.run
        self._release.write_report()
        self._session.announce()
        return model, loader

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, Any]:
        """Optimizer class and options: those of `Trainer`, and the optimizers of `hf_dpopt.optim` by their names."""
        return stage_options.optimizer_of(args) or Trainer.get_optimizer_cls_and_kwargs(args, model)

    # --- data --------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader:
        made = self._as_made()  # the records may have been replaced since the trainer was made
        planned = to_train(self._planned)
        planned.check_records(made)
        self._set_signature_columns_if_needed()
        columns, remove = self._signature_columns or (), self._remove_unused_columns
        self._records = TrainingRecords(made, planned, columns, remove=remove, place=self._prepare_inputs)
        return self._records.loader(self.args, planned.plan.sampler.steps_per_epoch, lambda: self._training.run)

    def num_examples(self, dataloader: DataLoader) -> int:
        """Number of examples that may be known: where users are protected, how many records they have may not."""
        planned, is_training = self._planned, isinstance(dataloader.dataset, Records)
        hides = planned is not None and planned.users is not None and is_training
        return to_train(planned).plan.num_examples if hides else super().num_examples(dataloader)

    def get_total_train_batch_size(self, args: Any) -> int:
        return args.expected_batch_size or super().get_total_train_batch_size(args)

    # --- step --------------------------------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """One private step. Returns 0, not the loss: the exact training loss is data."""
        assert isinstance(inputs, LogicalBatch), type(inputs)
        assert inputs.step == self.state.global_step + 1, (inputs.step, self.state.global_step)
        give_back(self.model)  # an evaluation may have left weights whole
        self._training.check_trained(self.model)
        with self.compute_loss_context_manager():
            has_update = self._training.take_step(inputs)
        if not has_update:
            self.accelerator.gradient_state._set_sync_gradients(False)  # no update, until the next step begins
        return torch.zeros((), device=self.args.device)

    def _maybe_log_save_evaluate(
        self, tr_loss: Any, grad_norm: Any, model: nn.Module, trial: Any, *args: Any, **kwargs: Any
    ) -> None:
        self._preemption.between_steps(self._training.run, self.state, self.control)
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, model, trial, *args, **kwargs)
        if self._preemption.wants_save and self._checkpoints.last_saved != self.state.global_step:
            self._save_checkpoint(model, trial)  # save_strategy="best" takes back what was asked for

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> None:
        return None  # a token count over the batch is data, and no loss here is scaled by it

    def floating_point_ops(self, inputs: Any) -> int:
        return 0  # counted from the sampled batches, so it would reveal their sizes

    # --- release -----------------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Un-noised training values never reach the log; `epsilon` so far joins every line."""
        logs = {key: value for key, value in logs.items() if not is_secret_key(key)}
        if self._session is not None:
            logs = self._session.line_of(logs)
        super().log(logs, start_time)

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: float) -> TrainOutput:
        self._preemption.stop(self.state)
        self._training.stages.finish()
        output, spent = super()._finalize_training(trial, num_train_samples, start_time), self.privacy_spent()
        metrics = {k: v for k, v in output.metrics.items() if not is_secret_key(k)}
        metrics |= {"epsilon": spent.epsilon, "delta": spent.delta}
        return TrainOutput(output.global_step, float("nan"), metrics)

    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self._checkpoints.folder is None else str(self._checkpoints.folder)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        folder, run, is_extra = self._get_output_dir(trial), self._training.run, self._preemption.is_extra
        save, place = functools.partial(super()._save_checkpoint, model, trial), f"checkpoint-{self.state.global_step}"
        with self._preemption.saving(self.args), naming(Path(folder) / place):
            pushed = self._checkpoints.save(save, folder, self.state, run, is_extra=is_extra)
        if pushed is not None:
            self._push_from_checkpoint(pushed)

    def _save_rng_state(self, output_dir: str) -> None:
        return None  # secret: a resume derives the states of all generators from the key

    def _load_best_model(self) -> None:
        self._checkpoints.check_best(self.state, self._training.run)
        super()._load_best_model()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        give_back(self.model)
        with shards.optimizer_in_files(self, output_dir, saves=True):
            super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save or shards.is_in_shards(self.model):
            self._training.stages.save(output_dir, writes=self.args.should_save)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with loading(checkpoint), shards.optimizer_in_files(self, checkpoint, saves=False):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        model = self.model if model is None else model
        with loading(resume_from_checkpoint):
            if shards.is_in_shards(model):
                shards.load_weights(model, resume_from_checkpoint)
            else:
                super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        return None

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model; what is not trained has the values that it had when training began."""
        is_training = self._session is not None and self._session.is_open
        changed = self._training.kept.restore() if is_training else []
        refuse_spoilt(self.model)
        super().save_model(output_dir, _internal_call)
        if changed:
            raise UnsupportedModuleError(changed_by_a_forward(changed))

    @explains_storage_faults
    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        give_back(self.model)
        with self._release.writing(folder), self._lengths.saved():
            super()._save(output_dir, state_dict=shards.whole_state(state_dict, keeps=self.args.should_save))
        self._release.note_saved(folder)

    @explains_storage_faults
    def save_state(self) -> None:
        with self._release.writing():
            super().save_state()

    @explains_storage_faults
    def save_metrics(self, split: str, metrics: dict[str, float], combined: bool = True) -> None:
        with self._release.writing():
            super().save_metrics(split, metrics, combined)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        with self._release.writing():
            super().create_model_card(*args, **kwargs)
        self._release.complete_model_card()

    @explains_storage_faults
    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        self._release.publish()
        return super().push_to_hub(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if not self._checkpoints.defer_push(checkpoint_folder):
            self._release.publish(Path(checkpoint_folder))
            super()._push_from_checkpoint(checkpoint_folder)

    # --- evaluation --------------------------------------------------------------------------------------------------

    @explains_storage_faults
    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> dict[str, float]:
        self._check_state()
        with self._on_held_out(eval_dataset) as found:
            if not self._evaluation.is_private or isinstance(found, dict):  # which hands over one set after the other
                return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix, **kwargs)
            with self.compute_loss_context_manager():
                metrics = self._evaluation.evaluate(found, metric_key_prefix, self.model, self.data_collator)
            self.log(metrics)
            self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
            return metrics

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self._evaluation.refuse_exact("evaluation_loop")
        return super().evaluation_loop(*args, **kwargs)

    @explains_storage_faults
    def predict(self, test_dataset: Any, *args: Any, **kwargs: Any) -> Any:
        self._evaluation.refuse_exact("predict")
        self._check_state()
        with self._on_held_out(test_dataset):
            return super().predict(test_dataset, *args, **kwargs)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        with self._on_held_out(eval_dataset):
            return super().get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        with self._on_held_out(test_dataset):
            return super().get_test_dataloader(test_dataset)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        raise DPConfigError("`hyperparameter_search` accounts for no run. Use `hf-dpopt tune` (docs/tuning.md).")


class DPTrainer(DPTrainerMixin, Trainer):
    """`transformers.Trainer` with differential privacy; see `DPTrainerMixin`."""


class DPSeq2SeqTrainer(DPTrainerMixin, Seq2SeqTrainer):
    """`transformers.Seq2SeqTrainer` with differential privacy; use it with `DPSeq2SeqTrainingArguments`."""
