"""Mutants of nine areas, each against the tests that touch its file, in one process that forks.

    python -m tests.mutants --sample 200 --seed 0            draws the sample and runs it
    python -m tests.mutants --resume                         goes on with it; results that are there stay
    python -m tests.mutants --resume --survivors             runs once more those that survived and may be killed
    python -m tests.mutants --table                          prints the section of docs/reliability.md

Needs cosmic-ray: pip install -c constraints.txt -e '.[mutants]'. Results are lines of JSON in docs/mutants.jsonl: a
head, then one line a mutant. A mutant is named by the text of its line, so that the sample outlives changes of a file
elsewhere; one whose line is gone is replaced by another of its area.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported, as in tests/conftest.py

from tests.mutants import campaign, report

REPO = Path(__file__).resolve().parents[2]
RESULTS = REPO / "docs" / "mutants.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m tests.mutants", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sample", type=int, default=200, help="mutants of all areas together")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--resume", action="store_true", help="keep the sample and the results that are there")
    parser.add_argument(
        "--survivors", action="store_true", help="with --resume: also run those that survived and may be killed"
    )
    parser.add_argument("--at_most", type=int, help="mutants to run now")
    parser.add_argument("--first", type=float, default=20.0, help="seconds of traced tests for a mutant")
    parser.add_argument("--second", type=float, default=60.0, help="of the other tests, for one that survived those")
    parser.add_argument("--work", type=Path, default=REPO / "build" / "mutants", help="folder of lines and logs")
    parser.add_argument("--table", action="store_true", help="print the section of docs/reliability.md, run nothing")
    options = parser.parse_args()
    if options.table:
        print(report.section(RESULTS), end="")
        return
    campaign.run(REPO, RESULTS, options)


if __name__ == "__main__":
    main()
