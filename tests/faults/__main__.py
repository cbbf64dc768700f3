"""Plant the faults of `tests.faults.table` one after the other and run the tests that have to catch each.

python -m tests.faults                all of them: a few minutes on one core
python -m tests.faults --only WORDS   those whose description has these words; the other rows stay

Writes docs/planted_bugs.json and docs/planted_bugs.md. Fails if a fault is not caught, if its text is not found exactly
once, or if the tests that should catch it are red without it. Faults that the audit finds: `make audit`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import dp_accounting.pld  # noqa: F401  (this and what follows: for the processes that are forked)
import peft  # noqa: F401
import scipy.stats  # noqa: F401
import torch
import transformers

from tests.faults.plant import REPO, Copy, Fault, copy
from tests.faults.table import FAULTS

RESULTS = REPO / "docs" / "planted_bugs.json"
PAGE = REPO / "docs" / "planted_bugs.md"
COMMAND = "python -m tests.faults"
TESTED = tuple(fault for fault in FAULTS if fault.caught_by)
HEAD = f"""# Bugs that were planted, and what caught them

Written by `{COMMAND}`, which plants one at a time into a copy of the package and runs the tests that have to turn red.
Without a bug the same tests are green. The bugs leave the program running and its privacy statement as it was: what they
break is the promise.

| bug | file | caught by |
|---|---|---|
"""


def page(found: list[dict[str, Any]]) -> str:
    """docs/planted_bugs.md from the results."""
    return HEAD + "".join(
        f"| {row['what']} | `{row['file']}` | {', '.join(f'`{name}`' for name in row['caught_by'])} |\n"
        for row in found
    )


def main() -> None:
    parser = argparse.ArgumentParser(COMMAND, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", metavar="WORDS", help="plant the faults whose description has these words")
    options = parser.parse_args()
    torch.set_num_threads(1)
    assert transformers.Trainer  # imported when it is asked for
    faults = [fault for fault in TESTED if not options.only or options.only in fault.what]
    for fault in faults:  # before anything is run: patches that no longer fit are the common case
        fault.planted((REPO / fault.file).read_text(encoding="utf-8"))
    with copy() as within:
        if red := within.red(sorted({test for fault in faults for test in fault.caught_by})):
            sys.exit(f"These tests are red without a fault, so they catch none: {', '.join(red)}.")
        found = [_catch(fault, within) for fault in faults]
    if missed := [row["what"] for row in found if not row["caught_by"]]:
        sys.exit(f"Not caught: {'; '.join(missed)}.")
    write(found)


def write(found: list[dict[str, Any]]) -> None:
    """Both files, with what was found now and, of the faults that are still planted, what was found before, and when."""
    before = json.loads(RESULTS.read_text(encoding="utf-8"))["bugs"] if RESULTS.exists() else []
    rows = {row["what"]: row for row in [*before, *found]}
    kept = [rows[fault.what] for fault in TESTED if fault.what in rows]
    RESULTS.write_text(json.dumps({"command": COMMAND, "bugs": kept}, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(kept), encoding="utf-8")


def _catch(fault: Fault, within: Copy) -> dict[str, Any]:
    start = time.monotonic()
    with within.planted(fault):
        red = within.red(fault.caught_by, "-x")  # one is enough
    print(f"{time.monotonic() - start:5.1f} s  {fault.what}: {', '.join(red) or 'NOT CAUGHT'}", flush=True)
    return {"what": fault.what, "file": fault.file, "caught_by": red, "date": str(datetime.date.today())}


if __name__ == "__main__":
    main()
