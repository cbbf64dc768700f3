"""`DPTrainer.hyperparameter_search`: an accounted tuning in this process.

Every run is a trainer of its own, with a copy of the model as it was given. What it prints goes to a file in the
private folder: the log of a run that is not released would be a release.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers.trainer_utils import BestRun

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.log import logger
from hf_dpopt.huggingface.arguments import DPTrainingArguments
from hf_dpopt.huggingface.planning import PlannedRun, plan_of
from hf_dpopt.tuning.command import DECLARED
from hf_dpopt.tuning.release import release
from hf_dpopt.tuning.search import Candidate, RunFailed, Tuning
from hf_dpopt.tuning.space import EXAMPLE, Space

DIRECTIONS = ("minimize", "maximize")


def search(
    args: DPTrainingArguments,
    planned: PlannedRun | None,
    make: Callable[[nn.Module | None, Any], Any],
    model: nn.Module,
    *,
    has_model_init: bool,
    hp_space: Any,
    metric: str,
    direction: str,
    others: Mapping[str, Any],
) -> BestRun:
    """Train a random number of runs, release the best into `output_dir`, and load it into a model.

    Args:
        args: arguments that the runs have in common, `tuned_runs` among them.
        planned: plan of one of them.
        make: (model, arguments) -> a trainer; without a model its model_init makes one.
        model: the untrained model, which gets the weights of the best run.
        has_model_init: whether every run makes a model of its own.
        hp_space: the search space, see `Space`.
        metric: name of the score among those of `evaluate`.
        direction: "maximize" or "minimize" it.
        others: what stock searches take besides.

    Raises:
        DPConfigError: for what cannot be accounted for, or if no run gave a score.
    """
    _check(args, hp_space, metric, direction, others)
    space, plan = Space.read(hp_space), plan_of(planned)
    begin = None if has_model_init else copy.deepcopy(model).cpu()
    law = plan.config.tuned
    assert law is not None
    tuning = Tuning(
        law=law,
        space=space,
        output_dir=str(args.output_dir),
        private_dir=args.private_state_dir,
        asked={"metric": metric, "epsilon": args.target_epsilon, "plan": plan.record.to_json()},
        is_greater_better=direction == "maximize",
    )

    def train(candidate: Candidate) -> float:
        with _unseen(candidate.log):
            try:
                run = make(copy.deepcopy(begin), _arguments_of(args, candidate))
                run.train(resume_from_checkpoint=candidate.has_begun)
                run.save_model()
                return float(run.evaluate()[metric])
            except Exception as error:
                traceback.print_exc()  # into the log of the run
                if candidate.has_charged:
                    raise RunFailed from error
                if isinstance(error, DPConfigError):
                    raise
                raise DPConfigError(
                    f"A run of the search failed before its first step: {type(error).__name__}: {error}. Nothing was "
                    "charged by it. Correct that and search again."
                ) from error

    logger.info(f"Tuning: {law.describe()} of runs; nothing is shown until the best is released.")
    best = tuning.run(train)
    if best is None:
        raise DPConfigError(
            "No run of the tuning gave a score, and nothing is released; the budget is spent. What the runs printed "
            f"is in {tuning.place}, which is private."
        )
    found = release(best, Path(str(args.output_dir)), metric=metric)
    with _unseen(best.candidate.log):
        done = make(begin, _arguments_of(args, best.candidate))
        done._load_from_checkpoint(str(best.candidate.folder), done.model)
        model.load_state_dict(done.model.state_dict())
    tuning.finish()
    return BestRun(run_id="best", objective=found.score, hyperparameters=found.options, run_summary=None)


def _check(args: DPTrainingArguments, hp_space: Any, metric: str, direction: str, others: Mapping[str, Any]) -> None:
    if others:
        raise DPConfigError(
            f"`hyperparameter_search` takes no {', '.join(sorted(others))} here: a backend such as optuna learns "
            "from runs that are not released, and a number of runs that is known hides nothing. Pass hp_space, "
            "metric and direction, and set tuned_runs."
        )
    if args.tuned_runs is None or args.target_epsilon is None:
        raise DPConfigError(
            "`hyperparameter_search` spends a budget per run, and picking the best is a release of its own. Set "
            "tuned_runs=10 and target_epsilon, which is then for all runs together (docs/tuning.md); or train each "
            "setting as a run of its own and add up their epsilons."
        )
    if not isinstance(hp_space, Mapping | str | os.PathLike):
        raise DPConfigError(
            "`hp_space` has to be a law that is fixed beforehand, from which every run draws for itself; a function "
            f"that asks a trial learns from runs that are not released. Pass such as hp_space={EXAMPLE}."
        )
    if direction not in DIRECTIONS:
        raise DPConfigError(f"direction={direction!r} is no direction. Use 'maximize' or 'minimize'.")
    if not metric.startswith("eval_"):
        raise DPConfigError(f"metric={metric!r} is no score of `evaluate`. Use one that begins with eval_.")
    if args.eval_data_privacy not in DECLARED:
        raise DPConfigError(
            "The score is computed on the evaluation data. Say whose they are: eval_data_privacy='public', or "
            "'not_protected'. What the best of several runs tells of a private set has no account."
        )
    if args.push_to_hub or args.log_unprivatized or args.world_size > 1:
        raise DPConfigError(
            "`hyperparameter_search` shows nothing of its runs and has one process: leave push_to_hub and "
            "log_unprivatized out, or use `hf-dpopt tune`, which starts any command."
        )


def _arguments_of(args: Any, candidate: Candidate) -> Any:
    """Arguments of a run: those of the trainer, its own options, and its places in the private folder."""
    made = copy.deepcopy(args)
    for name, value in candidate.options.items():
        if not hasattr(made, name):
            raise DPConfigError(f"`hp_space` has {name}, which is no training argument.")
        setattr(made, name, value)
    made.output_dir, made.private_state_dir = str(candidate.folder), str(candidate.keys)
    made.report_to, made.disable_tqdm, made.log_level = [], True, "error"
    if made.privacy_ledger is not None:
        made.privacy_ledger, made.privacy_ledger_entry = os.path.abspath(made.privacy_ledger), candidate.entry
    return made


@contextlib.contextmanager
def _unseen(path: Path) -> Iterator[None]:
    """Send what this process prints, and what libraries log, to a file that nobody else may read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    streams, level = (sys.stdout, sys.stderr), logging.root.manager.disable
    try:
        with os.fdopen(descriptor, "a", encoding="utf-8", closefd=False) as file:
            logging.disable(logging.CRITICAL)  # handlers may hold streams of their own
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            sys.stdout = sys.stderr = file
            yield
    finally:
        sys.stdout, sys.stderr = streams
        for number, one in zip((1, 2), kept, strict=True):
            os.dup2(one, number)
            os.close(one)
        os.close(descriptor)
        logging.disable(level)
