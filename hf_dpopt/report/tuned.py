"""One run among several in the statement: the best of them, and what all on the same people have spent."""

from __future__ import annotations

import math
from typing import Any

from hf_dpopt.accounting.selection import RunCount

INVALIDATES = (
    "knowing how many runs the tuning took, or anything of a run that was not the best: its weights, its score, its "
    "log, its ledger, or that it failed;",
    "runs of the tuning whose options were not drawn from one law, each for itself, or a score that is not computed "
    "from what the run released and from data that is named above as evaluation data;",
)


def describe_tuning(plan: dict[str, Any]) -> str:
    """Sentences for the promise; empty for a run that was released whatever others did."""
    if "tuned" not in plan:
        return ""
    return (
        f"This run is the best of a random number of runs ({_law(plan)}), and epsilon is for all of them: of the "
        "others, and of how many there were, nothing is released. By itself, and had it been the only one, it would "
        f"have epsilon {_shown(plan['run_epsilon'])}. "
    )


def tuning_rows(plan: dict[str, Any]) -> dict[str, str]:
    """Rows for the table of the statement."""
    if "tuned" not in plan:
        return {}
    return {
        "released as the best of": _law(plan),
        "epsilon of this run, had it been the only one": _shown(plan["run_epsilon"]),
    }


def dataset_rows(plan: dict[str, Any]) -> dict[str, str]:
    """Row of the ledger that the run was charged to for the people in its data; empty where there was none."""
    ledger = plan.get("privacy_ledger")
    if not ledger:
        return {}
    said = f"`{ledger['name']}`, entry `{ledger['entry']}`"
    if "spent" in ledger:
        said += (
            f"; {ledger['runs']} runs have spent epsilon {_shown(ledger['spent'])} of {ledger['epsilon']:g} at delta "
            f"{ledger['delta']:g} (Renyi filter of order {ledger['order']:g}; digest `{ledger['digest'][:16]}`)"
        )
    return {"charged to the ledger of the dataset": said}


def invalidates(plan: dict[str, Any]) -> tuple[str, ...]:
    """Conditions that would make the statement false, beside those of every run."""
    return INVALIDATES if "tuned" in plan else ()


def _law(plan: dict[str, Any]) -> str:
    return RunCount.read(plan["tuned"]).describe()


def _shown(value: float | str) -> str:
    return "infinity" if float(value) == math.inf else f"{float(value):.4g}"
