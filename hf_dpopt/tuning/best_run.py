"""Release of the best run of a tuning: its files, and nothing that tells of the others."""

from __future__ import annotations

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
