"""Plot of a privacy profile: what an attacker can reach at every false-positive rate, and delta at every epsilon."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_dpopt.accounting.meaning import FALSE_POSITIVES, pair_alone
from hf_dpopt.accounting.profile import Profile
from hf_dpopt.common.extras import import_extra
from hf_dpopt.report.meaning import percent

FORMATS = ("png", "svg")
SHOWN_GROUPS = (2, 5)
LEAST_DELTA = 1e-12  # of the axis


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


def plot_profile(
    profile: Profile, folder: Path, *, epsilon: float, delta: float, unit: str = "record", title: str = ""
) -> list[Path]:
    """Write ``profile.png`` and ``profile.svg``.

    Args:
        profile: that of the run.
        folder: folder of the two files; made if it does not exist.
        epsilon: epsilon that is claimed.
        delta: delta that is claimed.
        unit: word for one unit of privacy.
        title: line above both panels.

    Raises:
        DPConfigError: if matplotlib is not installed.
    """
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 5.2))
    _attackers(left, profile, epsilon, delta, unit)
    _deltas(right, profile, epsilon, delta)
    figure.suptitle(title or f"What epsilon {epsilon:.3g} at delta {delta:g} means")
    figure.tight_layout()
    return save_figure(figure, folder, "profile")


def _attackers(axis: Any, profile: Profile, epsilon: float, delta: float, unit: str) -> None:
    rates = np.geomspace(1e-4, 1.0, 400)
    alone = np.array([pair_alone(epsilon, delta, float(rate)) for rate in rates])
    axis.fill_between(rates, alone, 1.0, color="0.9", label="excluded by epsilon and delta alone")
    groups: Sequence[Profile] = profile.groups(max(SHOWN_GROUPS))
    for size, style in zip(reversed(SHOWN_GROUPS), (":", "--"), strict=True):
        allowed = groups[size - 1].true_positives(rates)
        axis.plot(rates, allowed, color="tab:orange", linestyle=style, label=f"{size} {unit}s of one person")
    axis.plot(rates, profile.true_positives(rates), color="tab:blue", label=f"one {unit}: the whole profile")
    axis.plot(rates, rates, color="0.5", linewidth=1, label="guessing")
    for rate in FALSE_POSITIVES:
        found = float(profile.true_positives(rate))
        axis.plot([rate], [found], "o", color="tab:blue", markersize=4)
        place = {"textcoords": "offset points", "xytext": (-4, 5), "fontsize": 8, "ha": "right"}
        axis.annotate(percent(found), (rate, found), **place)
    axis.set(
        xscale="log", xlim=(1e-4, 1), ylim=(0, 1), xlabel="false-positive rate", ylabel="true-positive rate, at most",
        title="best attacker: was this record there?",
    )  # fmt: skip
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize=8)


def _deltas(axis: Any, profile: Profile, epsilon: float, delta: float) -> None:
    t = profile.step * np.arange(len(profile.deltas))
    shown = profile.deltas >= LEAST_DELTA
    axis.semilogy(t[shown], profile.deltas[shown], color="tab:blue", label="of the run")
    axis.plot([epsilon], [delta], "o", color="black", markersize=5, label="the pair that is claimed")
    axis.set(
        xlabel="epsilon",
        ylabel="delta",
        xlim=(0, min(2.2 * epsilon, t[-1])),
        ylim=(LEAST_DELTA, 1),
        title="delta at every epsilon",
    )
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize=8)
