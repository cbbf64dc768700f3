"""All checks of one folder, in order; a check that the others rest on ends those that need it."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.verify import claims, files, head
from hf_dpopt.verify.chain import LedgerFile, read_ledger
from hf_dpopt.verify.claims import Report
from hf_dpopt.verify.epsilons import check_epsilons, leaves_of
from hf_dpopt.verify.outcome import FAILED, OK, Check, Contradiction, Outcome, Unknown, attempt
from hf_dpopt.verify.profile import check_attackers
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
    report = _report_at(path)
    folder = report.parent
    output_dir = folder.parent if folder.name == FOLDER else None
    try:
        fields = Fields(strict_json(read_regular(report)), "the report")
    except Contradiction as error:
        return Outcome((Check("report", FAILED, str(error)),))
    checks: list[Check] = []
    ledger = _ledger(folder, checks)
    verify_one = head.verify_head if report.name == HEAD else _verify_run
    return Outcome((*checks, *verify_one(fields, ledger, folder, output_dir)))


def _report_at(path: Path) -> Path:
    for folder in (path / FOLDER, path):
        for name in (REPORT, HEAD):
            if (folder / name).is_file():
                return folder / name
    if path.is_file() and path.suffix == ".json":
        return path
    raise DPConfigError(f"There is no report of a private run at {path}. Give its output_dir, or its folder privacy.")


def _ledger(folder: Path, checks: list[Check]) -> LedgerFile | None:
    found: list[LedgerFile] = []

    def look() -> str:
        ledger = read_ledger(folder / LEDGER)
        found.append(ledger)
        torn = f"; {ledger.num_torn} bytes of a record that was not finished" if ledger.num_torn else ""
        return f"{len(ledger.digests)} records, each with its digest and that of the one before{torn}"

    checks.append(attempt("ledger chain", look))
    return found[0] if found else None


def _verify_run(fields: Fields, ledger: LedgerFile | None, folder: Path, output_dir: Path | None) -> list[Check]:
    report = Report(fields)
    checks = [attempt("report", lambda: claims.check_form(report))]
    if checks[0].status != OK:
        return checks
    against: dict[str, Callable[[LedgerFile], str]] = {
        "ledger digest": partial(claims.check_digest, report),
        "steps": partial(claims.check_steps, report),
        "plan": partial(claims.check_plan, report),
    }
    checks.append(attempt("private", lambda: claims.check_is_private(report, ledger)))
    for name, look in against.items():
        checks.append(attempt(name, partial(_of_ledger, look, ledger)))
    alone: dict[str, Callable[[Report], str]] = {
        "unit": claims.check_unit,
        "delta": claims.check_delta,
        "sampler": claims.check_sampler,
        "sensitivity at small scale": claims.check_brute_force,
        "sensitivity": claims.check_sensitivity,
        "preconditioner": claims.check_preconditioner,
        **({"private metrics": claims.check_private_metrics} if report.plan.has("private_metrics") else {}),
        "versions": claims.check_versions,
    }
    checks += [attempt(name, partial(look, report)) for name, look in alone.items()]
    checks += check_epsilons(report, ledger.charged if ledger is not None else None)
    if fields.content.get("meaning"):
        charged = ledger.charged if ledger is not None else ()
        chains = charged if sum(charged) > report.planned_steps else (report.planned_steps,)
        checks.append(attempt("attackers", lambda: check_attackers(report, leaves_of(report, chains))))
    if report.plan.has("earlier_runs"):
        checks.append(attempt("earlier runs", partial(_of_earlier, report)))
    checks.append(attempt("released files", lambda: files.check_released(fields, output_dir)))
    checks.append(_text("statement", folder / STATEMENT, report, is_card=False))
    if os.path.lexists(folder / AUDIT):
        checks.append(attempt("audits", lambda: files.check_audits(folder / AUDIT, folder / STATEMENT, fields)))
    if output_dir is not None and (output_dir / "README.md").is_file():
        checks.append(_text("model card", output_dir / "README.md", report, is_card=True))
    return checks


def _of_ledger(look: Callable[[LedgerFile], str], ledger: LedgerFile | None) -> str:
    if ledger is None:
        raise Contradiction("the ledger cannot be relied on, so nothing shows what was charged")
    return look(ledger)


def _of_earlier(report: Report) -> str:
    raise Unknown(f"{len(report.earlier)} are included as the report describes them; verify the folder of each")


def _text(name: str, path: Path, report: Report, *, is_card: bool) -> Check:
    return attempt(name, lambda: files.check_text(path, report.epsilon, report.delta, is_card=is_card))
