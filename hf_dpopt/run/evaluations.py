"""Ledger of private evaluations: each is charged on the disk before a record is looked at, its answer after.

``output_dir/privacy/evaluations.jsonl`` is a `hf_dpopt.common.chained.ChainedFile` of public values. The answer for
weights that were evaluated before is read from here: that is not a second release.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_dpopt.common.chained import ChainedFile
from hf_dpopt.common.durable import make_folder
from hf_dpopt.common.errors import DPBudgetExceeded, DPConfigError
from hf_dpopt.plan.evaluation import EvaluationBudget, epsilon_of

EVALUATIONS = Path("privacy") / "evaluations.jsonl"  # in the output_dir of a run
CHARGE, ANSWER = "charge", "answer"


class Evaluations:
    """Evaluations that were charged, as they lie on the disk; made by `read`."""

    def __init__(self, file: ChainedFile):
        """Use `Evaluations.read`."""
        self.records, self.digests, self.digest = file.records, file.digests, file.digest
        if any(record.get("type") not in (CHARGE, ANSWER) for record in self.records):
            raise DPConfigError(f"{file.path} is not a ledger of evaluations. Put the original file back.")

    @classmethod
    def read(cls, output_dir: str | os.PathLike[str]) -> Evaluations:
        """Read and verify the file; no file is no evaluation.

        Raises:
            DPConfigError: if a record was changed.
        """
        path = Path(output_dir) / EVALUATIONS
        return cls(ChainedFile.read(path) if os.path.lexists(path) else ChainedFile(path))

    @property
    def noise_multipliers(self) -> tuple[float, ...]:
        """Noise multiplier of every evaluation that was charged."""
        return tuple(float(record["noise_multiplier"]) for record in self.records if record["type"] == CHARGE)

    def epsilon(self, delta: float, adjacency: str) -> float:
        """Epsilon of all of them.

        Raises:
            DPConfigError: if one was made under another adjacency, for which its noise says something else.
        """
        others = {record["adjacency"] for record in self.records if record["type"] == CHARGE} - {adjacency}
        if others:
            raise DPConfigError(
                f"adjacency={adjacency!r} is not that of earlier evaluations, {', '.join(map(repr, sorted(others)))}: "
                "their noise was made for another change of the evaluation set. Use the same adjacency, or another "
                "output_dir."
            )
        return epsilon_of(self.noise_multipliers, delta, adjacency)

    def answer(self, query: Mapping[str, Any]) -> dict[str, float] | None:
        """Metrics that were released for the same query: set, scores and weights; None if there are none."""
        asked = {"type": CHARGE, "query": query}
        charges = {
            digest
            for record, digest in zip(self.records, self.digests, strict=True)
            if {name: record.get(name) for name in asked} == asked
        }
        answers = (record for record in self.records if record["type"] == ANSWER and record["charge"] in charges)
        return next((dict(record["metrics"]) for record in answers), None)

    def facts(self, budget: EvaluationBudget) -> dict[str, Any]:
        """Public facts for the report."""
        spent = self.epsilon(budget.delta, budget.adjacency)
        return {
            **budget.parameters(),
            "noise_multiplier": min(self.noise_multipliers, default=budget.noise_multiplier),
            "target_epsilon": max(budget.target_epsilon, spent),  # earlier runs here may have had a larger one
            "num_charged": len(self.noise_multipliers),
            "epsilon_spent": spent,
            "digest": self.digest,
        }


def charge(output_dir: str | os.PathLike[str], budget: EvaluationBudget, query: Mapping[str, Any]) -> str:
    """Charge an evaluation, on the disk; return the digest of the charge.

    Args:
        output_dir: folder of the run.
        budget: what the evaluation sets may cost, and the noise.
        query: what is asked: public values.

    Raises:
        DPBudgetExceeded: if all evaluations would cost more than the budget. Nothing is charged then.
        DPConfigError: if another process is charging, the file was changed, or is of another adjacency.
    """
    with _writing(output_dir) as file:
        before, noise = Evaluations(file), budget.noise_multiplier
        before.epsilon(budget.delta, budget.adjacency)  # of one adjacency
        spent = epsilon_of([*before.noise_multipliers, noise], budget.delta, budget.adjacency)
        if spent > budget.target_epsilon * (1 + 1e-9):
            raise DPBudgetExceeded(
                f"{len(before.noise_multipliers)} evaluations of the private evaluation set were charged, and another "
                f"would bring their epsilon to {spent:.4g}, above eval_target_epsilon={budget.target_epsilon:g}. "
                "Evaluate less often (--eval_steps), plan for more from the start (--eval_times), or raise "
                "--eval_target_epsilon."
            )
        charged = {"type": CHARGE, "noise_multiplier": noise, "adjacency": budget.adjacency, "query": dict(query)}
        file.append(charged)
        return file.digest


def note_answer(output_dir: str | os.PathLike[str], charged: str, metrics: Mapping[str, float]) -> None:
    """Write down what was released for a charge."""
    with _writing(output_dir) as file:
        file.append({"type": ANSWER, "charge": charged, "metrics": dict(metrics)})


def _writing(output_dir: str | os.PathLike[str]) -> contextlib.AbstractContextManager[ChainedFile]:
    path = Path(output_dir) / EVALUATIONS
    make_folder(path.parent)
    return ChainedFile.writing(path)
