"""Trains a tiny model of every class of transformers privately and writes docs/scan.json and its table.

python -m tests.adversary.scan                   all classes anew: about half an hour on one core
python -m tests.adversary.scan --only-missing    those without a row: new ones, and the rest of a scan that was stopped
python -m tests.adversary.scan --only NAME ...   these alone
python -m tests.adversary.scan --table           the table alone, from docs/scan.json
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from tests.adversary.scan import table

COMMAND = "python -m tests.adversary.scan"


def main() -> None:
    parser = argparse.ArgumentParser(COMMAND, description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="CLASS", help="names of model classes")
    parser.add_argument("--only-missing", action="store_true", help="classes that have no row yet")
    parser.add_argument("--verdict", help="classes whose row has this verdict, e.g. error")
    parser.add_argument("--limit", type=int, default=60, help="seconds of work for a class (default: 60)")
    parser.add_argument("--table", action="store_true", help="write the table of the results that are there")
    options = parser.parse_args()
    if not options.table:
        from tests.adversary.scan import workers

        workers.scan(options, COMMAND)
    table.write_page(table.read())


if __name__ == "__main__":
    main()
