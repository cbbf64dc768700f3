"""`python -m tests.fuzz --cases 1000 --seed 0`: the table by family, and every case that broke the promise."""

from __future__ import annotations

import argparse
import faulthandler
import importlib.metadata
import os
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
_HOME = tempfile.mkdtemp(prefix="fuzz_")
os.environ.update(HF_DPOPT_PRIVATE_DIR=f"{_HOME}/keys", HOME=_HOME)

KINDS = ("ran", "refused", "usage", "raw", "charged", "hung")
GIBIBYTES = 8  # that a case may allocate beyond what the imports took
ABANDONED = 120.0  # seconds after which a case that no signal reaches ends the program, with the place where it stands


def main() -> int:
    """Run the cases; return 1 if one of them broke the promise."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="the parts whose names begin so")
    parser.add_argument("--verbose", action="store_true", help="print every case")
    asked = parser.parse_args()

    import torch

    from tests.fuzz.drawing import PARTS, drawn

    torch.set_num_threads(1)
    _limit_memory()
    began, counts, bad, slowest = time.process_time(), Counter[tuple[str, str]](), 0, (0.0, "")
    chosen = {part: share for part, share in PARTS.items() if part.startswith(asked.only or "")}
    for part, share in chosen.items():
        for case, outcome, seconds in drawn(
            part, max(1, round(asked.cases * share / sum(chosen.values()))), asked.seed, Path(_HOME), ABANDONED
        ):
            counts[case.family, outcome.kind] += 1
            slowest = max(slowest, (seconds, repr(case)))
            if not outcome.is_good:
                bad += 1
            if asked.verbose or not outcome.is_good:
                line = f"{outcome.kind:8} {seconds:5.1f} s  {case!r}\n         {outcome.message[:300]!r}  [{outcome.where}]"
                print(line, file=sys.__stdout__, flush=True)
    print(table(counts))
    print(f"slowest: {slowest[0]:.1f} s of the processor, {slowest[1]}; all: {time.process_time() - began:.0f} s")
    names = ("hf_dpopt", "torch", "transformers", "hypothesis")
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in names), f"seed {asked.seed}", sep=", ")
    shutil.rmtree(_HOME, ignore_errors=True)
    return 1 if bad else 0


def table(counts: Counter[tuple[str, str]]) -> str:
    """The table by family, in Markdown."""
    families = sorted({family for family, _ in counts})
    rows = [["family", "cases", *KINDS]]
    for family in (*families, "all"):
        found = [sum(n for (f, k), n in counts.items() if k == kind and family in (f, "all")) for kind in KINDS]
        rows.append([family, str(sum(found)), *map(str, found)])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" + "|---:" * (len(rows[0]) - 1) + "|", *lines[1:]])


def _limit_memory() -> None:
    """An allocation that is too large fails here, not on the whole machine."""
    faulthandler.enable()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + GIBIBYTES * 2**30, hard))


if __name__ == "__main__":
    sys.exit(main())
