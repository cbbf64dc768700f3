"""Forging of reports and ledgers, as far as somebody with a text editor and a hash function gets."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_dpopt.verify import FAILED, Outcome, verify
from tests.adversary.forging import sealed

Record = dict[str, Any]


class Folder:
    """The public files of a run, to be forged.

    Args:
        source: folder that is copied.
        target: where to.
    """

    def __init__(self, source: Path, target: Path):
        self.path = Path(shutil.copytree(source, target))
        privacy = self.path / "privacy"
        self.report_path = next(path for path in (privacy / "report.json", privacy / "head.json") if path.exists())
        self.ledger_path, self.statement = privacy / "ledger.jsonl", privacy / "statement.md"

    @property
    def report(self) -> Record:
        return json.loads(self.report_path.read_text())

    @property
    def lines(self) -> list[bytes]:
        return self.ledger_path.read_bytes().splitlines()

    def write_lines(self, lines: list[bytes]) -> None:
        self.ledger_path.write_bytes(b"\n".join(lines) + b"\n")

    def edit_report(self, change: Callable[[Record], Any]) -> None:
        """Change the report alone."""
        report = self.report
        change(report)
        self.report_path.write_text(json.dumps(report))

    def edit_ledger(self, change: Callable[[list[Record]], Any], *, names_digest: bool = True) -> None:
        """Change the ledger, make its digests fit, and let the report name the last of them."""
        records = [json.loads(line) for line in self.lines]
        change(records)
        self.ledger_path.write_text(sealed(records))
        if names_digest:
            digest = json.loads(self.lines[-1])["sha256"]
            self.edit_report(lambda report: report.update(ledger_digest=digest))

    def edit_plan(self, change: Callable[[Record], Any]) -> None:
        """Change the plan in the report and in the ledger, with digests that fit."""
        self.edit_report(lambda report: change(report.get("plan", report)))
        self.edit_ledger(lambda records: [change(record["plan"]) for record in records if record["kind"] == "plan"])

    def claim(self, epsilon: float) -> None:
        """Claim another epsilon everywhere, the statement included."""
        if self.report_path.name == "head.json":
            return self.edit_plan(lambda plan: plan.update(epsilon=epsilon))
        self.edit_plan(lambda plan: plan.update(epsilon=epsilon))
        self.edit_report(lambda report: report.update(epsilon_spent=epsilon))
        text = re.sub(r"\*\*epsilon = [^,]*,", f"**epsilon = {epsilon:.5g},", self.statement.read_text())
        self.statement.write_text(text)

    def verify(self) -> Outcome:
        return verify(self.path)

    def failed(self) -> set[str]:
        """Names of the checks that fail; of those of epsilon the accountant's is left out."""
        outcome = self.verify()
        assert outcome.has_failed == (outcome.exit_code(is_strict=False) == 1)
        return {check.name.split(",")[0] for check in outcome.checks if check.status == FAILED}
