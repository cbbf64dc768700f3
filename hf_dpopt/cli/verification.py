"""`hf-dpopt verify`: whether what a run claims follows from what it published."""

from __future__ import annotations

from pathlib import Path

import typer

from hf_dpopt.cli.show import print_json
from hf_dpopt.verify import verify


def show_verification(path: Path, *, is_strict: bool, as_json: bool) -> int:
    """Print a line for every check, and the verdict; return the exit code.

    Args:
        path: `output_dir` of a run, its folder `privacy`, or the report in it.
        is_strict: whether a check that could not be made counts as a failure.
        as_json: whether to print JSON for programs.
    """
    outcome = verify(path)
    code = outcome.exit_code(is_strict=is_strict)
    if as_json:
        print_json({"path": str(path), "exit_code": code, **outcome.public_dict()})
        return code
    for check in outcome.checks:
        typer.echo(str(check))
    typer.echo(outcome.verdict)
    return code
