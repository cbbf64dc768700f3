"""JSON and plots of the experiments."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from recipes.paper.correlated_noise.output import panels, plain_ticks, save

DATE = "2026-11-21"  # of the runs


def versions() -> dict[str, str]:
    """Of Python and of what computes."""
    packages = ("numpy", "scipy", "torch", "dp-accounting", "transformers", "peft")
    return {"python": platform.python_version(), **{package: version(package) for package in packages}}


def save_numbers(path: Path, command: str, numbers: dict[str, Any]) -> None:
    """Numbers with the command that makes them and the versions it ran with; curves stay in the JSONL."""

    def without_curves(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: without_curves(v) for k, v in value.items() if k not in ("curve", "band", "steps")}
        if isinstance(value, list):
            return [without_curves(v) for v in value]
        return round(value, 6) if isinstance(value, float) and abs(value) > 1e-3 else value

    about = {"command": command, "date": DATE, **versions()}
    path.write_text(json.dumps(without_curves(about | numbers), indent=1) + "\n", encoding="utf-8")


def curves(rows: Sequence[dict[str, Any]], path: Path, groups: Sequence[tuple[str, Sequence[str]]]) -> None:
    """Test accuracy over the steps, mean and one standard deviation; a panel for each group of methods."""
    by_name = {row["method"]: row for row in rows}
    figure, axes = panels(len(groups), width=5.6, height=4.4)
    for axis, (title, names) in zip(axes, groups, strict=True):
        for i, name in enumerate(names):
            row = by_name[name]
            steps, mean, band = row["steps"], 100 * np.array(row["curve"]), 100 * np.array(row["band"])
            axis.plot(steps, mean, color=f"C{i}", label=f"{name}: {100 * row['mean']:.1f}")
            axis.fill_between(steps, mean - band, mean + band, color=f"C{i}", alpha=0.15, linewidth=0)
        axis.set(xlabel="step", ylabel="test accuracy, %", title=title)
        axis.legend(fontsize=8, loc="lower right")
    low = min(axis.get_ylim()[0] for axis in axes)
    high = max(axis.get_ylim()[1] for axis in axes)
    for axis in axes:
        axis.set_ylim(low, high)
    save(figure, path)


def sweeps(delays: Sequence[dict[str, Any]], budgets: Sequence[dict[str, Any]], path: Path) -> None:
    """Accuracy against the delay and against epsilon, mean and standard deviation over the seeds."""
    figure, (left, right) = panels(2, width=5.0, height=4.2)
    values = [100 * np.array([row[k] for row in delays]) for k in ("mean", "std")]
    left.errorbar([row["delay"] for row in delays], *values, marker="o", markersize=4, capsize=3)
    left.set_xscale("log")
    plain_ticks(left, [row["delay"] for row in delays])
    left.set(xlabel="delay s, steps", ylabel="test accuracy, %", title="DP2-RMSProp, noise multiplier 1")
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in budgets:
        suffix = ", no bias" if row["task"].endswith("no bias") else ""
        lines.setdefault(row["method"] + suffix, []).append(row)
    for i, (name, found) in enumerate(lines.items()):
        rows = sorted(found, key=lambda row: row["epsilon"])
        values = [100 * np.array([row[k] for row in rows]) for k in ("mean", "std")]
        epsilons = [row["epsilon"] for row in rows]
        right.errorbar(
            epsilons,
            *values,
            marker="o",
            markersize=4,
            capsize=3,
            color=f"C{i}",
            label=name,
            linestyle="--" if name.endswith("no bias") else "-",
        )
    right.set_xscale("log")
    plain_ticks(right, sorted({round(row["epsilon"], 2) for row in budgets}))
    right.set(xlabel="epsilon (delta 1e-5)", ylabel="test accuracy, %", title="The same steps, other noise")
    right.legend(fontsize=8)
    save(figure, path)


def preconditioner(numbers: dict[str, Any], path: Path) -> None:
    """Histograms of sqrt(v) over the words, one line per refresh, light to dark."""
    figure, axes = panels(2, width=5.0, height=4.0)
    edges = np.linspace(-7, -1, 61)
    for axis, name in zip(axes, ("without noise", "private"), strict=True):
        histograms = numbers[name]["histograms"]
        for i, histogram in enumerate(histograms):
            shade = (0.1, 0.3, 0.6, 0.15 + 0.85 * (i + 1) / len(histograms))
            axis.stairs(
                histogram, edges, color=shade, label=f"refresh {i + 1}" if i in (0, len(histograms) - 1) else None
            )
        axis.axvline(
            np.log10(numbers["noise_in_the_mean"] * 0.1**0.5), color="C3", linestyle="--", label="noise alone"
        )
        axis.set(xlabel="log10 of sqrt(v)", ylabel="words", title=name)
        axis.legend(fontsize=8)
    save(figure, path)
