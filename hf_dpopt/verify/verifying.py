"""All checks of one folder, in order; a check that the others rest on ends those that need it."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.verify import claims, files
from hf_dpopt.verify.chain import LedgerFile, read_ledger
from hf_dpopt.verify.claims import Report
from hf_dpopt.verify.epsilons import check_attackers, check_epsilons
from hf_dpopt.verify.head import verify_head
from hf_dpopt.verify.outcome import FAILED, OK, Check, Contradiction, Outcome, Unknown, attempt
from hf_dpopt.verify.reading import Fields, read_regular, strict_json

FOLDER, REPORT, HEAD, LEDGER, STATEMENT = "privacy", "report.json", "head.json", "ledger.jsonl", "statement.md"
AUDIT = "audit.json"
CLAIMS: dict[str, Callable[[Report], str]] = {
    "private": claims.check_is_private,
    "ledger digest": claims.check_digest,
    "steps": claims.check_steps,
    "plan": claims.check_plan,
    "unit": claims.check_unit,
    "delta": claims.check_delta,
    "sampler": claims.check_sampler,
    "sensitivity": claims.check_sensitivity,
    "preconditioner": claims.check_preconditioner,
}


def verify(path: Path) -> Outcome:
    """Verify the claim of a run.

    Args:
        path: the `output_dir` of a run, its folder `privacy`, or the report in it.

    Raises:
        DPConfigError: if there is no report.
    """
    place = _report_at(path)
    try:
        fields = Fields(strict_json(read_regular(place)), "the report")
    except Contradiction as error:
        return Outcome((Check("report", FAILED, str(error)),))
    read: list[LedgerFile] = []
    checks = attempt("ledger chain", lambda: _read(place.parent / LEDGER, read))
    report = Report(fields, read[0] if read else None)
    if place.name == HEAD:
        return Outcome((*checks, *verify_head(report, place.parent / STATEMENT)))
    return Outcome((*checks, *_verify_run(report, place.parent)))


def _report_at(path: Path) -> Path:
    for folder in (path / FOLDER, path):
        for name in (REPORT, HEAD):
            if (folder / name).is_file():
                return folder / name
    if path.is_file() and path.suffix == ".json":
        return path
    raise DPConfigError(f"There is no report of a private run at {path}. Give its output_dir, or its folder privacy.")


def _read(path: Path, read: list[LedgerFile]) -> str:
    read.append(ledger := read_ledger(path))
    torn = f"; {ledger.num_torn} bytes of a record that was not finished" if ledger.num_torn else ""
    return f"{len(ledger.digests)} records, each with its digest and that of the one before{torn}"


def _verify_run(report: Report, folder: Path) -> list[Check]:
    checks = attempt("report", lambda: claims.check_form(report))
    if checks[0].status != OK:
        return checks
    looks: dict[str, Callable[[Report], str]] = dict(CLAIMS)
    if report.plan.has("private_metrics"):
        looks["private metrics"] = claims.check_private_metrics
    looks["versions"] = claims.check_versions
    for name, look in looks.items():
        checks += attempt(name, partial(look, report))
    checks += check_epsilons(report)
    output_dir = folder.parent if folder.name == FOLDER else None
    statement, audits = folder / STATEMENT, folder / AUDIT
    more: dict[str, Callable[[], str]] = {}
    if report.fields.content.get("meaning"):
        more["attackers"] = lambda: check_attackers(report)
    if report.plan.has("earlier_runs"):
        more["earlier runs"] = lambda: _of_earlier(report)
    more["released files"] = lambda: files.check_released(report, output_dir)
    more["statement"] = lambda: files.check_text(statement, report)
    if os.path.lexists(audits):
        more["audits"] = lambda: files.check_audits(audits, statement, report)
    if output_dir is not None and (card := output_dir / "README.md").is_file():
        more["model card"] = lambda: files.check_text(card, report, is_card=True)
    return checks + [check for name, look in more.items() for check in attempt(name, look)]


def _of_earlier(report: Report) -> str:
    raise Unknown(f"{len(report.earlier)} are included as the report describes them; verify the folder of each")
