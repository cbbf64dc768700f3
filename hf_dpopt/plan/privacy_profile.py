"""Privacy profile of a plan, and what it means, from the same event that its epsilon is computed from."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from hf_dpopt.accounting.profile import Profile, meaning, privacy_profile
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.plan.plan import PrivacyPlan

Chains = tuple[int, ...] | None  # steps of each chain that were charged beyond the plan; None for the planned ones


def profile_of_plan(plan: PrivacyPlan, chains: Sequence[int] | None = None) -> Profile:
    """Profile of the planned steps; where more were charged, the larger one of both at every epsilon.

    Args:
        plan: the plan, which is private.
        chains: steps of each chain that were charged; None for the plan alone.
    """
    beyond = _beyond(plan, chains)
    profile = _of(plan, None, plan.adjacency, plan.epsilon())
    if beyond is None:
        return profile
    return profile.or_larger(_of(plan, beyond, plan.adjacency, plan.epsilon(beyond)))


def meaning_of_plan(plan: PrivacyPlan, chains: Sequence[int] | None = None) -> dict[str, Any]:
    """Meaning of the profile of a plan, as values that JSON has but for infinities; empty without a promise.

    Args:
        plan: the plan.
        chains: steps of each chain that were charged; None for the plan alone.
    """
    beyond = _beyond(plan, chains)
    epsilon = max(plan.epsilon(), 0.0 if beyond is None else plan.epsilon(beyond))
    if not plan.is_private or not math.isfinite(epsilon):
        return {}
    return _meaning(
        profile_of_plan(plan, beyond), _replaced(plan, beyond), plan.adjacency, epsilon=epsilon, delta=plan.delta
    )


@functools.lru_cache(maxsize=8)
def _meaning(
    profile: Profile, replaced: Profile | None, adjacency: str, *, epsilon: float, delta: float
) -> dict[str, Any]:
    return meaning(profile, _swapped(profile, replaced, adjacency), epsilon=epsilon, delta=delta)


def _of(plan: PrivacyPlan, chains: Chains, adjacency: str, epsilon: float) -> Profile:
    event = plan.event if chains is None else plan.event_after(chains)
    return privacy_profile(event, plan.delta, adjacency, proven=((epsilon, plan.delta),))


def _swapped(profile: Profile, replaced: Profile | None, adjacency: str) -> Profile:
    if adjacency == "replace_one":
        return profile
    twice = profile.then(profile)
    return twice if replaced is None else replaced.or_smaller(twice)


def _replaced(plan: PrivacyPlan, chains: Sequence[int] | None) -> Profile | None:
    """Profile under `replace_one` by its own analysis; None without one."""
    found: Profile | None = None
    for steps in dict.fromkeys((None, _beyond(plan, chains))):
        epsilon = plan.epsilon_replace_one(steps)
        if epsilon is None:
            return None
        try:
            one = _of(plan, steps, "replace_one", epsilon)
        except DPConfigError:
            return None
        found = one if found is None else found.or_larger(one)
    return found


def _beyond(plan: PrivacyPlan, chains: Sequence[int] | None) -> Chains:
    """The steps charged, if they are more than a part of those planned in one chain."""
    charged = tuple(steps for steps in chains or () if steps)
    return None if not charged or (len(charged) == 1 and charged[0] <= plan.num_steps) else charged
