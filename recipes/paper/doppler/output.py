"""What the experiments share: command line, JSON, colours. The axes are those of the other reproductions."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

COLORS = {"dp_sgd": "#4c72b0", "dp_adam_bc": "#dd8452", "dp_adamw": "#55a868", "dp_galore": "#8172b3"}
NAMES = {"dp_sgd": "DPSGD", "dp_adam_bc": "DP-AdamBC", "dp_adamw": "DP-AdamW", "dp_galore": "DP-GaLore"}


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """With the two options of every command."""
    made = argparse.ArgumentParser(
        prog=f"python -m recipes.paper.doppler.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--data", type=Path, required=True, help="folder with train.tsv and test.tsv of AG News")
    made.add_argument("--output_dir", type=Path, required=True, help="folder for JSONL, JSON and PNG")
    return made


def write(name: str, arguments: argparse.Namespace, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Computes, and writes ``doppler_<name>.json``: what was asked, when and with what, and the numbers."""
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    numbers = compute()
    folders = ("data", "output_dir", "model")
    options = {key: value for key, value in vars(arguments).items() if key not in folders}
    about = {
        "command": f"python -m recipes.paper.doppler.{name}",
        "options": options,
        "date": datetime.date.today().isoformat(),
        "seconds_of_this_call": round(time.perf_counter() - began, 1),
        "python": platform.python_version(),
        **{package: version(package) for package in ("numpy", "scipy", "torch", "transformers")},
    }
    numbers = {**about, **numbers}
    path = arguments.output_dir / f"doppler_{name}.json"
    path.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {path}", file=sys.stderr)
    return numbers
