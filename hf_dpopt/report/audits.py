"""Audits of a run beside its report: `privacy/audit.json`, and the section of the statement that says what they found.

An audit is of the state of the ledger that it names. After further steps it is no longer shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_dpopt.common.durable import parse_json, read_whole
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.report.facts import RunFacts
from hf_dpopt.report.statement import fill_joined

AUDIT = "audit.json"
INSTALLATION, CANARIES = "installation", "canaries"  # kinds of audits, one of each
QUOTED = {INSTALLATION: "independent", CANARIES: "one_run"}  # the bound that stands in the statement


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


def section(folder: Path, facts: RunFacts) -> str:
    """Section of the statement on the audits of this state of the run, in Markdown; empty without any."""
    found = read_audits(folder).items()
    audits = {kind: one for kind, one in found if one.get("ledger_digest") == facts.ledger_digest}
    return "\n" + _section(audits) if audits else ""


def _section(audits: Mapping[str, Mapping[str, Any]]) -> str:
    return fill_joined("report/audits.md.j2", audits=audits, quoted_bounds=QUOTED)
