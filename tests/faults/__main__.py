"""Plant the faults of `tests.faults.table` one after the other and run the tests that have to catch each.

python -m tests.faults                all of them: a few minutes on one core
python -m tests.faults --only WORDS   those whose description has these words; the other rows stay

Writes docs/planted_bugs.md. Fails if a fault is not caught, if its text is not found exactly
once, or if the tests that should catch it are red without it. Faults that the audit finds: `make audit`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import dp_accounting.pld  # noqa: F401  (this and what follows: for the processes that are forked)
import peft  # noqa: F401
import scipy.stats  # noqa: F401
import torch
import transformers

from tests.faults.plant import REPO, Copy, Fault, copy
from tests.faults.table import FAULTS

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


def rows_of(page: str) -> dict[str, str]:
    """Fault, in words -> its line of docs/planted_bugs.md."""
    return {line.split(" | ")[0][2:]: line for line in page.removeprefix(HEAD).splitlines(keepends=True)}


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
        caught = [(fault, _catch(fault, within)) for fault in faults]
    if missed := [fault.what for fault, red in caught if not red]:
        sys.exit(f"Not caught: {'; '.join(missed)}.")
    rows = rows_of(PAGE.read_text(encoding="utf-8"))
    for fault, red in caught:
        rows[fault.what] = f"| {fault.what} | `{fault.file}` | {', '.join(f'`{name}`' for name in red)} |\n"
    PAGE.write_text(HEAD + "".join(rows[fault.what] for fault in TESTED if fault.what in rows), encoding="utf-8")


def _catch(fault: Fault, within: Copy) -> list[str]:
    start = time.monotonic()
    with within.planted(fault):
        red = within.red(fault.caught_by, "-x")  # one is enough
    print(f"{time.monotonic() - start:5.1f} s  {fault.what}: {', '.join(red) or 'NOT CAUGHT'}", flush=True)
    return red


if __name__ == "__main__":
    main()
