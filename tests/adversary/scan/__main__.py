"""Trains a tiny model of every class of transformers privately and writes docs/scan.json and its table.

python -m tests.adversary.scan                   classes without a row: new ones, and the rest of a scan that was stopped
python -m tests.adversary.scan --anew            all of them: about half an hour on one core
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
    parser.add_argument("--anew", action="store_true", help="all classes, whatever is known of them")
    parser.add_argument("--table", action="store_true", help="write the table of the results that are there")
    options = parser.parse_args()
    if not options.table:
        from tests.adversary.scan import workers

        workers.scan(options.only, options.anew, COMMAND)
    table.write_page(table.read())


if __name__ == "__main__":
    main()
