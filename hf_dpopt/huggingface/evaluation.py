"""The door to an evaluation set: exact metrics of held-out records, or noisy ones of private records.

Those are one noisy sum over the records, charged before a record is looked at.

Shape legend: B = records.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hf_dpopt.common import collectives
from hf_dpopt.common.checks import check_positive
from hf_dpopt.common.errors import DPBudgetExceeded, DPConfigError, UnsupportedModuleError
from hf_dpopt.common.log import logger
from hf_dpopt.common.sharding import give_back
from hf_dpopt.huggingface.inputs import TrainerInputs
from hf_dpopt.huggingface.loader import Place, Remove, without_unused
from hf_dpopt.huggingface.refusals.data import check_evaluation, check_is_no_stream
from hf_dpopt.huggingface.shards import is_in_shards
from hf_dpopt.huggingface.storage_faults import found_by, open_log
from hf_dpopt.plan.evaluation_budget import EvaluationBudget
from hf_dpopt.plan.plan import PrivacyPlan
from hf_dpopt.randomness.chacha import ChaCha20Gaussian
from hf_dpopt.randomness.framework import keep_generators, reseed_from_the_system
from hf_dpopt.records.collation import Collation, row_of
from hf_dpopt.records.limits import Limits, padding_id_of
from hf_dpopt.records.losses import RecordLosses, num_records, problem_type
from hf_dpopt.records.overlap import TrainingRows
from hf_dpopt.records.rows import SuppressRecordErrors, read_rows, spread
from hf_dpopt.records.scores import Scores, usual_bound
from hf_dpopt.run.kept_state import KeptState, refuse_spoilt
from hf_dpopt.run.ledger import Evaluation, Ledger
from hf_dpopt.run.run import PrivateRun
from hf_dpopt.run.run_log import RunLog
from hf_dpopt.run.step import digest_of
from hf_dpopt.self_check import Columns, Look, conditions
from hf_dpopt.self_check.comparisons import BESIDE, check_memory

TRIED = 16  # records that are collated before the charge
KEY_BYTES = 32


class EvaluationGuard:
    """Evaluations of one trainer: of records that it does not train on, and of private ones with noise.

    Formal guarantee: an answer on a private set is one Gaussian mechanism on the sum of vectors of norm at most 1, one
    for each record of the set, with noise from a fresh key of the operating system, which is kept nowhere. It was
    charged on the disk before a record was read; all that were charged stay within ``eval_target_epsilon``. Nothing
    else of the set is returned, logged or written.

    Args:
        inputs: what the trainer was given; ``eval_data_privacy`` says whose records the evaluation sets are of.
        plan: plan of the run; None for a trainer that only evaluates.
        training: rows of the training set.
        place: moves a batch to the device.
        remove: takes columns that are not used from a stored dataset.

    Attributes:
        run: the run in progress, whose log is open, or the last one; None before.
        budget: budget of the last evaluation.
    """

    def __init__(
        self, inputs: TrainerInputs, plan: PrivacyPlan | None, training: TrainingRows, *, remove: Remove, place: Place
    ):
        self._args, self._plan, self._training, self._sets = inputs.args, plan, training, inputs.eval_dataset
        self._per_example_loss_func, self._place, self._remove = inputs.per_example_loss_func, place, remove
        self._held_out: tuple[Any, ...] = ()
        self._told = False
        self._seen: dict[str, list[Any]] = {}  # prefix -> sets that were evaluated under it
        self._largest = 0  # records of a set
        self.run: PrivateRun | None = None
        self.budget: EvaluationBudget | None = None

    @contextlib.contextmanager
    def on_held_out(self, dataset: Any, sets: Any, train_dataset: Any, model: nn.Module) -> Iterator[Any]:
        """Yield the set, or sets; refuse training records, but look once at what one call hands to the next.

        Args:
            dataset: the evaluation set, several by their names, or one of those names; None for all.
            sets: those of the trainer, as they are now.
            train_dataset: likewise; some trainers prepare what they are given.
            model: the model, whose shards are given back at the end.

        Raises:
            DPConfigError: for a set that the model was trained on.
        """
        self._sets, before = sets, self._held_out
        if isinstance(dataset, str) and isinstance(sets, dict):
            dataset = sets[dataset]
        elif dataset is None:
            dataset = sets
        if not any(dataset is one for one in before):
            if self._training.dataset is not train_dataset:
                self._training = TrainingRows(train_dataset)
            check_evaluation(dataset, self._training)
        self._held_out = (*before, dataset, *(dataset.values() if isinstance(dataset, dict) else ()))
        try:
            yield dataset
        finally:
            self._held_out = before
            give_back(model)

    @property
    def is_private(self) -> bool:
        """Whether the records are of people who were promised privacy."""
        return self._args.eval_data_privacy == "private"

    def refuse_exact(self, what: str) -> None:
        """Refuse a way to exact values of an evaluation set that is private."""
        if self.is_private:
            raise DPConfigError(
                f"`{what}` gives exact values of single records, and the evaluation set was declared private. Use "
                "evaluate(); for a set that is not private, make a trainer with --eval_data_privacy public."
            )

    @property
    def facts(self) -> dict[str, Any]:
        """Public facts for the report; empty if no evaluation was charged."""
        known = self._known()
        if known is None or not known.evaluations:
            return {}
        made = list(known.evaluations.values())
        budget = self.budget or self._budget_before(made)
        spent = budget.spent(made)
        return {
            **dataclasses.asdict(budget),
            "noise_multiplier": min(one.noise_multiplier for one in made),
            "target_epsilon": max(budget.target_epsilon, spent),  # earlier runs here may have had a larger one
            "num_charged": len(made),
            "num_lost": sum(one.metrics is None for one in made),
            "epsilon_spent": spent,
        }

    def _budget_before(self, made: list[Evaluation]) -> EvaluationBudget:
        """Budget that states evaluations of earlier processes; at the delta of the run if no set is named now."""
        sets = self._sets
        if self.is_private and hasattr(sets, "__len__"):
            return self._budget(0 if isinstance(sets, dict) else len(sets))
        assert self._plan is not None  # else the sets are private
        return EvaluationBudget(0.0, self._plan.delta, made[0].adjacency, len(made))

    def _known(self) -> Ledger | None:
        """Record of the run, in which all evaluations are; on rank 0."""
        open_one = None if self.run is None else self.run.ledger
        return found_by(self._args).known if open_one is None else open_one

    def _log(self) -> contextlib.AbstractContextManager[RunLog]:
        """The log of the run: that of the training in progress, or opened for this."""
        open_one = None if self.run is None else self.run.log
        return open_log(self._args) if open_one is None else contextlib.nullcontext(open_one)

    def _charge(self, budget: EvaluationBudget, query: Mapping[str, Any]) -> str:
        """Charge an evaluation, on the disk; return its id.

        Raises:
            DPBudgetExceeded: if all evaluations would cost more than the budget. Nothing is charged then.
        """
        with self._log() as log:
            made = [*log.state.evaluations.values(), Evaluation(budget.noise_multiplier, budget.adjacency, query)]
            spent = budget.spent(made)
            if spent > budget.target_epsilon * (1 + 1e-9):
                raise DPBudgetExceeded(
                    f"{len(made) - 1} private evaluations were charged, and another would bring their epsilon to "
                    f"{spent:.4g}, above eval_target_epsilon={budget.target_epsilon:g}. Evaluate less often "
                    "(--eval_steps), plan for more from the start (--eval_times), or raise --eval_target_epsilon."
                )
            return log.charge_evaluation(budget.noise_multiplier, budget.adjacency, query)

    def _note_answer(self, evaluation: str, metrics: Mapping[str, float]) -> None:
        with self._log() as log:
            log.note_answer(evaluation, metrics)

    def _answered(self, query: Mapping[str, Any], scores: Scores) -> dict[str, float] | None:
        """Metrics that were released for the same query; no numbers if that release was lost, None for a new query."""
        known = self._known()
        before = None if known is None else known.answer(query)
        if before is None:
            return None
        if before.metrics is not None:
            logger.info(
                f"These weights were evaluated before, on {query['set']!r}: the same answer, at no cost. If an "
                "earlier process called another set so, give this one a metric_key_prefix of its own."
            )
            return dict(before.metrics)
        logger.warning(
            f"An evaluation of these weights on {query['set']!r} was charged, and the run was killed before it was "
            "answered: the metrics are no numbers. To pay once more and ask again, give it another metric_key_prefix."
        )
        return dict.fromkeys(scores.metrics, math.nan)

    def evaluate(self, dataset: Any, prefix: str, model: nn.Module, collator: Any) -> dict[str, float]:
        """Noisy metrics of a set, by their names with a prefix, and the epsilon of all evaluations so far.

        Args:
            dataset: map-style, one record an index.
            prefix: before the names, without its underscore.
            model: the model as it is now.
            collator: the Trainer's.

        Raises:
            DPBudgetExceeded: before a record is looked at, if the budget is spent.
            DPConfigError: for a set or a model that cannot be evaluated privately.
        """
        check_is_no_stream("eval_dataset", dataset)
        if is_in_shards(model):
            raise DPConfigError(
                "eval_data_privacy='private' has no evaluation of models in shards (FSDP2) yet. Evaluate the saved "
                "model in a process of its own."
            )
        losses = RecordLosses(model, self._per_example_loss_func or "auto")
        scores = scores_of(losses, self._per_example_loss_func, self._args.eval_loss_bound)
        self.budget = budget = self._budget(len(dataset))
        query = {
            "set": self._name_of(dataset, prefix),
            "weights": digest_of(dict(model.named_parameters())),  # frozen ones, too
            "loss_bound": scores.loss_bound,
            "num_labels": scores.num_labels,
        }
        ranks = collectives.current_ranks()
        known = ranks.same(lambda: self._answered(query, scores))
        if known is None:
            self._announce(budget, scores, len(dataset))
            with self._evaluating(model) as start:
                rows = without_unused(self._remove, "evaluation", dataset)
                vectors = _Vectors(losses, scores, rows, collator, self._place)
                ranks.every(lambda: self._try(vectors, start))
                charged = ranks.same(lambda: self._charge(budget, query))
                sums = ranks.every(lambda: self._sum(vectors, start).tolist())
            total = torch.tensor(sums, dtype=torch.float64).sum(dim=0)
            known = ranks.same(lambda: self._release(total, scores, budget, len(dataset)))
            ranks.same(lambda: self._note_answer(charged, known))
        spent = ranks.same(lambda: self.facts["epsilon_spent"])
        return {f"{prefix}_{name}": value for name, value in {**known, "epsilon": spent}.items()}

    def _name_of(self, dataset: Any, prefix: str) -> str:
        """Name of a set in the ledger: one of several has its own, and another under the same prefix a number."""
        several = self._sets.items() if isinstance(self._sets, dict) else ()
        own = next((name for name, one in several if one is dataset), None)
        if own is not None and not prefix.endswith(f"_{own}"):
            prefix = f"{prefix}_{own}"
        sets = self._seen.setdefault(prefix, [])
        place = next((i for i, one in enumerate(sets) if one is dataset), len(sets))
        if place == len(sets):
            sets.append(dataset)
        return prefix if place == 0 else f"{prefix} ({place + 1})"

    def _budget(self, size: int) -> EvaluationBudget:
        args, sets = self._args, self._sets
        adjacency = args.adjacency if self._plan is None else self._plan.adjacency
        num_sets = len(sets) if isinstance(sets, dict) else 1
        sizes = [len(one) for one in sets.values() if hasattr(one, "__len__")] if isinstance(sets, dict) else []
        self._largest = max(self._largest, size, *sizes)
        planned = args.eval_times
        if planned is None:
            planned = num_sets * planned_evaluations(args, self._plan)
        assert args.eval_target_epsilon is not None
        return EvaluationBudget.of(args.eval_target_epsilon, adjacency, planned, self._largest)

    def _announce(self, budget: EvaluationBudget, scores: Scores, size: int) -> None:
        if self._told:
            return
        self._told = True
        accuracy = f" (accuracy: about {scores.noise_of_accuracy(budget.noise_stddev, size):.2g})"
        logger.info(
            f"Private evaluation set: epsilon {budget.target_epsilon:g} at delta {budget.delta:g} for "
            f"{budget.num_planned} evaluations, noise multiplier {budget.noise_multiplier:.4g}. Every metric has noise"
            f"{accuracy if scores.num_labels else ''}: differences of that size say nothing."
        )

    def _try(self, vectors: _Vectors, start: KeptState) -> None:
        """Try the evaluation before it is charged: on the form of some records, and on made-up ones like them.

        Raises:
            DPConfigError: if no record that was tried can be used, or the model fails on a made-up one.
            UnsupportedModuleError: for a model, or a loss function, that remembers records.
        """
        model, num = vectors.losses.model, len(vectors.rows)
        like = next(filter(None, map(vectors.batch_of, spread(num, TRIED))), None)
        if like is None:
            raise DPConfigError(
                f"None of {min(num, TRIED)} records of the evaluation set can be used: the collator or the limits of "
                "the model refuse each of them. Prepare the set as the training set, labels included."
            )
        if self._args.skip_self_check:
            return
        looks = (Look(1.0), *(other for _, other in BESIDE))
        made_up = Columns.of(like, model).batch(model, looks)

        def compute(batch: Mapping[str, Any]) -> torch.Tensor:
            start.restore(is_thorough=False)  # as before each record
            return vectors.of_batch(batch)

        try:
            check_memory(compute, [row_of(made_up, b) for b in range(len(looks))])
        except (DPConfigError, UnsupportedModuleError):
            raise
        except Exception as error:
            raise DPConfigError(
                f"{type(model).__name__} fails on a made-up record like those of the evaluation set: "
                f"{type(error).__name__}: {error}. Check columns, shapes and types, or add --skip_self_check."
            ) from error
        start.restore()
        refuse_spoilt(model)

    @contextlib.contextmanager
    def _evaluating(self, model: nn.Module) -> Iterator[KeptState]:
        """Evaluation mode, under random numbers that nobody knows; all state of the model is restored after it."""
        kept, mode = keep_generators(conditions.device_of(model)), conditions.in_mode(model, training=False)
        with kept, mode, torch.no_grad():
            reseed_from_the_system()
            start = KeptState(model, has_caches=True)
            try:
                yield start
            finally:
                start.restore()

    def _sum(self, vectors: _Vectors, start: KeptState) -> torch.Tensor:
        """Sum over this rank's records, each alone and from the same state of the model. Secret.

        A batch of several would let a layer mix them, and rounding depends on the shape of a batch.
        """
        total = vectors.scores.nothing()
        for i in range(collectives.rank(), len(vectors.rows), collectives.world_size()):
            start.restore(is_thorough=False)
            total += vectors.of_record(i)
        start.restore()
        refuse_spoilt(vectors.losses.model)
        return total

    def _release(self, total: torch.Tensor, scores: Scores, budget: EvaluationBudget, size: int) -> dict[str, float]:
        """Metrics of the sum over all ranks with its noise: the only door."""
        source = ChaCha20Gaussian(os.urandom(KEY_BYTES))
        noise = source.normal(total.shape, step=0, tensor=0).double()
        released = total + noise * budget.noise_stddev
        return scores.read(released, size if budget.knows_size else None)


class _Vectors:
    """Vectors of the single records of a set, of which an evaluation is the sum.

    Args:
        losses: losses of the model.
        scores: make a vector of a loss and of logits.
        rows: the set, without columns that are not used.
        collator: the Trainer's.
        place: moves a batch to the device.
    """

    def __init__(self, losses: RecordLosses, scores: Scores, rows: Any, collator: Any, place: Place):
        self.losses, self.scores, self.rows = losses, scores, rows
        limits, padding_id = Limits.of(losses.model, losses.kind), padding_id_of(losses.model)
        self.collation = Collation(collator, limits=limits, padding_id=padding_id, place=place)

    def batch_of(self, i: int) -> Mapping[str, Any] | None:
        """Batch of one record; of several rows of an index the first. None for a record that cannot be collated."""
        (found,) = read_rows(self.rows, [i])
        return next((part.batch for part in self.collation.parts(found[:1])), None)

    def of_record(self, i: int) -> torch.Tensor:
        """The vector of a record, (K,); zeros if it cannot be collated or computed, without a message."""
        batch = self.batch_of(i)
        if batch is not None:
            with SuppressRecordErrors():
                return self.of_batch(batch)
        return self.scores.nothing()

    def of_batch(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """The vector of a batch of one record, (K,)."""
        outputs: list[Any] = []
        handle = self.losses.model.register_forward_hook(lambda module, inputs, output: outputs.append(output))
        try:
            losses_B = self.losses(batch)
        finally:
            handle.remove()
        if losses_B.shape != (1,) or num_records(batch) != 1:
            raise ValueError("not one loss for each record")
        logits = outputs[-1].logits if self.scores.num_labels is not None else None
        return self.scores.total_of(losses_B, logits, batch.get("labels"))


def scores_of(losses: RecordLosses, per_example_loss_func: Any, loss_bound: float | None) -> Scores:
    """Scores that a model has, with the declared bound on its loss or the usual one."""
    model: Any = losses.model
    check_positive(eval_loss_bound=loss_bound)
    bound = loss_bound
    if bound is None:
        bound = usual_bound(model, per_example_loss_func, "eval_data_privacy='private'", "--eval_loss_bound 5")
    is_classifier = losses.kind == "ForSequenceClassification" and problem_type(model) == "single_label_classification"
    return Scores(float(bound), model.config.num_labels if is_classifier else None)


def planned_evaluations(args: Any, plan: PrivacyPlan | None) -> int:
    """Evaluations of a run by its schedule, and one at its end.

    Args:
        args: `eval_strategy`, `eval_steps` and `eval_on_start` are read.
        plan: what the run was planned as; None if nothing is trained.
    """
    strategy, planned = str(getattr(args.eval_strategy, "value", args.eval_strategy)), 0
    if strategy == "steps" and plan is not None:
        every = args.eval_steps or args.logging_steps
        every = math.ceil(plan.num_steps * every) if every < 1 else every
        planned = math.floor(plan.num_steps / max(1, every))
    elif strategy == "epoch" and plan is not None:  # `max_steps` may be more or fewer epochs than `num_train_epochs`
        planned = math.ceil(plan.num_steps / plan.sampler.steps_per_epoch)
    return planned + bool(args.eval_on_start) + 1
