"""The plan of a config: what "auto" names is chosen first, then sampler, noise and event are built from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hf_dpopt.noise import Workload
from hf_dpopt.plan.compare import compare_mechanisms
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.plan.plan import PrivacyPlan, build_plan
from hf_dpopt.preclip import Preclip


def make_plan(
    config: PrivacyConfig,
    *,
    num_examples: int,
    num_steps: int,
    noise_multiplier: float | None = None,
    workload: Workload | None = None,
    recorded: Mapping[str, Any] | None = None,
    preclip: Preclip | None = None,
) -> PrivacyPlan:
    """Build the plan of a run, calibrating the noise where a budget was given.

    Args:
        config: what was asked for.
        num_examples: records in the training set, or users if they are what is sampled; >= 1. Treated as public.
        num_steps: optimizer steps of the whole run; >= 1.
        noise_multiplier: overrides the config, for a resumed run: the noise its first part had. ``target_epsilon``
            stays the budget, but `PrivacyPlan.epsilon` may then exceed it.
        workload: what the optimizer makes of the gradients, for which correlated noise is tuned; it has no influence
            on privacy. None for plain sums.
        recorded: `PrivacyPlan.public_dict` of the run that this one continues; it keeps that noise, and that delta
            unless another is asked for.
        preclip: a preconditioner of one's own; None for the one that ``config`` names.

    Raises:
        DPConfigError: for a combination without a privacy proof, or values out of range, a delta above 1/n among them.
        DPBudgetExceeded: for more steps than the recorded noise was made for.

    Warns:
        PrivacyWarning: if delta is 1/n or more, n the number of records or users that are protected.
    """
    compared: tuple[Any, ...] = ()
    if config.noise_mechanism == "auto" and recorded is None:
        rows = compare_mechanisms(config, num_examples=num_examples, num_steps=num_steps, workload=workload)
        compared = tuple(rows)
        config = dataclasses.replace(rows[0].plan.config, amplification_samples=config.amplification_samples)
    return build_plan(
        config,
        num_examples=num_examples,
        num_steps=num_steps,
        noise_multiplier=noise_multiplier,
        workload=workload,
        recorded=recorded,
        preclip=preclip,
        compared=compared,
    )
