"""The files of `output_dir/privacy`: `report.json` for programs, `statement.md` for people, and audits beside them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_dpopt.common.durable import read_whole, write_durably
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.report import audits
from hf_dpopt.report.facts import RunFacts
from hf_dpopt.report.statement import render_statement

FOLDER = "privacy"
REPORT = "report.json"
STATEMENT = "statement.md"


def write_report(output_dir: str | os.PathLike[str], facts: RunFacts) -> Path:
    """Write both files, each whole or not at all, over those of an earlier report.

    Args:
        output_dir: folder of the run; the folder `privacy` is made in it.
        facts: the facts of the run.

    Returns:
        The folder of the two files.
    """
    folder = Path(output_dir) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    text = facts.to_json()
    # of what a reader gets back, so that he can compare: JSON sorts the options of a preconditioner
    write_durably(folder / STATEMENT, statement_in(folder, RunFacts.from_json(text)).encode(), mode=0o644)
    write_durably(folder / REPORT, text.encode(), mode=0o644)
    return folder


def statement_in(folder: Path, facts: RunFacts) -> str:
    """The statement of a run with what the audits in its folder found; of a damaged file of audits, without it."""
    try:
        return render_statement(facts) + audits.section(folder, facts)
    except DPConfigError:  # a run that writes its report does not end because of it: `hf-dpopt verify` tells
        return render_statement(facts)


def add_audit(output_dir: str | os.PathLike[str], kind: str, found: Mapping[str, Any]) -> Path:
    """Write an audit of a run beside its report, and into its statement.

    Args:
        output_dir: folder of the run.
        kind: `audits.INSTALLATION` or `audits.CANARIES`; an earlier audit of its kind is replaced.
        found: plain values that may be published; the state of the ledger is added.

    Returns:
        The file of the audits.

    Raises:
        DPConfigError: if there is no report, or a file of audits that was damaged.
    """
    folder, facts = Path(output_dir) / FOLDER, read_report(output_dir)
    content = audits.read_audits(folder) | {kind: {**found, "ledger_digest": facts.ledger_digest}}
    text = json.dumps(content, indent=2, sort_keys=True) + "\n"
    write_durably(folder / audits.AUDIT, text.encode(), mode=0o644)
    write_durably(folder / STATEMENT, statement_in(folder, facts).encode(), mode=0o644)
    return folder / audits.AUDIT


def read_report(output_dir: str | os.PathLike[str]) -> RunFacts:
    """The facts of a run that has written its report.

    Raises:
        DPConfigError: if there is none, if it was damaged, or if it was written by another version.
    """
    path = Path(output_dir) / FOLDER / REPORT
    if not os.path.lexists(path):
        raise DPConfigError(f"There is no {path}. Give the output_dir of a private run that has saved its model.")
    facts = RunFacts.from_json(read_whole(path).decode(errors="replace"))
    try:
        render_statement(facts)
    except Exception as error:  # whatever a plan that was edited does to its reader
        raise DPConfigError(
            f"{path} was damaged or edited: its plan says nothing that can be stated ({type(error).__name__}: "
            f"{error}). Put the file back; what the run cost is in the ledger beside it."
        ) from error
    return facts
