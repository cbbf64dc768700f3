"""All checks of one folder, in order; a check that the others rest on ends those that need it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.verify import claims, epsilons, files, head_claims
from hf_dpopt.verify.chain import LedgerFile, read_ledger
from hf_dpopt.verify.claims import Report
from hf_dpopt.verify.outcome import FAILED, OK, Check, Contradiction, Outcome, attempt
from hf_dpopt.verify.reading import Fields, read_regular, strict_json

REPORT, HEAD, LEDGER = "report.json", "head.json", "ledger.jsonl"
Checks = dict[str, Callable[[Report], "str | list[Check]"]]
OF_RUN: Checks = {
    "private": claims.check_is_private,
    "ledger digest": claims.check_digest,
    "steps": claims.check_steps,
    "plan": claims.check_plan,
    "unit": claims.check_unit,
    "delta": claims.check_delta,
    "sampler": claims.check_sampler,
    "sensitivity": claims.check_sensitivity,
    "preconditioner": claims.check_preconditioner,
    "private metrics": claims.check_private_metrics,
    "versions": claims.check_versions,
    "epsilon": epsilons.check_epsilons,
    "attackers": epsilons.check_attackers,
    "earlier runs": claims.check_earlier,
    "released files": files.check_released,
    "statement": files.check_statement,
    "audits": files.check_audits,
    "model card": files.check_card,
}
OF_HEAD: Checks = {
    "ledger digest": claims.check_digest,
    "steps": head_claims.check_steps,
    "plan": head_claims.check_plan,
    "unit": head_claims.check_unit,
    "delta": head_claims.check_delta,
    "geometry": head_claims.check_geometry,
    "epsilon": head_claims.check_epsilon,
    "statement": head_claims.check_statement,
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
    checks = attempt("ledger chain", _read, place.with_name(LEDGER), read)
    report = Report(fields, read[0] if read else None, place)
    form, others = (head_claims.check_form, OF_HEAD) if place.name == HEAD else (claims.check_form, OF_RUN)
    checks += attempt("report", form, report)
    if checks[-1].status == OK:
        checks += [check for name, look in others.items() for check in attempt(name, look, report)]
    return Outcome(tuple(checks))


def _report_at(path: Path) -> Path:
    for folder in (path / files.FOLDER, path):
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
