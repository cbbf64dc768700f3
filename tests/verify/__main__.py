"""`python -m tests.verify`: writes the reports of runs that are not there.

python -m tests.verify --table    verifies all of them, and writes the table of docs/verify.md
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from hf_dpopt.verify import verify
from tests.verify import runs

PAGE = Path(__file__).resolve().parents[2] / "docs" / "verify.md"
BEGIN, END = "<!-- reports begin -->\n", "<!-- reports end -->"


def folders() -> dict[str, Path]:
    """Names of all reports that are kept, and where they are."""
    found = {f"`tests/verify/reports/{name}`": runs.REPORTS / name for name in sorted(runs.RUNS)}
    return found | {"`tests/verify/forged`": runs.REPORTS.with_name("forged")}


def row(name: str, folder: Path) -> str:
    """Verify a report."""
    start = time.process_time()
    outcome = verify(folder)
    seconds = time.process_time() - start
    said = outcome.verdict.split(";")[0].split(". ")[0]
    return f"| {name} | {outcome.exit_code(is_strict=False)} | {said} | {seconds:.1f} |\n"


def write_table() -> None:
    """Put the table into the page."""
    text = PAGE.read_text(encoding="utf-8")
    head = "| report | exit code | verdict | seconds |\n|---|---|---|---|\n"
    table = head + "".join(row(*one) for one in folders().items())
    PAGE.write_text(text[: text.index(BEGIN) + len(BEGIN)] + table + text[text.index(END) :], encoding="utf-8")


def main() -> None:
    if "--table" in sys.argv:
        write_table()
        return
    for name in runs.RUNS:
        target = runs.REPORTS / name
        if target.exists():
            print(f"{name} is there")
            continue
        with tempfile.TemporaryDirectory() as folder:
            runs.make(name, Path(folder))
            runs.keep(Path(folder) / "out", target)


if __name__ == "__main__":
    main()
