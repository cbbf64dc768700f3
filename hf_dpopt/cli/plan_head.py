"""`hf-dpopt plan-head`: what a convex head costs, before it is trained."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from hf_dpopt.cli.show import print_facts, print_json
from hf_dpopt.common.checks import check_count
from hf_dpopt.convex.head_plan import MAX_NOISE_RADII, HeadConfig, HeadPlan, make_head_plan
from hf_dpopt.report.statement import round_up


def show_head(given: Mapping[str, Any]) -> None:
    """Print the plan of a head.

    Args:
        given: flags of the command, those with the names of fields of `HeadConfig` among them.
    """
    num_weights = given["num_weights"]
    fields = {field.name for field in dataclasses.fields(HeadConfig)}
    config = HeadConfig(**{name: value for name, value in given.items() if name in fields})
    if num_weights is not None:
        check_count("num_weights", num_weights)
    plan = make_head_plan(config, num_examples=given["num_examples"])
    radii = None if num_weights is None else plan.noise_over_radius(num_weights)
    if given["as_json"]:
        print_json({**plan.public_dict(), "free_after": plan.free_steps(), "noise_over_radius": radii})
        return
    facts = _facts(plan)
    if radii is not None:
        is_too_far = radii > MAX_NOISE_RADII
        verdict = "too far: more l2, a smaller step size or a larger ball" if is_too_far else "little enough"
        facts["noise alone"] = f"carries the weights {radii:.3g} radii of the ball ({verdict})"
    print_facts("Convex head, final weights only", facts)


def _facts(plan: HeadPlan) -> dict[str, str]:
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
        "step size": f"{config.step_size:.6g} (contracts best up to {2 / (config.smoothness + 2 * config.l2):.6g})",
        "free steps": (
            "none"
            if free is None
            else f"with this noise, all beyond {free:,} ({free * plan.sgd.sample_rate:,.0f} epochs)"
        ),
    }
