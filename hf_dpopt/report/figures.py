"""Figures of recipes and pages, in two formats, made without a display."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from hf_dpopt.common.extras import import_extra

FORMATS = ("png", "svg")


def save_figure(figure: Any, folder: Path, name: str) -> list[Path]:
    """Write a figure of `pyplot` in each of `FORMATS`, and close it; makes the folder if it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{extension}" for extension in FORMATS]
    for path in paths:
        figure.savefig(path, dpi=120)
    pyplot().close(figure)
    return paths


def pyplot() -> Any:
    """Matplotlib without a display.

    Raises:
        DPConfigError: if it is not installed.
    """
    import_extra("matplotlib", "A plot").use("Agg")
    plt = importlib.import_module("matplotlib.pyplot")
    plt.rcParams.update({"font.size": 9, "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True})
    return plt
