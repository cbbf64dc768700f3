"""Plot of an audit: what the attack on the canaries reaches, inside of what the claim allows."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hf_dpopt.audit.auditing import Audit


def attack_curve(scores: np.ndarray, included: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """False- and true-positive rates of all thresholds on the scores, ascending, (M + 1,) each."""
    ins = included[np.argsort(-scores, kind="stable")]
    true = np.concatenate([[0.0], np.cumsum(ins) / max(1, ins.sum())])
    false = np.concatenate([[0.0], np.cumsum(~ins) / max(1, (~ins).sum())])
    return false, true


def claimed_curve(epsilon: float, delta: float, false: np.ndarray) -> np.ndarray:
    """Largest true-positive rates that (epsilon, delta) allows (Kairouz, Oh and Viswanath 2015, Theorem 2.1)."""
    best: np.ndarray = np.minimum(np.exp(epsilon) * false + delta, 1 - np.exp(-epsilon) * (1 - delta - false))
    return np.clip(best, 0.0, 1.0)


def plot_attack(audit: Audit, path: Path) -> None:
    """Write the attack's curve, the claimed bound and the diagonal to an image file."""
    from matplotlib.figure import Figure

    false, true = attack_curve(audit.scores, audit.included)
    grid = np.linspace(0, 1, 501)
    figure = Figure(figsize=(5, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.fill_between(
        grid, claimed_curve(audit.claimed_epsilon, audit.delta, grid), 1, color="0.88",
        label=f"excluded by epsilon {audit.claimed_epsilon:.3g}, delta {audit.delta:g}",
    )  # fmt: skip
    axes.step(false, true, where="post", color="tab:blue", label=f"attack on {len(audit.scores)} canaries")
    axes.plot([0, 1], [0, 1], color="0.6", linestyle=":", label="guessing")
    axes.set(xlim=(0, 1), ylim=(0, 1), xlabel="false-positive rate", ylabel="true-positive rate")
    axes.set_title("Best attack on one run, within the claim", fontsize=10)
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=150)
