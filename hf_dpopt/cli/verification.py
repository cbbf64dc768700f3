"""`hf-dpopt verify`: whether what a run claims follows from what it published."""

from __future__ import annotations

from pathlib import Path

import typer

from hf_dpopt.cli.show import print_json
from hf_dpopt.common.durable import write_durably
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.verify import verify


def show_verification(path: Path, *, is_strict: bool, as_json: bool, marks_card: bool = False) -> int:
    """Print a line for every check, and the verdict; return the exit code.

    Args:
        path: `output_dir` of a run, its folder `privacy`, or the report in it.
        is_strict: whether a check that could not be made counts as a failure.
        as_json: whether to print JSON for programs.
        marks_card: whether the card in `path` shall say so where everything is verified.
    """
    outcome = verify(path)
    code = outcome.exit_code(is_strict=is_strict)
    if marks_card and code == 0:
        _mark(path / "README.md")
    if as_json:
        print_json({"path": str(path), "exit_code": code, **outcome.public_dict()})
        return code
    for check in outcome.checks:
        typer.echo(str(check))
    typer.echo(outcome.verdict)
    return code


def _mark(card: Path) -> None:
    from hf_dpopt.report.model_card import mark_verified  # it imports torch, which verification does without

    if not card.is_file():
        raise DPConfigError(f"There is no {card} to mark. Give the output_dir of the run, or leave --mark_card out.")
    text = card.read_text(encoding="utf-8")
    write_durably(card, mark_verified(text).encode(), mode=0o644)
