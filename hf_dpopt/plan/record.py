"""The record of a plan: the one form in which it is written to ledgers and reports, compared, and read again.

`hf-dpopt verify` reads the same JSON on its own, on purpose.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise import is_whole
from hf_dpopt.plan.release import EarlierRun, ReleaseRecord
from hf_dpopt.sampling import SAMPLERS


def _note(default: Any = dataclasses.MISSING, **more: Any) -> Any:
    """A field that no mechanism depends on: a run that goes on may have another value."""
    return dataclasses.field(default=default, metadata={"is_note": True}, **more)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRecord(ReleaseRecord):
    """A plan as plain JSON values, all public. Fields that have a default are written where they differ from it.

    Attributes:
        expected_batch_size, clipping, clipping_norm, noise_mechanism, noise_kwargs, noise_restart_every,
            target_epsilon, allow_large_delta: options of the config, without "auto".
        noise_at_changes: the same, where correlated noise goes on when scales change; None where it starts anew.
        delta: delta of the guarantee; None in a plan that anybody may have written, see `hf_dpopt.run.earlier`.
        noise_multiplier: noise stddev / sensitivity; unitless.
        preclip: `Preclip.parameters`.
        private_metrics: `PrivateMetrics.parameters`; None without.
        num_queries, num_steps: clipped sums of a step, and planned steps.
        epsilon: that of the planned steps and the earlier runs; may be infinite.
        accountant, dp_accounting: accountant that gave it, and the version of the library.
        certificate: `Certificate.parameters` of a proof by samples; None without.
        advised: options that were chosen for the user.
        run_epsilon: epsilon of the run by itself, where it is the best of several.
        earlier_runs: runs that the budget includes.
        training: options of the training that a resume compares; None where a loop does not name them.
        privacy_ledger: ledger of the dataset that the run is charged to.
    """

    expected_batch_size: int
    clipping: str
    clipping_norm: float
    delta: float | None
    allow_large_delta: bool = _note()
    noise_multiplier: float
    noise_mechanism: str
    noise_kwargs: Mapping[str, Any]
    noise_restart_every: int | None
    noise_at_changes: str | None = None
    preclip: Mapping[str, Any] | None
    private_metrics: Mapping[str, Any] | None = None
    earlier_runs: tuple[EarlierRun, ...] = ()
    num_queries: int = _note()
    num_steps: int = _note()
    target_epsilon: float | None = _note()
    epsilon: float = _note()
    accountant: str = _note()
    dp_accounting: str = _note()
    certificate: Mapping[str, Any] | None = _note(None)
    advised: Mapping[str, Any] | None = _note(None)
    run_epsilon: float | None = _note(None)
    training: Mapping[str, Any] | None = _note(None)
    privacy_ledger: Mapping[str, Any] | None = _note(None)

    @classmethod
    def mechanism_fields(cls) -> tuple[str, ...]:
        """Names of the fields that a resumed run must share with the run it continues."""
        notes = {"noise_steps"}  # more of them where the noise is made anew, which its strategy tells
        return tuple(f.name for f in dataclasses.fields(cls) if "is_note" not in f.metadata and f.name not in notes)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, from which `from_json` makes it again."""
        found = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.default is dataclasses.MISSING or getattr(self, field.name) != field.default
        }
        if self.earlier_runs:
            found["earlier_runs"] = [run.to_json() for run in self.earlier_runs]
        for name in ("epsilon", "run_epsilon"):  # JSON has no infinity
            if found.get(name) == math.inf:
                found[name] = "inf"
        return json.loads(json.dumps(found))

    @classmethod
    def from_json(cls, entries: Mapping[str, Any]) -> PlanRecord:
        """The plan that `to_json` described.

        Raises:
            LookupError, TypeError, ValueError: for what no run wrote.
        """
        known = {name: entries[name] for name in cls.names() if name in entries}
        for name in {"epsilon", "run_epsilon"} & known.keys():
            known[name] = float(known[name])
        known["earlier_runs"] = tuple(map(EarlierRun.from_json, entries.get("earlier_runs", ())))
        return cls(**known)


NEEDED = [field.name for field in dataclasses.fields(ReleaseRecord) if field.default is dataclasses.MISSING]


def earlier_runs_of(
    plan: Mapping[str, Any] | None, charged: Sequence[int], ledger_digest: str, *, where: str
) -> list[EarlierRun]:
    """A run that was charged so many steps, and those before it that its own budget included, oldest first.

    Args:
        plan: the plan in its ledger, which may be that of another kind of run.
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
            f"The ledger of {where} does not say what its steps reveal ({', '.join(missing)}), as that of a convex "
            "head. Leave it out of earlier_runs, and add its epsilon and delta to those of this run."
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
