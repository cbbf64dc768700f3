"""The files of `output_dir/privacy`: `report.json` for programs, `statement.md` for people, and audits beside them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_dpopt.common.durable import parse_json, read_whole, write_durably
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.report.facts import RunFacts
from hf_dpopt.report.statement import fill_joined, render_statement

FOLDER = "privacy"
REPORT = "report.json"
STATEMENT = "statement.md"
AUDIT = "audit.json"
INSTALLATION, CANARIES = "installation", "canaries"  # kinds of audits, one of each
QUOTED = {INSTALLATION: "independent", CANARIES: "one_run"}  # the bound that stands in the statement


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
        return render_statement(facts) + audit_section(folder, facts)
    except DPConfigError:  # a run that writes its report does not end because of it: `hf-dpopt verify` tells
        return render_statement(facts)


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


# --- audits: each is of the state of the ledger that it names, and is no longer shown after further steps ------------


def add_audit(output_dir: str | os.PathLike[str], kind: str, found: Mapping[str, Any]) -> Path:
    """Write an audit of a run beside its report, and into its statement.

    Args:
        output_dir: folder of the run.
        kind: `INSTALLATION` or `CANARIES`; an earlier audit of its kind is replaced.
        found: plain values that may be published; the state of the ledger is added.

    Returns:
        The file of the audits.

    Raises:
        DPConfigError: if there is no report, or a file of audits that was damaged.
    """
    folder, facts = Path(output_dir) / FOLDER, read_report(output_dir)
    content = read_audits(folder) | {kind: {**found, "ledger_digest": facts.ledger_digest}}
    text = json.dumps(content, indent=2, sort_keys=True) + "\n"
    write_durably(folder / AUDIT, text.encode(), mode=0o644)
    write_durably(folder / STATEMENT, statement_in(folder, facts).encode(), mode=0o644)
    return folder / AUDIT


def read_audits(folder: Path) -> dict[str, dict[str, Any]]:
    """The audits in a folder `privacy`, by kind; empty if there was none.

    Raises:
        DPConfigError: for a file that no audit wrote, of which no section can be made.
    """
    path = folder / AUDIT
    if not path.exists():
        return {}
    try:
        found = dict(parse_json(read_whole(path).decode(errors="replace")).items())
        _section(found)
    except Exception as error:  # whatever an entry that was edited does to the template
        raise DPConfigError(
            f"{path} was damaged or edited ({type(error).__name__}: {error}). Remove it and audit again."
        ) from error
    return found


def audit_section(folder: Path, facts: RunFacts) -> str:
    """Section of the statement on the audits of this state of the run, in Markdown; empty without any."""
    found = read_audits(folder).items()
    audits = {kind: one for kind, one in found if one.get("ledger_digest") == facts.ledger_digest}
    return "\n" + _section(audits) if audits else ""


def _section(audits: Mapping[str, Mapping[str, Any]]) -> str:
    return fill_joined("report/audits.md.j2", audits=audits, quoted_bounds=QUOTED)
