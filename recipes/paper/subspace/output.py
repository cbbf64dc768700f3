"""What the reproductions share: command line, JSON with its command, seeds, time and versions, plots."""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import shlex
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any


def parser(name: str, doc: str | None) -> argparse.ArgumentParser:
    """With the options that all of them have."""
    made = argparse.ArgumentParser(
        prog=f"python -m recipes.paper.subspace.{name}", description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    made.add_argument("--output_dir", type=Path, default=Path("runs/paper"), help="folder for JSON and PNG")
    return made


def run(
    module: str,
    arguments: argparse.Namespace,
    compute: Callable[[argparse.Namespace], dict[str, Any]],
    plot: Callable[[dict[str, Any], Path], None],
    name: str | None = None,
) -> None:
    """Computes, prints, and writes ``subspace_<name>.json`` and ``.png``; the name is the module's by default."""
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    numbers = compute(arguments)
    options = shlex.join(_without_paths(sys.argv[1:]))
    about = {
        "command": f"python -m recipes.paper.subspace.{module} {options}".strip(),
        "date": datetime.date.today().isoformat(),
        "seconds": round(time.perf_counter() - began, 1),
        "python": platform.python_version(),
        **{package: version(package) for package in ("numpy", "scipy", "torch", "dp-accounting")},
    }
    path = arguments.output_dir / f"subspace_{name or module}.json"
    path.write_text(json.dumps({**about, **numbers}, indent=1) + "\n", encoding="utf-8")
    plot(numbers, path.with_suffix(".png"))


def _without_paths(words: list[str]) -> list[str]:
    """Without the folders of one machine."""
    out: list[str] = []
    for word in words:
        before = out[-1] if out else ""
        out.append({"--data": "FOLDER", "--output_dir": "FOLDER", "--encoder": "MODEL"}.get(before, word))
    return out
