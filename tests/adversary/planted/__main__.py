"""Plants one bug after the other into a copy of the package and runs the tests that have to catch it.

python -m tests.adversary.planted                all of them: a few minutes on one core
python -m tests.adversary.planted --only WORDS   those whose description has these words; the other rows stay

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
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import dp_accounting.pld  # noqa: F401  (this and what follows: for the processes that are forked)
import peft  # noqa: F401
import pytest
import scipy.stats  # noqa: F401
import torch
import transformers

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
    torch.set_num_threads(1)
    assert transformers.Trainer  # imported when it is asked for
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
    write(found)


def write(found: list[dict[str, Any]]) -> None:
    """Both files, with what was found now and, of the bugs that are still planted, what was found before, and when."""
    before = json.loads(RESULTS.read_text(encoding="utf-8"))["bugs"] if RESULTS.exists() else []
    rows = {row["what"]: row for row in [*before, *found]}
    kept = [rows[bug.what] for bug in BUGS if bug.what in rows]
    body = {"command": COMMAND, "bugs": kept}
    RESULTS.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(kept), encoding="utf-8")


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
        red = _red(copy, bug.caught_by, "-x")  # one is enough
    finally:
        file.write_text(sound, encoding="utf-8")
    print(f"{time.monotonic() - start:5.1f} s  {bug.what}: {', '.join(red) or 'NOT CAUGHT'}", flush=True)
    return {"what": bug.what, "file": bug.file, "caught_by": red, "date": str(datetime.date.today())}


def _red(copy: Path, tests: Iterable[str], *options: str) -> list[str]:
    """Names of the tests among `tests` that fail in the copy, without their parameters."""
    log = copy / "pytest.log"
    process = os.fork()  # what takes seconds to import, and has no bug in it, is there already
    if process == 0:
        os._exit(_pytest(copy, [*options, *tests], log))
    ended = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    told = log.read_text(encoding="utf-8")
    if ended not in (0, 1):
        sys.exit(f"pytest ended with {ended}:\n{told[-4000:]}")
    return list(dict.fromkeys(re.findall(r"^(?:FAILED|ERROR) ([^\s\[]+)", told, flags=re.MULTILINE)))


def _pytest(copy: Path, arguments: list[str], log: Path) -> int:
    """Runs pytest in this process, on the package and the tests of the copy."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("hf_dpopt", "tests")]:
        del sys.modules[name]
    sys.path[:] = [str(copy), *(p for p in sys.path if Path(p or ".").resolve() != REPO)]
    sys.dont_write_bytecode = True
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy)  # of the processes that tests start
    into = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(into, 1)
    os.dup2(into, 2)
    ended = pytest.main(["-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", *arguments])
    import hf_dpopt

    assert Path(hf_dpopt.__file__).is_relative_to(copy), hf_dpopt.__file__
    sys.stdout.flush()
    return int(ended)


if __name__ == "__main__":
    main()
