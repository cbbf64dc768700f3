"""Evaluation on a private set: one noisy sum over its records, charged before a record is looked at.

Shape legend: B = records.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_dpopt.common import collectives
from hf_dpopt.common.checks import check_count, check_positive
from hf_dpopt.common.errors import DPBudgetExceeded, DPConfigError, UnsupportedModuleError, shown
from hf_dpopt.common.log import logger
from hf_dpopt.huggingface.kept_state import KeptState, refuse_spoilt
from hf_dpopt.huggingface.private_metrics import usual_bound
from hf_dpopt.huggingface.self_check import Look, conditions, synthetic_batch
from hf_dpopt.huggingface.self_check.influence import BESIDE, check_memory
from hf_dpopt.huggingface.self_check.made_up import padding_side_of
from hf_dpopt.huggingface.self_check.made_up import rows as made_up_rows
from hf_dpopt.huggingface.shards import is_in_shards
from hf_dpopt.plan.evaluation import EvaluationBudget
from hf_dpopt.plan.plan import PrivacyPlan
from hf_dpopt.randomness.cipher import make_noise_source
from hf_dpopt.randomness.framework import reseed_from_the_system
from hf_dpopt.records.collation import Collation, Padding
from hf_dpopt.records.limits import Limits, padding_id_of
from hf_dpopt.records.losses import RecordLosses, num_records, problem_type
from hf_dpopt.records.rows import is_environment, read_rows, spread
from hf_dpopt.records.scores import Scores
from hf_dpopt.run.keys import private_dir
from hf_dpopt.run.ledger import Evaluation, Ledger
from hf_dpopt.run.log import RunLog, find_run
from hf_dpopt.run.step import digest_of

TRIED = 16  # records that are collated before the charge
KEY_BYTES = 32


class PrivateEvaluation:
    """Evaluations of one trainer whose evaluation set is private.

    Formal guarantee: an answer is one Gaussian mechanism on the sum of vectors of norm at most 1, one for each record
    of the set, with noise from a fresh key of the operating system, which is kept nowhere. It was charged on the disk
    before a record was read; all that were charged stay within ``eval_target_epsilon``. Nothing else of the set is
    returned, logged or written.

    Args:
        trainer: a `DPTrainer` whose arguments say ``eval_data_privacy="private"``.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer
        self._told = False
        self._seen: dict[str, list[Any]] = {}  # prefix -> sets that were evaluated under it
        self._largest = 0  # records of a set
        self.budget: EvaluationBudget | None = None

    @property
    def facts(self) -> dict[str, Any] | None:
        """Public facts for the report; None if no evaluation was charged."""
        known = self._known()
        if known is None or not known.evaluations:
            return None
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
        """Budget by which to state evaluations of earlier processes; at the delta of the run if none is named now."""
        args, sets, plan = self._trainer.args, self._trainer.eval_dataset, self._trainer.plan
        if args.eval_data_privacy == "private" and hasattr(sets, "__len__"):
            return self._budget(0 if isinstance(sets, dict) else len(sets))
        return EvaluationBudget(0.0, args.eval_target_delta or plan.delta, made[0].adjacency, len(made))

    def _known(self) -> Ledger | None:
        """Record of the run, in which all evaluations are; on rank 0."""
        run, args = self._trainer._run, self._trainer.args
        if run is not None and run.ledger is not None:
            return run.ledger
        return find_run(Path(args.output_dir), private_dir(args.private_state_dir, args.output_dir)).known

    @contextlib.contextmanager
    def _log(self) -> Iterator[RunLog]:
        """The log of the run: that of the training in progress, or opened for this."""
        run, args = self._trainer._run, self._trainer.args
        if run is not None and run.log is not None:
            yield run.log
            return
        with RunLog.open(args.output_dir, private_dir(args.private_state_dir, args.output_dir)) as log:
            yield log

    def _charge(self, budget: EvaluationBudget, query: Mapping[str, Any]) -> str:
        """Charge an evaluation, on the disk; return its id.

        Raises:
            DPBudgetExceeded: if all evaluations would cost more than the budget. Nothing is charged then.
        """
        with self._log() as log:
            made = [*log.state.evaluations.values(), Evaluation(budget.noise_multiplier, budget.adjacency, query)]
            budget.spent(made[:-1])  # of one adjacency
            spent = budget.spent(made)
            if spent > budget.target_epsilon * (1 + 1e-9):
                raise DPBudgetExceeded(
                    f"{len(made) - 1} evaluations of the private evaluation set were charged, and another would bring "
                    f"their epsilon to {spent:.4g}, above eval_target_epsilon={budget.target_epsilon:g}. Evaluate "
                    "less often (--eval_steps), plan for more from the start (--eval_times), or raise "
                    "--eval_target_epsilon."
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
            "answered. It is lost, as a step is: its noise is not drawn again, and the metrics are no numbers. To ask "
            "once more, and pay once more, give it another metric_key_prefix."
        )
        return dict.fromkeys(scores.metrics, math.nan)

    def evaluate(self, dataset: Any, prefix: str) -> dict[str, float]:
        """Noisy metrics of a set, by their names with a prefix, and the epsilon of all evaluations so far.

        Args:
            dataset: map-style, one record an index.
            prefix: before the names, without its underscore.

        Raises:
            DPBudgetExceeded: before a record is looked at, if the budget is spent.
            DPConfigError: for a set or a model that cannot be evaluated privately.
        """
        trainer, args = self._trainer, self._trainer.args
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise DPConfigError(
                "eval_data_privacy='private' reads records by number, and the evaluation set is a stream. Load it as "
                "a map-style dataset."
            )
        model = trainer.model
        refuse_spoilt(model)
        if is_in_shards(model):
            raise DPConfigError(
                "eval_data_privacy='private' has no evaluation of models in shards (FSDP2) yet. Evaluate the saved "
                "model in a process of its own."
            )
        losses = RecordLosses(model, trainer._per_example_loss_func or "auto")
        scores = scores_of(model, losses, args.eval_loss_bound)
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
                vectors = self._vectors(losses, scores, dataset)
                ranks.every(lambda: self._try(vectors, start))
                charged = ranks.same(lambda: self._charge(budget, query))
                sums = ranks.every(lambda: self._sum(vectors, start).tolist())
            total = torch.tensor(sums, dtype=torch.float64).sum(dim=0)
            known = ranks.same(lambda: self._release(total, scores, budget, len(dataset)))
            ranks.same(lambda: self._note_answer(charged, known))
        spent = ranks.same(self._spent)
        return {f"{prefix}_{name}": value for name, value in {**known, "epsilon": spent}.items()}

    def _spent(self) -> float:
        known = self._known()
        assert known is not None and self.budget is not None
        return self.budget.spent(known.evaluations.values())

    def _name_of(self, dataset: Any, prefix: str) -> str:
        """Name of a set in the ledger: another one under the same prefix has another number."""
        sets = self._seen.setdefault(prefix, [])
        place = next((i for i, one in enumerate(sets) if one is dataset), len(sets))
        if place == len(sets):
            sets.append(dataset)
        return prefix if place == 0 else f"{prefix} ({place + 1})"

    def _budget(self, size: int) -> EvaluationBudget:
        args = self._trainer.args
        adjacency = args.adjacency if self._trainer.plan is None else self._trainer.plan.adjacency
        sets = self._trainer.eval_dataset
        num_sets = len(sets) if isinstance(sets, dict) else 1
        sizes = [len(one) for one in sets.values() if hasattr(one, "__len__")] if isinstance(sets, dict) else []
        self._largest = max(self._largest, size, *sizes)
        planned = args.eval_times
        if planned is None:
            planned = num_sets * planned_evaluations(args, self._trainer.plan)
        return EvaluationBudget.of(args.eval_target_epsilon, args.eval_target_delta, adjacency, planned, self._largest)

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

    def _vectors(self, losses: RecordLosses, scores: Scores, dataset: Any) -> _Vectors:
        trainer, rows = self._trainer, dataset
        if hasattr(dataset, "column_names") and hasattr(dataset, "remove_columns"):
            rows = trainer._remove_unused_columns(dataset, description="evaluation")
        collation = Collation(
            trainer.data_collator,
            limits=Limits.of(losses.model, losses.kind),
            padding=Padding(padding_id_of(losses.model)),
            place=trainer._prepare_inputs,
        )
        return _Vectors(losses, scores, collation, rows)

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
        if self._trainer.args.skip_self_check:
            return
        padding_id = padding_id_of(model)
        looks = (Look(1.0), *(other for _, other in BESIDE))
        made_up = synthetic_batch(like, model, padding_id, padding_side=padding_side_of(like), looks=looks)

        def compute(batch: Mapping[str, Any]) -> torch.Tensor:
            start.restore(is_thorough=False)  # as before each record
            return vectors.of_batch(batch)

        try:
            check_memory(compute, [made_up_rows(made_up, b) for b in range(len(looks))])
        except (DPConfigError, UnsupportedModuleError):
            raise
        except Exception as error:
            raise DPConfigError(
                f"{type(model).__name__} fails on a made-up record like those of the evaluation set: "
                f"{type(error).__name__}: {error}. Check that the columns, their shapes and types are those of the "
                "model; --skip_self_check leaves this trial out."
            ) from error
        start.restore()
        refuse_spoilt(model)

    @contextlib.contextmanager
    def _evaluating(self, model: nn.Module) -> Iterator[KeptState]:
        """Evaluation mode, under random numbers that nobody knows; all state of the model is restored after it."""
        device = conditions.device_of(model)
        with contextlib.ExitStack() as stack:
            stack.enter_context(conditions.keep_generators(device))
            stack.enter_context(conditions.in_mode(model, training=False))
            stack.enter_context(torch.no_grad())
            stack.enter_context(self._trainer.compute_loss_context_manager())
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
        source = make_noise_source(self._trainer.args.noise_rng, os.urandom(KEY_BYTES))
        noise = source.normal(total.shape, step=0, tensor=0).double()
        released = total + noise * budget.noise_stddev
        return scores.read(released, size if budget.knows_size else None)


@dataclasses.dataclass(frozen=True)
class _Vectors:
    """Vectors of the single records of a set, of which an evaluation is the sum.

    Args:
        losses: losses of the model.
        scores: make a vector of a loss and of logits.
        collation: makes a batch of one record.
        rows: the set, without columns that are not used.
    """

    losses: RecordLosses
    scores: Scores
    collation: Collation
    rows: Any

    def batch_of(self, i: int) -> Mapping[str, Any] | None:
        """Batch of one record; of several rows of an index the first. None for a record that cannot be collated."""
        (found,) = read_rows(self.rows, [i])
        return next((part.batch for part in self.collation.parts(found[:1])), None)

    def of_record(self, i: int) -> torch.Tensor:
        """The vector of a record, (K,); zeros if it cannot be collated or computed, without a message."""
        batch = self.batch_of(i)
        if batch is None:
            return self.scores.nothing()
        try:
            return self.of_batch(batch)
        except BaseException as error:
            if is_environment(error):
                raise
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


def scores_of(model: nn.Module, losses: RecordLosses, loss_bound: float | None) -> Scores:
    """Scores that a model has, with the declared bound on its loss or the usual one.

    Raises:
        DPConfigError: if there is neither.
    """
    usual = usual_bound(model) if losses.kind != "custom" else None
    if loss_bound is None and usual is None:
        raise DPConfigError(
            "eval_data_privacy='private' needs a bound on the loss of a record, and this loss has no usual one. "
            "Declare it: --eval_loss_bound 5; losses above count as that."
        )
    check_positive(eval_loss_bound=loss_bound)
    is_classifier = losses.kind == "ForSequenceClassification" and (
        problem_type(model, torch.zeros(1, dtype=torch.long)) == "single_label_classification"
    )
    bound = loss_bound if loss_bound is not None else usual
    assert bound is not None
    config: Any = getattr(model, "config", None)
    return Scores(float(bound), config.num_labels if is_classifier else None)


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


def check_private_evaluation(args: Any, given: Mapping[str, Any]) -> None:
    """Refuse options that release more of a private evaluation set than its noisy metrics, or have no budget.

    Raises:
        DPConfigError: naming the option.
    """
    own = ("eval_target_epsilon", "eval_target_delta", "eval_times", "eval_loss_bound")
    if args.eval_data_privacy != "private":
        for name in own:
            if getattr(args, name) is not None:
                raise DPConfigError(
                    f"{name}={shown(getattr(args, name))} is for a private evaluation set, and it was declared "
                    f"{args.eval_data_privacy!r}. Add --eval_data_privacy private, or leave it out."
                )
        return
    if args.tuned_runs is not None:
        raise DPConfigError(
            f"eval_data_privacy='private' with tuned_runs={args.tuned_runs:g}: each run would spend "
            "eval_target_epsilon, and what the choice between them costs the people in the evaluation set is not "
            "accounted for. Choose by public data, or train one run."
        )
    if args.eval_target_epsilon is None:
        raise DPConfigError(
            "eval_data_privacy='private' has no budget for the people in the evaluation set. Add "
            "--eval_target_epsilon 2, say; it is theirs, and does not touch target_epsilon."
        )
    if args.eval_times is not None:
        check_count("eval_times", args.eval_times)
    _check_delta(args.eval_target_delta, given.get("eval_dataset"))
    if args.privacy_unit == "user":
        raise DPConfigError(
            "eval_data_privacy='private' protects single records of the evaluation set, and privacy_unit='user' asks "
            "for whole users, who may have several. Evaluate on one record of each user, in a run with "
            "privacy_unit='example', or on public data."
        )
    for what in ("compute_metrics", "preprocess_logits_for_metrics"):
        if given.get(what) is not None:
            raise DPConfigError(
                f"`{what}` sees exact predictions of single records, and eval_data_privacy='private' releases noisy "
                "sums alone: loss, accuracy, F1. Leave it out."
            )
    best = args.metric_for_best_model
    names = {"loss", "accuracy", "f1"}
    if (
        best is not None
        and not isinstance(given.get("eval_dataset"), dict)
        and best.removeprefix("eval_") not in names
    ):
        raise DPConfigError(
            f"metric_for_best_model={shown(best)} is no metric of a private evaluation set. Use one of: "
            f"{', '.join(sorted(names))} (accuracy and f1 for classifiers, f1 for two labels)."
        )


def _check_delta(delta: float | None, sets: Any) -> None:
    """Refuse a delta above 1/n before a step is charged; a set that comes later is checked when it is evaluated."""
    sizes = [len(one) for one in (sets.values() if isinstance(sets, dict) else [sets]) if hasattr(one, "__len__")]
    largest = max([1, *sizes])
    if delta is not None and not (0 < delta < 1 and delta * largest <= 1):
        raise DPConfigError(
            f"eval_target_delta={delta:g} is outside of 0 to 1/n = {1 / largest:.3g}, with n = {largest} records in "
            "the evaluation set. Leave it out: the default is below."
        )


def refuse_exact(args: Any, what: str) -> None:
    """Refuse a way to exact values of an evaluation set that is private."""
    if args.eval_data_privacy == "private":
        raise DPConfigError(
            f"`{what}` gives exact values of single records, and the evaluation set was declared private. Use "
            "evaluate(); for a set that is not private, make a trainer with --eval_data_privacy public."
        )
