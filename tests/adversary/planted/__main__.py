"""Plants one bug after the other into a copy of the package and runs the tests that have to catch it.

python -m tests.adversary.planted                all of them: a few minutes on one core
python -m tests.adversary.planted --only WORDS   those whose description has these words; nothing is written

Writes docs/planted_bugs.json and docs/planted_bugs.md. Fails if a bug is not caught, if its text is not found exactly
once, or if the tests that should catch it are red without it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.adversary.planted.bugs import BUGS, Bug

REPO = Path(__file__).resolve().parents[3]
RESULTS = REPO / "docs" / "planted_bugs.json"
PAGE = REPO / "docs" / "planted_bugs.md"
COMMAND = "python -m tests.adversary.planted"
COPIED = ("hf_dpopt", "tests", "recipes", "docs", "benchmarks", "pyproject.toml", "README.md", "constraints.txt")
HEAD = f"""# Bugs that were planted, and what caught them

Written by `{COMMAND}`, which plants one at a time into a copy of the package and runs the tests that have to turn red.
Without a bug the same tests are green. The bugs leave the program running and its privacy statement as it was: what they
break is the promise.

| bug | file | caught by |
|---|---|---|
"""


def planted(bug: Bug, source: str) -> str:
    """The text of the file with the bug in it.

    Raises:
        ValueError: if the text to replace is not there exactly once.
    """
    if source.count(bug.old) != 1:
        raise ValueError(f"{bug.what!r}: {bug.old!r} is {source.count(bug.old)} times in {bug.file}, and not once.")
    return source.replace(bug.old, bug.new)


def page(found: list[dict[str, Any]]) -> str:
    """docs/planted_bugs.md from the results."""
    return HEAD + "".join(
        f"| {row['what']} | `{row['file']}` | {', '.join(f'`{name}`' for name in row['caught_by'])} |\n"
        for row in found
    )


def main() -> None:
    parser = argparse.ArgumentParser(COMMAND, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", metavar="WORDS", help="plant the bugs whose description has these words")
    options = parser.parse_args()
    bugs = [bug for bug in BUGS if not options.only or options.only in bug.what]
    for bug in bugs:  # before anything is run: patches that no longer fit are the common case
        planted(bug, (REPO / bug.file).read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory(prefix="hf_dpopt_planted_") as folder:
        copy = _copied(Path(folder))
        if red := _red(copy, sorted({test for bug in bugs for test in bug.caught_by})):
            sys.exit(f"These tests are red without a bug, so they catch none: {', '.join(red)}.")
        found = [_catch(bug, copy) for bug in bugs]
    if missed := [row["what"] for row in found if not row["caught_by"]]:
        sys.exit(f"Not caught: {'; '.join(missed)}.")
    if not options.only:
        body = {"command": COMMAND, "date": str(datetime.date.today()), "bugs": found}
        RESULTS.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
        PAGE.write_text(page(found), encoding="utf-8")


def _copied(folder: Path) -> Path:
    for name in COPIED:
        source = REPO / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    return folder


def _catch(bug: Bug, copy: Path) -> dict[str, Any]:
    file = copy / bug.file
    sound, start = file.read_text(encoding="utf-8"), time.monotonic()
    file.write_text(planted(bug, sound), encoding="utf-8")
    try:
        red = _red(copy, bug.caught_by)
    finally:
        file.write_text(sound, encoding="utf-8")
    print(f"{time.monotonic() - start:5.1f} s  {bug.what}: {', '.join(red) or 'NOT CAUGHT'}", flush=True)
    return {"what": bug.what, "file": bug.file, "caught_by": red}


def _red(copy: Path, tests: Any) -> list[str]:
    """Names of the tests among `tests` that fail in the copy, without their parameters."""
    command = [sys.executable, "-B", "-m", "pytest", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        sys.exit(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    found = re.findall(r"^(?:FAILED|ERROR) ([^\s\[]+)", done.stdout, flags=re.MULTILINE)
    return list(dict.fromkeys(found))


if __name__ == "__main__":
    main()
