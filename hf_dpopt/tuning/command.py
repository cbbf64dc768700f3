"""Runs of a tuning as processes: a training command, to which each run adds its options."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_dpopt.accounting.best_of_runs import RunCount
from hf_dpopt.common.errors import DPConfigError, shown
from hf_dpopt.run.dataset_ledger import DatasetBudget
from hf_dpopt.tuning.search import Candidate, RunFailed
from hf_dpopt.tuning.space import REFUSED, SET_BY_TUNING, Space

USAGE_ERROR = 2  # of a recipe that refuses its options
RESULTS = "eval_results.json"  # as `Trainer.save_metrics("eval", ..)` writes it
DECLARED = ("public", "not_protected")  # of "private" data every run would spend the budget, and the choice more


class Command:
    """A command that trains, evaluates and saves, as the recipes do.

    Args:
        words: the command.
        law: law of the number of runs.
        target_epsilon: budget of the whole tuning.
        metric: score, as it stands in ``eval_results.json``.
        dataset: ledger of the people in the data; None for none.

    Raises:
        DPConfigError: for a command that is none, has options that the tuning sets, or says nothing of the evaluation
            data.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        law: RunCount,
        target_epsilon: float,
        metric: str,
        dataset: DatasetBudget | None = None,
    ):
        self.words, self.metric = list(words), metric
        self._set: dict[str, Any] = {"target_epsilon": target_epsilon, "tuned_runs": law.mean, "report_to": "none"}
        if dataset is not None:
            self._set |= {"privacy_ledger": os.path.abspath(dataset.path)}
            self._set |= {} if dataset.epsilon is None else {"privacy_ledger_epsilon": dataset.epsilon}
        self._check()

    def _check(self) -> None:
        if not self.words:
            raise DPConfigError("There is no command to tune. Add it behind --, such as: -- python recipes/glue.py ..")
        if shutil.which(self.words[0]) is None:
            raise DPConfigError(
                f"The command begins with {shown(self.words[0])}, which is no program here. Use one, such as: "
                "-- python recipes/glue.py .."
            )
        given = _flags(self.words)
        for name in (*SET_BY_TUNING, *REFUSED):
            if name in given:
                raise DPConfigError(
                    f"--{name} in the command: the tuning sets it for every run, or it has no place in one. Leave it "
                    "out; the budget is --epsilon of the tuning."
                )
        if not self.metric.startswith("eval_"):
            raise DPConfigError(
                f"--metric {self.metric} is no score on evaluation data, whose names begin with eval_. The "
                "training loss is exact and private: choosing by it would not be covered."
            )
        declared = given.get("eval_data_privacy")
        if declared == "private":
            raise DPConfigError(
                "--eval_data_privacy private in the command: each run would spend eval_target_epsilon, and what the "
                "choice costs the people in the evaluation set is not accounted for. Use public data for the score."
            )
        if declared not in DECLARED:
            raise DPConfigError(
                "The score is computed on the evaluation data, and the command does not say whose they are. Add "
                "--eval_data_privacy public, or not_protected: choosing then tells something of them."
            )

    def train(self, candidate: Candidate) -> float:
        """Train a run, or go on with it, and read its score.

        Raises:
            RunFailed: if it ended with an error, or wrote no score.
            DPConfigError: if it was refused, or ended, before it took a step.
        """
        options = {**candidate.options, **self._set}
        options |= {"output_dir": candidate.folder, "private_state_dir": candidate.keys}
        if "privacy_ledger" in options:
            options["privacy_ledger_entry"] = candidate.entry
        if candidate.has_begun:
            options["resume_from_checkpoint"] = True
        words = [*self.words, *(word for name, value in options.items() for word in (f"--{name}", str(value)))]
        descriptor = os.open(candidate.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "wb") as log:
            code = _wait(
                subprocess.Popen(  # the user's own command
                    words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, umask=0o077
                )
            )
        if code == USAGE_ERROR and not candidate.has_charged:
            raise DPConfigError(
                f"The command was refused before it took a step: {_last_line(candidate.log)} Nothing was charged by "
                "this run. Correct it and start again; with another command, in another output_dir."
            )
        if not candidate.has_charged:
            raise DPConfigError(
                f"The command ended with exit code {code}, and no private run took a step in the --output_dir that it "
                f"was given. Nothing was charged by it. What it printed is in {candidate.log}, which is private. "
                "Correct it and start again; with another command, in another output_dir."
            )
        if code != 0:
            raise RunFailed
        return _score(candidate.folder / RESULTS, self.metric)

    def public_dict(self) -> dict[str, Any]:
        """Plain JSON values, which a tuning that goes on has to share with the one that began."""
        return {"command": self.words, "metric": self.metric, "set": {n: str(v) for n, v in self._set.items()}}


def check_space(space: Space, words: Sequence[str]) -> None:
    """Refuse a space with options that the command fixes.

    Raises:
        DPConfigError: naming them.
    """
    both = sorted(space.options.keys() & _flags(words).keys())
    if both:
        raise DPConfigError(f"{', '.join(both)} are in the space and in the command. Leave them out of one.")


def _flags(words: Sequence[str]) -> dict[str, str]:
    """Options of a command: name -> the word behind it, or behind its equals sign."""
    found = {}
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.startswith("--") and len(word) > 2:
            name, is_joined, value = word[2:].partition("=")
            found[name.replace("-", "_")] = value if is_joined else following
    return found


def _wait(process: subprocess.Popen) -> int:
    """Exit code of a run; one that is still going on when this process is interrupted is ended."""
    try:
        return process.wait()
    except BaseException:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        raise


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing."


def _score(path: Path, metric: str) -> float:
    try:
        found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return float(found[metric])
    except (OSError, ValueError, KeyError, TypeError):
        raise RunFailed from None
