"""Earlier private runs on the same records, whose cost the budget of a run includes.

Two runs on one training set reveal more than either: a head that was trained first, and the adapters that start from
it. Their mechanisms are composed before epsilon is computed, which costs far less than adding two epsilons.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise import is_whole
from hf_dpopt.plan.release import EarlierRun, ReleaseRecord
from hf_dpopt.sampling import SAMPLERS

NEEDED = [field.name for field in dataclasses.fields(ReleaseRecord) if field.default is dataclasses.MISSING]


def earlier_runs_of(
    plan: Mapping[str, Any] | None, charged: Sequence[int], ledger_digest: str, *, where: str
) -> list[EarlierRun]:
    """A run and those before it that its own budget included, oldest first.

    Args:
        plan: the plan in its ledger, as `PrivacyPlan.public_dict` gives it.
        charged: steps of each of its chains.
        ledger_digest: last record of the ledger.
        where: how the user named it, for messages.

    Raises:
        DPConfigError: for a run whose cost cannot be composed with that of another.
    """
    if plan is None or not sum(charged):
        raise DPConfigError(f"{where} is no private run that took a step. Leave it out of earlier_runs.")
    missing = [name for name in NEEDED if name not in plan]
    if missing:
        raise DPConfigError(
            f"The ledger of {where} does not say what its steps reveal ({', '.join(missing)}): it is that of a convex "
            "head, which is charged as a whole, or of an old release. Leave it out of earlier_runs, and add its "
            "epsilon and delta to those of this run."
        )
    if not plan["is_private"]:
        raise DPConfigError(f"{where} was not private, so nothing that starts from it is. Start from another model.")
    if not is_whole(plan["noise_strategy"]):
        raise DPConfigError(
            f"The noise matrix of {where} is not in its ledger. Leave it out of earlier_runs, and add its epsilon and "
            "delta to those of this run."
        )
    if plan["sampler"]["name"] not in SAMPLERS:
        raise DPConfigError(
            f"The sampler of {where}, {plan['sampler']['name']!r}, is not registered here. Import the module that "
            "registers it before the trainer is made."
        )
    before = [EarlierRun.from_json(entry) for entry in plan.get("earlier_runs", ())]
    this = {"ledger_digest": ledger_digest, "charged": list(charged), **plan}
    return [*before, EarlierRun.from_json(json.loads(json.dumps(this)))]
