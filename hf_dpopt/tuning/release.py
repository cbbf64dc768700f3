"""Release of the best run of a tuning: its files, and nothing that tells of the others."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

from hf_dpopt.common.durable import fsync_tree, make_folder, write_durably
from hf_dpopt.report.report import read_report
from hf_dpopt.tuning.search import Best

TUNING = "tuning.json"  # in output_dir
# Names that carry times, or paths in the private folder; and what only a run that goes on needs.
LEFT = ("training_args.bin", "trainer_state.json", "train_results.json", "all_results.json", "runs", "_journal")
LEFT_ENDS = (".lock", ".log", ".tmp")
LEFT_BEGINNINGS = ("checkpoint-", "_unfinished", "_torn", "events.out")


@dataclasses.dataclass(frozen=True)
class Winner:
    """Outcome of a tuning.

    Attributes:
        options: those of the best run.
        score: its score.
        epsilon, delta: guarantee of the whole tuning.
        run_epsilon: epsilon of the run, had it been the only one.
    """

    options: dict[str, Any]
    score: float
    epsilon: float
    delta: float
    run_epsilon: float


def release(best: Best, output_dir: Path, *, metric: str) -> Winner:
    """Copy the best run to `output_dir`, with times of now, and say which options it had.

    Args:
        best: the run.
        output_dir: folder to release it in.
        metric: name of its score.
    """
    facts = read_report(best.candidate.folder)
    output_dir.mkdir(parents=True, exist_ok=True)
    _copy(best.candidate.folder, output_dir)
    found = Winner(
        options=dict(best.candidate.options),
        score=best.score,
        epsilon=facts.epsilon,
        delta=facts.delta,
        run_epsilon=float(facts.plan["run_epsilon"]),
    )
    said = dataclasses.asdict(found) | {"metric": metric, "tuned": facts.plan["tuned"]}
    write_durably(output_dir / TUNING, (json.dumps(said, indent=2, sort_keys=True) + "\n").encode(), mode=0o644)
    fsync_tree(output_dir)
    return found


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
