"""The comparison of noise mechanisms for people and programs: noise, predicted error, memory and time of a step."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from rich.table import Table

from hf_dpopt.noise.streams import measure_speed
from hf_dpopt.plan.compare import ComparedNoise

BYTES = 4  # of a float32
AHEAD = (
    " Ahead below: learning rate x curvature of a quadratic, below which the last weights have less noise than with "
    "independent noise."
)


@functools.cache
def seconds_per_coordinate() -> tuple[float, float]:
    """Time of a secure draw, and of a multiply-add, on this machine's CPU: the faster of three short trials."""
    speed = measure_speed(torch.device("cpu"))
    return speed.draw_s, speed.pass_s


def mechanism_facts(row: ComparedNoise, num_parameters: int) -> dict[str, Any]:
    """One row as plain values; memory in bytes, time in seconds for so many trained coordinates."""
    draw, one_pass = seconds_per_coordinate()
    plan = row.plan
    return {
        "mechanism": row.mechanism,
        "sampler": plan.sampler.parameters(),
        "adjacency": plan.adjacency,
        "strategy": plan.strategy.parameters(),
        "noise_multiplier": plan.noise_multiplier,
        "draw_stddev": plan.draw_stddev,
        "step_stddev": row.step_stddev,
        "rmse": row.rmse,
        "max_error": row.max_error,
        "ahead_below": row.ahead_below,
        "memory_bytes": row.cost.kept * num_parameters * BYTES,
        "seconds_per_step": (row.cost.draws * draw + row.cost.passes * one_pass) * num_parameters,
        "epsilon": plan.epsilon(),
        "accountant": plan.spent.accountant,
    }


def mechanisms_table(rows: Sequence[ComparedNoise], num_parameters: int) -> Table:
    """All rows, the one to take first."""
    plan = rows[0].plan
    is_curved = any(row.ahead_below is not None for row in rows)
    table = Table(
        title=f"Noise mechanisms at epsilon {plan.config.target_epsilon:g}, delta {plan.delta:g}",
        caption=(
            "sigma: noise multiplier; sigma_z: of the draws; one step: noise of a step, in clipping norms. RMSE and "
            "max error: of the iterates, in clipping norms x learning rate / batch size, for this optimizer and "
            f"schedule. Memory and time of the noise for {num_parameters:,} trained coordinates on this CPU."
            + (AHEAD if is_curved else "")
        ),
    )
    for name in ("mechanism", "sampling", "adjacency"):
        table.add_column(name)
    ahead = ("ahead below",) if is_curved else ()
    for name in ("sigma", "sigma_z", "one step", "RMSE", "max error", *ahead, "memory", "s / step"):
        table.add_column(name, justify="right")
    for row in rows:
        facts = mechanism_facts(row, num_parameters)
        table.add_row(
            row.mechanism,
            row.plan.sampler.name,
            row.plan.adjacency,
            f"{facts['noise_multiplier']:.4g}",
            f"{facts['draw_stddev']:.4g}",
            f"{facts['step_stddev']:.4g}",
            f"{row.rmse:.4g}",
            f"{row.max_error:.4g}",
            *(() if not is_curved else ("" if row.ahead_below is None else f"{row.ahead_below:.2g}",)),
            f"{facts['memory_bytes'] / 2**20:.4g} MiB",
            f"{facts['seconds_per_step']:.2g}",
        )
    return table
