"""`hf-dpopt plan-head`: what a convex head costs, before it is trained."""

from __future__ import annotations

import json
import math
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hf_dpopt.common.checks import check_count
from hf_dpopt.convex.plan import MAX_NOISE_RADII, HeadConfig, HeadPlan, make_head_plan
from hf_dpopt.report.statement import round_up


def plan_head(
    num_examples: Annotated[
        int, typer.Option("--num-examples", "--num_examples", "-n", help="Records in the training set.")
    ],
    batch_size: Annotated[int, typer.Option("--batch-size", "--batch", "-b", help="Expected records per step.")],
    steps: Annotated[int, typer.Option(help="Steps of the whole run.")],
    head_radius: Annotated[
        float, typer.Option("--head-radius", "--head_radius", help="The weights stay in a ball of this radius.")
    ],
    feature_norm: Annotated[
        float, typer.Option("--feature-norm", "--feature_norm", help="Features are shortened to this norm.")
    ],
    epsilon: Annotated[float | None, typer.Option(help="Budget: the noise is computed.")] = None,
    noise_multiplier: Annotated[
        float | None,
        typer.Option("--noise-multiplier", "--noise_multiplier", help="Or the noise: epsilon is computed."),
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="At most 1/n. Default: min(n^-1.1, 1/(10 n)) rounded down to one digit.")
    ] = None,
    allow_large_delta: Annotated[
        bool,
        typer.Option("--allow-large-delta", "--allow_large_delta", help="Accept a delta above 1/n."),
    ] = False,
    learning_rate: Annotated[
        float | None, typer.Option("--learning-rate", "--learning_rate", help="Default: half of what is allowed.")
    ] = None,
    l2: Annotated[float, typer.Option(help="Strength of l2 regularisation.")] = 0.0,
    num_weights: Annotated[
        int | None,
        typer.Option(
            "--num-weights", "--num_weights", help="Labels x (features + 1 for a bias): how far noise carries them."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> None:
    """Noise and epsilon of a linear head of which only the final weights leave, and from where on steps are free."""
    config = HeadConfig(
        head_radius=head_radius, feature_norm=feature_norm, expected_batch_size=batch_size, num_steps=steps,
        target_epsilon=epsilon, noise_multiplier=noise_multiplier, target_delta=delta, learning_rate=learning_rate,
        l2=l2, allow_large_delta=allow_large_delta,
    )  # fmt: skip
    if num_weights is not None:
        check_count("num_weights", num_weights)
    plan = make_head_plan(config, num_examples=num_examples)
    radii = None if num_weights is None else plan.noise_over_radius(num_weights)
    if as_json:
        found = {**plan.public_dict(), "free_after": plan.free_steps(), "noise_over_radius": radii}
        typer.echo(json.dumps(found, indent=2, sort_keys=True))
        return
    table = Table(title="Convex head, final weights only", show_header=False)
    for name, value in _rows(plan).items():
        table.add_row(name, value)
    if radii is not None:
        verdict = (
            "too far: more l2, a smaller step size or a larger ball" if radii > MAX_NOISE_RADII else "little enough"
        )
        table.add_row("noise alone", f"carries the weights {radii:.3g} radii of the ball ({verdict})")
    Console().print(table)


def _rows(plan: HeadPlan) -> dict[str, str]:
    spent, config, free = plan.spent, plan.config, plan.free_steps()
    known = math.isfinite(spent.composition)
    by_last = spent.horizon is not None
    return {
        "epsilon": f"{round_up(spent.epsilon)} at delta {plan.delta:g} (add_or_remove_one)",
        "all iterates together": round_up(spent.composition) if known else "more than three times as much",
        "better bound": (
            f"that of the last iterate: the last {spent.horizon:,} of {config.num_steps:,} steps count"
            if by_last
            else "plain composition: no iterate has to be hidden"
        ),
        "noise multiplier": f"{plan.sgd.noise_multiplier:.6g}",
        "step size": f"{config.step_size:.6g} (at most {2 / (config.smoothness + 2 * config.l2):.6g})",
        "free steps": (
            "none"
            if free is None
            else f"with this noise, all beyond {free:,} ({free * plan.sgd.sample_rate:,.0f} epochs)"
        ),
    }
