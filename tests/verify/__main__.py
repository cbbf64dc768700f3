"""`python -m tests.verify`: writes the reports of runs that are not there."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.verify import runs


def main() -> None:
    for name in runs.RUNS:
        target = runs.REPORTS / name
        if target.exists():
            print(f"{name} is there")
            continue
        with tempfile.TemporaryDirectory() as folder:
            runs.make(name, Path(folder))
            runs.keep(name, Path(folder) / "out", target)


if __name__ == "__main__":
    main()
