"""Ledger of private evaluations: each is charged on the disk before a record is looked at, its answer after.

``output_dir/privacy/evaluations.jsonl``, one JSON record a line, each with the digest of the one before. It holds
public values only. The answer for weights that were evaluated before is read from here: it is no second release.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hf_dpopt.common.durable import fsync_directory, read_whole
from hf_dpopt.common.errors import DPBudgetExceeded, DPConfigError
from hf_dpopt.common.json_text import parse_json
from hf_dpopt.common.locks import FileLock, LockHeld, open_plain
from hf_dpopt.common.storage import naming
from hf_dpopt.plan.evaluation import EvaluationBudget, epsilon_of

EVALUATIONS = Path("privacy") / "evaluations.jsonl"  # in the output_dir of a run
GENESIS = "0" * 64
CHARGE, ANSWER = "charge", "answer"


@dataclasses.dataclass(frozen=True)
class Evaluations:
    """Evaluations that were charged, as they lie on the disk.

    Args:
        records: charges and answers, in order.
        digest: SHA-256 of the last one.
    """

    records: tuple[Mapping[str, Any], ...]
    digest: str

    @classmethod
    def read(cls, output_dir: str | os.PathLike[str]) -> Evaluations:
        """Read and check the file; none is no evaluation. A last line without its end was not charged.

        Raises:
            DPConfigError: if a record was changed.
        """
        path = Path(output_dir) / EVALUATIONS
        if not os.path.lexists(path):
            return cls((), GENESIS)
        found: list[Mapping[str, Any]] = []
        digest, lines = GENESIS, read_whole(path).split(b"\n")
        for number, line in enumerate(lines[:-1], start=1):
            record = _parsed(line)
            body = {name: value for name, value in record.items() if name != "sha256"}
            if record.get("prev") != digest or record.get("sha256") != _digest(body):
                raise DPConfigError(
                    f"{path}, line {number}, was changed: what evaluations cost is not known any more. Put the "
                    "original file back; without it the evaluation set has no guarantee."
                )
            digest = record["sha256"]
            found.append(record)
        return cls(tuple(found), digest)

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
        charges = {
            record["sha256"] for record in self.records if record["type"] == CHARGE and record["query"] == query
        }
        answers = [record["metrics"] for record in self.records if record["type"] == ANSWER]
        of = [record["charge"] for record in self.records if record["type"] == ANSWER]
        return next((dict(metrics) for metrics, charge in zip(answers, of, strict=True) if charge in charges), None)

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
    with _alone(Path(output_dir)):
        before = Evaluations.read(output_dir)
        noise = budget.noise_multiplier
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
        return _append(output_dir, before.digest, charged)


def note_answer(output_dir: str | os.PathLike[str], charged: str, metrics: Mapping[str, float]) -> None:
    """Write down what was released for a charge."""
    with _alone(Path(output_dir)):
        before = Evaluations.read(output_dir)
        _append(output_dir, before.digest, {"type": ANSWER, "charge": charged, "metrics": dict(metrics)})


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        record = parse_json(line)
    except ValueError:
        return {}
    return record if isinstance(record, dict) else {}


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _append(output_dir: str | os.PathLike[str], prev: str, record: Mapping[str, Any]) -> str:
    body = {**record, "prev": prev}
    digest, path = _digest(body), Path(output_dir) / EVALUATIONS
    line = json.dumps({**body, "sha256": digest}, sort_keys=True, separators=(",", ":")).encode() + b"\n"
    is_new = not path.exists()
    descriptor = open_plain(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        whole = os.fstat(descriptor).st_size
        content = os.pread(descriptor, whole, 0)
        end = content.rfind(b"\n") + 1  # a crash may have left a part of a line
        with naming(path):
            os.ftruncate(descriptor, end)
            if os.pwrite(descriptor, line, end) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if is_new:
        fsync_directory(path.parent)
    return digest


@contextlib.contextmanager
def _alone(output_dir: Path) -> Iterator[None]:
    path = output_dir / EVALUATIONS
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock.take(path.with_name(path.name + ".lock"), mode=0o644)
    except LockHeld as error:
        raise DPConfigError(
            f"Another process ({error}) is charging an evaluation in {path}. Evaluate one after the other."
        ) from None
    try:
        yield
    finally:
        lock.close()
