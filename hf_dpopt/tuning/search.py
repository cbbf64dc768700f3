"""The runs of a tuning: how many, with which options, what became of each, and which is the best.

All of it is secret but the best run: it stays in a private folder, whose records are on the disk before a run starts.
A tuning that was interrupted goes on with the same number and the same options; a run that failed counts as one with
the worst score. So there are never more runs than were drawn, and what is released is the best of all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import random
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hf_dpopt.accounting.best_of_runs import RunCount
from hf_dpopt.common.chained import ChainedFile, canonical
from hf_dpopt.common.durable import fsync_tree, make_folder, write_durably
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.locks import FileLock, LockHeld
from hf_dpopt.plan.release import ReleaseRecord
from hf_dpopt.report.report import read_report
from hf_dpopt.run.keys import private_folder
from hf_dpopt.run.ledger import LEDGER, Ledger
from hf_dpopt.tuning.space import Space

VERSION = 2
FOLDER = "tuning"  # in the private folder of output_dir
MOST_STARTS = 5  # of one run; one that is killed as often counts as failed
# Entries of a run's plan that all runs share: they are what a run costs.
MECHANISM = (*ReleaseRecord.names(), "expected_batch_size", "delta", "noise_multiplier", "num_steps")


class RunFailed(Exception):
    """A run gave no score; it counts as one with the worst."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A run of a tuning: a random name that tells nothing of its place, and its options.

    Attributes:
        entry: name of the tuning in a ledger of the dataset, random: what is charged under one name counts once.
        folder: where it writes, in the private folder.
        keys: folder of its keys, beside it.
        log: file for whatever it prints.
    """

    name: str
    options: Mapping[str, Any]
    place: Path
    entry: str

    @property
    def folder(self) -> Path:
        """Folder that the run writes to."""
        return self.place / f"run-{self.name}"

    @property
    def keys(self) -> Path:
        """Folder of its keys."""
        return self.place / f"keys-{self.name}"

    @property
    def log(self) -> Path:
        """File of what it prints."""
        return self.place / f"run-{self.name}.log"

    @property
    def has_begun(self) -> bool:
        """Whether there is something to resume."""
        return (self.folder / LEDGER).exists()

    @property
    def has_charged(self) -> bool:
        """Whether a step was charged."""
        return self.has_begun and Ledger.read(self.folder / LEDGER).num_charged > 0


@dataclasses.dataclass(frozen=True)
class Best:
    """The run that is released."""

    candidate: Candidate
    score: float


class Tuning:
    """The random number of runs of one output_dir, from the first to the release of the best.

    Args:
        law: law of their number.
        space: law of their options.
        output_dir: where the best will be released; holds no run yet.
        private_dir: private folder; None for that of output_dir in the user's state directory.
        asked: whatever else fixes what a run is (command, budget, metric); a tuning goes on with the same alone.
        is_greater_better: whether the best score is the largest.

    Raises:
        DPConfigError: if the tuning was finished, is going on, or was begun with something else.
    """

    def __init__(
        self,
        *,
        law: RunCount,
        space: Space,
        output_dir: str | Path,
        private_dir: str | Path | None,
        asked: Mapping[str, Any],
        is_greater_better: bool = True,
    ):
        self.law, self.space, self.output_dir = law, space, Path(output_dir)
        if self.output_dir.exists() and not self.output_dir.is_dir():
            raise DPConfigError(f"output_dir={self.output_dir} is no folder. Choose another.")
        if (self.output_dir / LEDGER).exists():
            raise DPConfigError(
                f"output_dir={self.output_dir} holds a run; the best of a tuning is released there. Choose another."
            )
        self.place = private_folder(private_dir, output_dir) / FOLDER
        self.place.mkdir(mode=0o700, exist_ok=True)
        self._file = self.place / "tuning.jsonl"
        self._sign = 1.0 if is_greater_better else -1.0
        said = {"space": space.public_dict(), "law": law.public_dict(), "asked": dict(asked)}
        self._asked = json.loads(canonical(said | {"greater": is_greater_better}))

    def run(self, train: Callable[[Candidate], float]) -> Best | None:
        """Train all runs that are not done yet, and choose the best; None if none gave a score.

        Args:
            train: trains a run in `Candidate.folder` and gives its score; raises `RunFailed` if there is none. Any
                other error ends the tuning, which then goes on with that run when it is started again.
        """
        with self._locked():
            header = self._begin()
            scores = self._scores()
            entry = header["entry"]
            candidates = [Candidate(one["name"], one["options"], self.place, entry) for one in header["runs"]]
            for candidate in candidates:
                if candidate.name not in scores:
                    scores[candidate.name] = self._train(train, candidate)
            self._check_same_mechanism(candidates)
            found = [
                (self._sign * score, Best(one, score)) for one in candidates if (score := scores[one.name]) is not None
            ]
            return max(found, key=lambda pair: pair[0])[1] if found else None

    def finish(self) -> None:
        """Note that the best was released, and delete all else: runs, keys and logs."""
        self._add({"kind": "released"})
        for path in self.place.iterdir():
            if path.name.startswith(("run-", "keys-")):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            lock = FileLock.take(self.place / "tuning.lock", mode=0o600)
        except LockHeld as held:
            raise DPConfigError(f"This tuning is going on in process {held}. Wait for it, or end it.") from None
        try:
            yield
        finally:
            lock.close()

    def _begin(self) -> dict[str, Any]:
        """The first record: what was asked, and the runs, which are drawn now if the tuning begins."""
        with ChainedFile.writing(self._file, mode=0o600) as file:
            if not file.records:
                source = random.SystemRandom()
                runs = [
                    {"name": secrets.token_hex(8), "options": self.space.draw(source)}
                    for _ in range(self.law.draw(source))
                ]
                begun = {"kind": "tuning", "version": VERSION, "entry": f"tuning-{secrets.token_hex(8)}", "runs": runs}
                file.append(begun | self._asked)
            header, *rest = file.records
        if any(one["kind"] == "released" for one in rest):
            raise DPConfigError(
                f"The tuning of {self.output_dir} was finished and released. Another one is another tuning: choose "
                "another output_dir; its cost comes on top."
            )
        differing = [name for name, value in self._asked.items() if header.get(name) != value]
        if header.get("version") != VERSION or differing:
            raise DPConfigError(
                f"A tuning of {self.output_dir} was begun with another {', '.join(differing) or 'release'}. Go on "
                "with the same, or choose another output_dir for another tuning; what was spent stays spent."
            )
        return header

    def _scores(self) -> dict[str, float | None]:
        records = ChainedFile.read(self._file).records
        return {one["name"]: one["score"] for one in records if one["kind"] == "result"}

    def _train(self, train: Callable[[Candidate], float], candidate: Candidate) -> float | None:
        """Train one run, and note its score durably."""
        if Ledger.is_in_use(candidate.folder / LEDGER):
            raise DPConfigError(
                "A run of this tuning is still going on, in a process that was left over. Wait for it."
            )
        starts = sum(one.get("started") == candidate.name for one in ChainedFile.read(self._file).records)
        self._add({"kind": "start", "started": candidate.name})
        score: float | None = None
        if starts < MOST_STARTS:
            try:
                found = float(train(candidate))
                score = found if math.isfinite(found) else None
            except RunFailed:
                pass
            except DPConfigError:  # of the first run it tells nothing; of a later one, that there were so many
                if not self._scores():
                    raise
        self._add({"kind": "result", "name": candidate.name, "score": score})
        return score

    def _add(self, record: dict[str, Any]) -> None:
        with ChainedFile.writing(self._file, mode=0o600) as file:
            file.append(record)

    def _check_same_mechanism(self, candidates: list[Candidate]) -> None:
        """Refuse to release anything where runs cost different amounts: the plan is for one mechanism."""
        plans = [Ledger.read(one.folder / LEDGER).plan or {} for one in candidates if one.has_begun]
        for name in MECHANISM:
            if len({canonical({"": plan.get(name)}) for plan in plans}) > 1:
                raise DPConfigError(
                    f"Runs of this tuning differ in {name}, so they are no draws from one mechanism, and nothing can "
                    "be released. Leave out of the space what changes it."
                )
            if name == "tuned" and any(plan.get(name) != self.law.public_dict() for plan in plans):
                raise DPConfigError(
                    "Runs of this tuning were not planned as ones of several, so nothing can be released. The command "
                    "has to pass --tuned_runs on to DPTrainingArguments."
                )


# --- release of the best run: its files, and nothing that tells of the others ----------------------------------------


TUNING = "tuning.json"  # in output_dir
# Names that carry times, or paths in the private folder; and what only a run that goes on needs.
LEFT = ("training_args.bin", "trainer_state.json", "train_results.json", "all_results.json", "runs", "_journal")
LEFT_ENDS = (".lock", ".log", ".tmp")
LEFT_BEGINNINGS = ("checkpoint-", "_unfinished", "events.out")


def release(best: Best, output_dir: Path, *, metric: str) -> dict[str, Any]:
    """Copy the best run to `output_dir`, with times of now, and write which options it had.

    Args:
        best: the run.
        output_dir: folder to release it in.
        metric: name of its score.

    Returns:
        What is written: options and score of the run, epsilon and delta of the whole tuning, and
        `run_epsilon`, that of the run had it been the only one.
    """
    facts = read_report(best.candidate.folder)
    output_dir.mkdir(parents=True, exist_ok=True)
    _copy(best.candidate.folder, output_dir)
    said = {
        "options": dict(best.candidate.options),
        "score": best.score,
        "epsilon": facts.epsilon,
        "delta": facts.delta,
        "run_epsilon": float(facts.plan["run_epsilon"]),
        "metric": metric,
        "tuned": facts.plan["tuned"],
    }
    write_durably(output_dir / TUNING, (json.dumps(said, indent=2, sort_keys=True) + "\n").encode(), mode=0o644)
    fsync_tree(output_dir)
    return said


def _copy(source: Path, target: Path) -> None:
    """Copy what may be released, file by file, without times and permissions."""
    for path in sorted(source.iterdir()):
        is_left = path.name in LEFT or path.name.endswith(LEFT_ENDS) or path.name.startswith(LEFT_BEGINNINGS)
        if is_left or path.is_symlink():
            continue
        if path.is_dir():
            make_folder(target / path.name)
            _copy(path, target / path.name)
        else:
            (target / path.name).unlink(missing_ok=True)  # a link there would lead the copy to another file
            shutil.copyfile(path, target / path.name)
