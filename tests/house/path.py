"""Statements of the package that a default run executes, of all: `python -m tests.house.path [--files]`.

A default run is `DPTrainer` on a small classifier with `target_epsilon` alone: planned, self-checked, trained for two
steps, saved, and reported. Statements of module level count as executed where the module is imported.
"""

from __future__ import annotations

import ast
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = Path(__file__).resolve().parents[2] / "hf_dpopt"


def statements(path: Path) -> dict[int, int]:
    """First line of each statement -> statements that begin there; docstrings do not count."""
    lines: dict[int, int] = {}
    for node in ast.walk(ast.parse(path.read_text())):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.stmt) and not is_text:
            lines[node.lineno] = lines.get(node.lineno, 0) + 1
    return lines


def run_by_default(folder: str) -> None:
    """Train and report as a first user does."""
    from hf_dpopt import DPTrainer, DPTrainingArguments
    from tests.helpers import tiny

    args = DPTrainingArguments(
        output_dir=f"{folder}/out", private_state_dir=f"{folder}/keys", target_epsilon=8, num_train_epochs=2,
        per_device_train_batch_size=8, use_cpu=True, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = DPTrainer(tiny.model(), args, train_dataset=tiny.records(), data_collator=tiny.collate)
    trainer.train()
    trainer.save_model()


def main(argv: list[str]) -> None:
    """Print statements executed and all, of the package or file by file."""
    seen: dict[str, set[int]] = {}

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        lines = seen.setdefault(frame.f_code.co_filename, set())
        lines.add(frame.f_lineno)

        def line(inner: FrameType, what: str, value: Any) -> Any:
            lines.add(inner.f_lineno)
            return line

        return line

    def called(frame: FrameType, event: str, arg: Any) -> Any:
        return trace(frame, event, arg) if frame.f_code.co_filename.startswith(str(PACKAGE)) else None

    sys.settrace(called)
    with tempfile.TemporaryDirectory() as folder:
        run_by_default(folder)
    sys.settrace(None)
    rows = []
    for path in sorted(PACKAGE.rglob("*.py")):
        lines = statements(path)
        executed = seen.get(str(path), set())
        rows.append((sum(n for line, n in lines.items() if line in executed), sum(lines.values()), path))
    if "--files" in argv:
        for done, whole, path in sorted(rows, reverse=True):
            print(f"{done:6} of {whole:6}  {path.relative_to(PACKAGE)}")
    files = sum(done > 0 for done, _, _ in rows)
    print(
        f"A default run executes {sum(row[0] for row in rows):,} of {sum(row[1] for row in rows):,} statements, "
        f"in {files} of {len(rows)} files."
    )


if __name__ == "__main__":
    main(sys.argv[1:])
