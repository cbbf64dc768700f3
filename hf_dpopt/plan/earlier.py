"""Earlier private runs on the same records, whose cost the budget of a run includes.

Two runs on one training set reveal more than either: a head that was trained first, and the adapters that start from
it. Their mechanisms are composed before epsilon is computed, which costs far less than adding two epsilons.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import dp_accounting

from hf_dpopt.accounting import events
from hf_dpopt.accounting.selection import RunCount
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise import from_parameters, is_whole
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.sampling import SAMPLERS, Sampler

_NEEDED = (
    "num_examples", "sampler", "adjacency", "privacy_unit", "users", "draw_stddev", "noise_strategy", "noise_steps",
    "noise_rng", "is_private",
)  # fmt: skip

_OPTIONAL = ("opening_noise", "tuned")  # what a plan leaves out where there is none


@dataclasses.dataclass(frozen=True)
class EarlierRun:
    """A run that was charged before this one, as its ledger describes it. Public values only.

    Attributes:
        ledger_digest: last record of its ledger when it was read; what it charged later is not counted.
        charged: steps of each of its chains.
        mechanism: the entries of its plan that fix what a step reveals.
    """

    ledger_digest: str
    charged: tuple[int, ...]
    mechanism: Mapping[str, Any] = dataclasses.field(hash=False)

    @property
    def sampler(self) -> Sampler:
        """Sampler of its batches."""
        fields = {key: value for key, value in self.mechanism["sampler"].items() if key != "name"}
        return SAMPLERS[self.mechanism["sampler"]["name"]](**fields)

    @property
    def unit(self) -> str:
        """Unit that it protects as a whole, with the column that tells users apart."""
        users = self.mechanism["users"]
        return self.mechanism["privacy_unit"] + (f" by {users['column']}" if users else "")

    @property
    def num_units(self) -> int:
        """Records, or users, that it protects one by one."""
        users = self.mechanism["users"]
        places = 1 if users is None or users["sampled"] != "records" else users["records_per_user"]
        return self.mechanism["num_examples"] // places

    @property
    def event(self) -> dp_accounting.DpEvent:
        """Event of everything that it released."""
        strategy, tuned = from_parameters(self.mechanism["noise_strategy"]), self.mechanism["tuned"]
        stddev = events.noise_stddev_over_clip(self.mechanism["draw_stddev"], self.mechanism["adjacency"])
        steps = self.sampler.release(strategy, stddev, self.charged, planned_steps=self.mechanism["noise_steps"])
        return event_of_run(
            steps,
            num_chains=sum(charged > 0 for charged in self.charged),
            adjacency=self.mechanism["adjacency"],
            opening_noise=self.mechanism["opening_noise"],
            tuned=None if tuned is None else RunCount.read(tuned),
        )

    def public_dict(self) -> dict[str, Any]:
        """Plain JSON values, from which `read` makes it again."""
        return {"ledger_digest": self.ledger_digest, "charged": list(self.charged), **self.mechanism}

    @classmethod
    def read(cls, public: Mapping[str, Any]) -> EarlierRun:
        """The run that `public_dict` describes."""
        return cls(public["ledger_digest"], tuple(public["charged"]), _mechanism_of(public))


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
    missing = [name for name in _NEEDED if name not in plan]
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
    before = [EarlierRun.read(entry) for entry in plan.get("earlier_runs", ())]
    return [*before, EarlierRun(ledger_digest, tuple(charged), json.loads(json.dumps(_mechanism_of(plan))))]


def _mechanism_of(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of a plan that fix its event; what it leaves out is None."""
    return {name: plan[name] for name in _NEEDED} | {name: plan.get(name) for name in _OPTIONAL}


def check_earlier(runs: Sequence[EarlierRun], config: PrivacyConfig, sampler: Sampler) -> None:
    """Refuse earlier runs on another data set, with another promise, or without a common analysis.

    Args:
        runs: what was charged before.
        config: what is asked for now; its adjacency is no longer "auto".
        sampler: sampler of this run.

    Raises:
        DPConfigError: if they do not protect the same units of as many records in the same sense, or batches of balls
            in bins are to be composed with sampled ones.
    """
    adjacency, num_units = config.adjacency, config.num_units(sampler.num_examples)
    names = {sampler.name, *(run.sampler.name for run in runs)} if runs else set()
    if "balls_in_bins" in names and names - {"balls_in_bins", "fixed_order"}:
        raise DPConfigError(
            f"Batches of {' and '.join(sorted(names))} have no common analysis: balls_in_bins is composed with itself "
            "and with fixed_order alone. Use another --sampling, or leave earlier_runs out and add up epsilon and "
            "delta."
        )
    unit = config.privacy_unit + (f" by {config.user_id_column}" if config.privacy_unit == "user" else "")
    for run in runs:
        was = (run.num_units, run.unit, run.mechanism["adjacency"])
        now = (num_units, unit, adjacency)
        if was != now:
            raise DPConfigError(
                f"An earlier run protected {was[0]:,} units ({was[1]}, {was[2]}), this one {now[0]:,} ({now[1]}, "
                f"{now[2]}): they are not of one data set and one promise, so their costs cannot be composed. Use the "
                f"same training set and unit, and --adjacency {was[2]}; or leave earlier_runs out and add up epsilon "
                "and delta."
            )


def event_of_run(
    steps: dp_accounting.DpEvent,
    *,
    num_chains: int,
    adjacency: str,
    opening_noise: float | None,
    tuned: RunCount | None,
) -> dp_accounting.DpEvent:
    """Return the event of everything that a run released: its steps, and what was released with them.

    Args:
        steps: event of the steps.
        num_chains: chains that took a step.
        adjacency: that of the run.
        opening_noise: stddev of the noise in the query over all units that each chain began with / its sensitivity;
            None without one.
        tuned: number of runs of which this one is the best; None for a run by itself.
    """
    if num_chains and opening_noise is not None:
        query = dp_accounting.GaussianDpEvent(events.noise_stddev_over_clip(opening_noise, adjacency))
        steps = dp_accounting.ComposedDpEvent([dp_accounting.SelfComposedDpEvent(query, num_chains), steps])
    return tuned.event(steps) if num_chains and tuned is not None else steps


def composed(runs: Sequence[EarlierRun], event: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
    """Event of the earlier runs and then this one; the event itself where there were none."""
    return dp_accounting.ComposedDpEvent([*(run.event for run in runs), event]) if runs else event
