"""The demo with ten seeds: `python benchmarks/demo.py` writes docs/demo.json, with the range of every number.

Takes half an hour on two cores. Times are of one run at a time on whatever machine this is.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_dpopt.huggingface.demo import run

REPORT = Path(__file__).resolve().parents[1] / "docs" / "demo.json"
NUMBERS = {
    "untrained": ("loss",),
    "stock": ("loss", "recited", "seconds"),
    "private": ("loss", "recited", "seconds", "epsilon"),
}


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean, least and largest value of every number over the seeds."""
    found = {f"{part} {name}": [one[part][name] for one in runs] for part, names in NUMBERS.items() for name in names}
    found["gain_kept"] = [one["gain_kept"] for one in runs]
    return {
        name: {"mean": sum(values) / len(values), "least": min(values), "largest": max(values)}
        for name, values in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser("python benchmarks/demo.py", description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--output", type=Path, default=REPORT)
    args = parser.parse_args()
    runs = []
    for seed in range(args.seeds):
        with tempfile.TemporaryDirectory() as folder:
            facts = run(Path(folder) / "demo", seed=seed)
        for part in NUMBERS:
            del facts[part]["completions"]
        runs.append(facts)
        report = {
            "command": f"python benchmarks/demo.py --seeds {args.seeds}",
            "date": time.strftime("%Y-%m-%d"),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "threads": torch.get_num_threads(),
            "machine": platform.processor() or platform.machine(),
            "summary": summary(runs),
            "runs": runs,
        }
        args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
