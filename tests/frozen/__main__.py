"""Freezes what the package promises and releases, or compares it with what is frozen.

python -m tests.frozen             compares everything, to the last bit
python -m tests.frozen --write     writes tests/frozen/outputs.json anew; only a `privacy:` commit that says why does so
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.frozen", description=__doc__)
    parser.add_argument("--write", action="store_true", help="freeze what is computed now")
    parser.add_argument("--only", default="", metavar="WORDS", help="outputs whose name has these words")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_DPOPT_PRIVATE_DIR"] = folder
        from tests.frozen import cases, compare

        found = {}
        for name, compute in cases.every_output():
            if options.only in name:
                found[name] = compute()
    if options.write:
        compare.write((compare.frozen() if options.only else {}) | found)
        return
    kept = {name: value for name, value in compare.frozen().items() if options.only in name}
    unlike = [*compare.differences(kept, found, tolerance=0.0), *sorted(kept.keys() ^ found.keys())]
    print("\n".join(unlike) or f"{len(found)} outputs are what they were, to the last bit.")
    sys.exit(bool(unlike))


if __name__ == "__main__":
    main()
