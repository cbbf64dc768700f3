"""All checks of one folder, in order; a check that the others rest on ends those that need it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.verify import claims, files
from hf_dpopt.verify.chain import LedgerFile, read_ledger
from hf_dpopt.verify.claims import Report
from hf_dpopt.verify.epsilons import check_attackers, check_epsilons
from hf_dpopt.verify.head_claims import verify_head
from hf_dpopt.verify.outcome import FAILED, OK, Check, Contradiction, Outcome, attempt
from hf_dpopt.verify.reading import Fields, read_regular, strict_json

FOLDER, REPORT, HEAD, LEDGER, STATEMENT = "privacy", "report.json", "head.json", "ledger.jsonl", "statement.md"
AUDIT = "audit.json"


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
    output_dir = folder.parent if folder.name == FOLDER else None
    statement = folder / STATEMENT
    looks: dict[str, Callable[[], str | list[Check]]] = {
        "private": lambda: claims.check_is_private(report),
        "ledger digest": lambda: claims.check_digest(report),
        "steps": lambda: claims.check_steps(report),
        "plan": lambda: claims.check_plan(report),
        "unit": lambda: claims.check_unit(report),
        "delta": lambda: claims.check_delta(report),
        "sampler": lambda: claims.check_sampler(report),
        "sensitivity": lambda: claims.check_sensitivity(report),
        "preconditioner": lambda: claims.check_preconditioner(report),
        "private metrics": lambda: claims.check_private_metrics(report),
        "versions": lambda: claims.check_versions(report),
        "epsilon": lambda: check_epsilons(report),
        "attackers": lambda: check_attackers(report),
        "earlier runs": lambda: claims.check_earlier(report),
        "released files": lambda: files.check_released(report, output_dir),
        "statement": lambda: files.check_text(statement, report),
        "audits": lambda: files.check_audits(folder / AUDIT, statement, report),
        "model card": lambda: files.check_card(output_dir, report),
    }
    return checks + [check for name, look in looks.items() for check in attempt(name, look)]
