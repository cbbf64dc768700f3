"""Audits of a run beside its report: `privacy/audit.json`, and the section of the statement that says what they found.

An audit is of the state of the ledger that it names. After further steps it is no longer shown.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_dpopt.common.durable import read_whole, write_durably
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.json_text import parse_json
from hf_dpopt.report.facts import RunFacts
from hf_dpopt.report.statement import fill_joined

AUDIT = "audit.json"
INSTALLATION, CANARIES = "installation", "canaries"  # kinds of audits, one of each
QUOTED = {INSTALLATION: "independent", CANARIES: "one_run"}  # the bound that stands in the statement
KINDS: dict[str, Any] = {
    "claimed_epsilon": (int, float), "delta": (int, float), "confidence": (int, float), "passed": bool,
    "num_canaries": int, "num_steps": int, "ledger_digest": str, "lower_bounds": dict,
}  # fmt: skip


def read_audits(folder: Path) -> dict[str, dict[str, Any]]:
    """The audits in a folder `privacy`, by kind; empty if there was none.

    Raises:
        DPConfigError: for a file that no audit wrote.
    """
    path = folder / AUDIT
    if not path.exists():
        return {}
    try:
        found = parse_json(read_whole(path).decode(errors="replace"))
        for kind, audit in found.items():
            _check(kind, audit)
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise DPConfigError(
            f"{path} was damaged or edited ({type(error).__name__}: {error}). Remove it and audit again."
        ) from error
    return dict(found)


def write_audit(folder: Path, kind: str, found: Mapping[str, Any]) -> None:
    """Write an audit beside the report, over an earlier one of its kind.

    Args:
        folder: the folder `privacy` of a run.
        kind: `INSTALLATION` or `CANARIES`.
        found: what `section` names, and more: plain values that may be published.

    Raises:
        DPConfigError: for a file there that no audit wrote.
    """
    _check(kind, found)
    content = read_audits(folder) | {kind: dict(found)}
    write_durably(folder / AUDIT, (json.dumps(content, indent=2, sort_keys=True) + "\n").encode(), mode=0o644)


def section(folder: Path, facts: RunFacts) -> str:
    """Section of the statement on the audits of this state of the run, in Markdown; empty without any."""
    audits = {kind: one for kind, one in read_audits(folder).items() if one["ledger_digest"] == facts.ledger_digest}
    if not audits:
        return ""
    return "\n" + fill_joined("report/audits.md.j2", audits=audits, quoted_bounds=QUOTED)


def _check(kind: str, audit: Mapping[str, Any]) -> None:
    for name, types in KINDS.items():
        if name == "num_steps" and kind == CANARIES:
            continue
        value = audit[name]
        if not isinstance(value, types) or (isinstance(value, bool) and types is not bool):
            raise ValueError(f"{name}={value!r:.40}")
    if not isinstance(audit["lower_bounds"][QUOTED[kind]], (int, float)):
        raise ValueError("lower_bounds")
