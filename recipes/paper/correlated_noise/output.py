"""What the reproductions share: command line, JSON, plots."""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hf_dpopt.report.figures import pyplot

# one colour for a mechanism, in every plot
COLORS = {"sgd": "#4c72b0", "nu": "#dd8452", "best": "#55a868", "other": "#8172b3", "paper": "#7f7f7f"}


def run(
    name: str,
    compute: Callable[[], dict[str, Any]],
    plot: Callable[[dict[str, Any], Any], None] | None,
    *,
    package: str = "recipes.paper.correlated_noise",
    file: str | None = None,
) -> None:
    """Parses the command line, computes, prints, and writes ``<file>.json`` and ``<file>.png``, by default `name`."""
    module, file = f"{package}.{name}", file or name
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/paper"), help="folder for JSON and PNG")
    folder = parser.parse_args().output_dir
    folder.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    numbers = compute()
    print(json.dumps(numbers, indent=1))
    about = {"command": f"python -m {module}", "seconds": round(time.perf_counter() - began, 1), **versions()}
    text = json.dumps({**about, **numbers}, indent=1)
    (folder / f"{file}.json").write_text(text + "\n", encoding="utf-8")
    if plot is not None:
        plot(numbers, folder / f"{file}.png")


def versions() -> dict[str, str]:
    packages = ("numpy", "scipy", "torch", "cvxpy", "clarabel")
    return {"python": platform.python_version(), **{package: version(package) for package in packages}}


def panels(num: int, width: float = 4.2, height: float = 3.6) -> tuple[Any, list[Any]]:
    """A figure and its axes, side by side, without a display."""
    figure, axes = pyplot().subplots(1, num, figsize=(width * num, height), squeeze=False)
    return figure, list(axes[0])


def save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def plain_ticks(axis: Any, ticks: list[float]) -> None:
    """Numbers instead of powers of ten, on a logarithmic x axis with few values."""
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
