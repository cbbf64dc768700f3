"""The plan of a config: what "auto" names is chosen first, then sampler, noise and event are built from it."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from hf_dpopt.common.errors import PrivacyWarning
from hf_dpopt.noise import Workload
from hf_dpopt.plan.compare import compare_mechanisms
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.plan.earlier import EarlierRun
from hf_dpopt.plan.plan import PrivacyPlan, build_plan
from hf_dpopt.preclip import Preclip

SPENT = 0.9  # of a budget that calibration spends, at least


def make_plan(
    config: PrivacyConfig,
    *,
    num_examples: int,
    num_steps: int,
    noise_multiplier: float | None = None,
    workload: Workload | None = None,
    recorded: Mapping[str, Any] | None = None,
    preclip: Preclip | None = None,
    recipe: Mapping[str, Any] | None = None,
    earlier: Sequence[EarlierRun] = (),
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
        recipe: options that were chosen for the user, which the plan notes down; see `hf_dpopt.plan.advice`.
        earlier: runs on the same records that were charged before: ``target_epsilon`` is for them and this run.

    Raises:
        DPConfigError: for a combination without a privacy proof, or values out of range, a delta above 1/n among them.
        DPBudgetExceeded: for more steps than the recorded noise was made for.

    Warns:
        PrivacyWarning: if delta is 1/n or more, n the number of records or users that are protected; if a budget is
            larger than what the accountant can spend.
    """
    compared: tuple[Any, ...] = ()
    if config.noise_mechanism == "auto" and recorded is None:
        rows = compare_mechanisms(
            config,
            num_examples=num_examples,
            num_steps=num_steps,
            workload=workload,
            preclip=preclip,
            earlier=earlier,
        )
        compared = tuple(rows)
        config = dataclasses.replace(rows[0].plan.config, amplification_samples=config.amplification_samples)
    made = build_plan(
        config,
        num_examples=num_examples,
        num_steps=num_steps,
        noise_multiplier=noise_multiplier,
        workload=workload,
        recorded=recorded,
        preclip=preclip,
        compared=compared,
        recipe=recipe,
        earlier=earlier,
    )
    if recorded is None and noise_multiplier is None and config.target_epsilon is not None and made.is_private:
        _warn_of_unspent(made.epsilon(), config.target_epsilon)
    return made


def _warn_of_unspent(epsilon: float, target: float) -> None:
    """Warn of a budget so large that the accountant has no bound between what is spent and infinity."""
    if epsilon < SPENT * target:
        warnings.warn(
            f"target_epsilon={target:g} is more than this accountant can spend: with less noise than that of epsilon "
            f"{epsilon:.4g} its bound is infinite, so the run has that. A target_epsilon of 1 to 8 is usual.",
            PrivacyWarning,
            stacklevel=3,
        )
