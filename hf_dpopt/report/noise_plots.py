"""Plots of noise mechanisms: correlation of the steps, error of the iterates, and cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise import NoiseStrategy, Workload
from hf_dpopt.plan.compare import ComparedNoise, predicted_errors

FORMATS = ("png", "svg")
MAX_COVARIANCE_STEPS = 64
NUM_PREFIXES = 60  # points of the curve of epsilon so far
NEGLIGIBLE = 1e-7  # relative size of a coefficient that float32 does not see
SHOWN = 6  # mechanisms with curves of their own


def plot_comparison(
    rows: Sequence[ComparedNoise],
    folder: Path,
    *,
    workload: Workload | None = None,
    by_epsilon: Mapping[float, Sequence[ComparedNoise]] | None = None,
) -> list[Path]:
    """Write ``noise.png`` and ``noise.svg``.

    Six panels: coefficients of B over the steps, their gain over frequency, stddev of every iterate, correlation of
    the noise of the first steps, epsilon so far, and error against epsilon with the point where DP-SGD falls behind.

    Args:
        rows: result of `compare_mechanisms`.
        folder: folder of the two files; made if it does not exist.
        workload: workload of the comparison.
        by_epsilon: comparisons at other budgets, for the last panel.

    Raises:
        DPConfigError: if matplotlib is not installed.
    """
    plt = pyplot()
    colors = {row.label: f"C{i}" for i, row in enumerate(rows)}
    shown = list(rows)[:SHOWN]
    figure, axes = plt.subplots(2, 3, figsize=(14.5, 8.6))
    _coefficients(axes[0, 0], axes[0, 1], shown, colors)
    _errors(axes[0, 2], rows, colors, workload)
    _correlation(figure, axes[1, 0], rows)
    _epsilon_so_far(axes[1, 1], rows, colors)
    _error_by_epsilon(axes[1, 2], by_epsilon or {}, colors)
    plan = rows[0].plan
    figure.suptitle(
        f"{plan.num_examples} records, batches of {plan.sampler.expected_batch_size}, {plan.num_steps} steps, "
        f"epsilon {plan.config.target_epsilon:g} at delta {plan.delta:g}"
    )
    lines, labels = axes[0, 2].get_legend_handles_labels()
    figure.legend(lines, labels, loc="lower center", ncols=min(len(labels), 4), fontsize=9)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    return save_figure(figure, folder, "noise")


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
    try:
        import matplotlib
    except ImportError:
        raise DPConfigError("Plots need matplotlib: pip install 'hf_dpopt[docs]', or leave --plots out.") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 9, "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True})
    return plt


def _row_of_noise(strategy: NoiseStrategy, n: int) -> np.ndarray:
    """Weights of the draws in the noise of the last of n steps, the newest draw first."""
    return strategy.noising_rows(n - 1, n, n)[0][::-1]


def _coefficients(in_time: Any, in_frequency: Any, rows: Sequence[ComparedNoise], colors: Mapping[str, str]) -> None:
    for row in rows:
        strategy, n = row.plan.strategy, row.plan.num_steps
        if strategy.toeplitz_coefs(1) is None:
            continue  # a tree has another row in every step
        coefs = _row_of_noise(strategy, n)
        used = np.flatnonzero(np.abs(coefs[1:]) > NEGLIGIBLE * abs(coefs[0])) + 1
        if len(used):
            marker = "o" if len(used) == 1 else None
            in_time.loglog(used, np.abs(coefs[used]), color=colors[row.label], marker=marker)
        gain = np.abs(np.fft.rfft(coefs, 8 * n))
        in_frequency.loglog(np.arange(1, len(gain)) / (8 * n), gain[1:], color=colors[row.label])
    in_time.set(title="noise taken back", xlabel="steps ago", ylabel="|coefficient of B|")
    in_frequency.set(title="gain of the noise", xlabel="frequency (1 / steps)", ylabel="|B|")


def _errors(axis: Any, rows: Sequence[ComparedNoise], colors: Mapping[str, str], workload: Workload | None) -> None:
    for row in rows:
        errors = predicted_errors(row.plan, workload)
        axis.plot(np.arange(1, len(errors) + 1), errors, color=colors[row.label], label=row.label)
    axis.set(title="error of every iterate", xlabel="step", ylabel="stddev / (clip x learning rate)", ylim=(0, None))


def _correlation(figure: Any, axis: Any, rows: Sequence[ComparedNoise]) -> None:
    row = next((row for row in rows if row.plan.strategy.name != "identity"), rows[0])
    n = min(row.plan.num_steps, MAX_COVARIANCE_STEPS)
    noising = row.plan.strategy.noising_matrix(n if row.plan.strategy.anytime else row.plan.num_steps)[:n]
    covariance = noising @ noising.T
    scale = np.sqrt(np.diag(covariance))
    image = axis.imshow(covariance / np.outer(scale, scale), cmap="RdBu", vmin=-1, vmax=1)
    axis.grid(False)
    axis.set(title=f"correlation of the noise ({row.label})", xlabel="step", ylabel="step")
    figure.colorbar(image, ax=axis, shrink=0.8)


def _epsilon_so_far(axis: Any, rows: Sequence[ComparedNoise], colors: Mapping[str, str]) -> None:
    for row in rows:
        n = row.plan.num_steps
        steps = np.unique(np.linspace(1, n, min(n, NUM_PREFIXES)).astype(int))
        epsilons = [row.plan.epsilon(int(t)) for t in steps]
        axis.plot(steps, epsilons, color=colors[row.label])
    axis.set(title="epsilon so far", xlabel="step", ylabel="epsilon", ylim=(0, None))


def _error_by_epsilon(
    axis: Any, by_epsilon: Mapping[float, Sequence[ComparedNoise]], colors: Mapping[str, str]
) -> None:
    axis.set(title="error against epsilon", xlabel="epsilon", ylabel="RMSE / (clip x learning rate)")
    curves: dict[str, list[tuple[float, float]]] = {}
    for epsilon in sorted(by_epsilon):
        for row in by_epsilon[epsilon]:
            curves.setdefault(row.label, []).append((epsilon, row.rmse))
    for name, points in curves.items():
        x, y = zip(*points, strict=True)
        axis.loglog(x, y, marker="o", markersize=3, color=colors.get(name, "gray"))
    overtaken = crossover(by_epsilon)
    if overtaken is not None:
        axis.axvline(overtaken, color="black", linestyle=":", linewidth=1)
        axis.annotate(
            f"without amplification\nahead from {overtaken:.2g} on", (overtaken, 0.97),
            xycoords=("data", "axes fraction"), va="top", fontsize=8, xytext=(4, 0), textcoords="offset points",
        )  # fmt: skip
    if curves:
        ticks = sorted(by_epsilon)
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()


def crossover(by_epsilon: Mapping[float, Sequence[ComparedNoise]]) -> float | None:
    """Epsilon above which the best noise without amplification has less error than DP-SGD; None if there is none.

    Interpolated log-linearly between the budgets that were compared.
    """
    leads = []
    for epsilon in sorted(by_epsilon):
        rows = by_epsilon[epsilon]
        amplified = [row.rmse for row in rows if row.mechanism == "gaussian"]
        fixed = [row.rmse for row in rows if row.plan.sampler.name == "fixed_order"]
        if amplified and fixed:
            leads.append((np.log(epsilon), np.log(min(fixed) / amplified[0])))
    for (x, y), (next_x, next_y) in zip(leads, leads[1:], strict=False):
        if y > 0 >= next_y:
            return float(np.exp(x + (next_x - x) * y / (y - next_y)))
    return float(np.exp(leads[0][0])) if leads and leads[0][1] <= 0 else None
