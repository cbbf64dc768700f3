"""The claim of a convex head, whose final weights alone were released (or all iterates of one in a subspace).

The bound on the last iterate is written again from the papers (arXiv:2205.13710, arXiv:2403.00278): the last R steps
with a part of their noise, and one Gaussian mechanism that hides how far the weights may have been apart before.
"""

from __future__ import annotations

import hashlib
import math
import os
from typing import Any

import numpy as np
from dp_accounting import GaussianDpEvent
from scipy import stats

from hf_dpopt.verify import claims, epsilons
from hf_dpopt.verify.claims import Report
from hf_dpopt.verify.files import STATEMENT
from hf_dpopt.verify.outcome import Check, Contradiction, Unknown
from hf_dpopt.verify.plan_events import Leaves, on_sample
from hf_dpopt.verify.reading import Fields, read_regular

SAME = 1e-9  # relative, of numbers that follow from others
SHARE = 1e-3  # of delta, at most, for batches that are too large to contract
MOST_STEPS = 10**7
FREE = (  # what the report or the ledger alone says, and what changes no mechanism
    "allow_large_delta", "noise_rng", "num_features", "num_public_records", "public_records",
    "ledger_digest", "statement_sha256", "eval_data_privacy", "data_dependent_preprocessing",
)  # fmt: skip


def check_epsilon(report: Report) -> list[Check]:
    """Recompute epsilon, for as many runs as the ledger charges."""
    return epsilons.attempt_epsilon(_recompute, report, "the release")


def _recompute(report: Report, what: str) -> list[Check]:
    fields, ledger = report.fields, report.known_ledger
    num_runs = max(1, sum(steps > 0 for steps in ledger.charged)) if ledger is not None else 1
    kept = report.delta * (1 - num_runs * SHARE) if _has_horizon(fields) else report.delta
    leaves = [(leaf, count * num_runs) for leaf, count in _leaves(fields)]
    return epsilons.check_epsilon(what, fields.number("epsilon"), leaves, kept, "add_or_remove_one")


def check_form(report: Report) -> str:
    """The entries that the claim rests on."""
    fields = report.fields
    if fields.text("kind") != "convex_head":
        raise Contradiction(f"kind {fields.text('kind')!r:.40} is unknown")
    if fields.content.get("epsilon") is None or not fields.number("noise_multiplier") > 0:
        raise Contradiction("NOT PRIVATE, as the report says itself: there is no noise")
    return f"claims epsilon {fields.number('epsilon'):.6g} at delta {report.delta:g}"


def check_steps(report: Report) -> str:
    """The run is charged at once, before its first record is read."""
    steps, ledger = report.fields.count("num_steps"), report.ledger
    if ledger.is_unsafe:
        raise Contradiction("a noise key was fixed by hand, so nothing is private")
    charged = [chain.steps for chain in ledger.chains.values() if chain.steps]
    if not charged or any(found != [steps] for found in charged):
        raise Contradiction(f"the ledger does not charge the {steps} steps of the report: {charged!r:.60}")
    return f"{steps} charged in {len(charged)} run{'s' * (len(charged) > 1)}"


def check_plan(report: Report) -> str:
    """The plan of the report against every plan of the ledger."""
    return claims.compare_plans(report.fields.content, report.ledger, FREE)


def check_unit(report: Report) -> str:
    """The unit and the relation that the proof is for."""
    if (report.fields.text("unit"), report.fields.text("adjacency")) != ("example", "add_or_remove_one"):
        raise Contradiction("a head has a proof for single records, added or removed, and for nothing else")
    return "example, under add_or_remove_one"


def check_delta(report: Report) -> str:
    """Delta below 1/n."""
    return claims.compare_delta(report.delta, report.fields.count("num_examples"), report.fields)


def _has_horizon(fields: Fields) -> bool:
    """Whether the bound on the last iterate is claimed, of which a subspace has none."""
    return fields.has("horizon") and "algorithm" not in fields.content


def check_geometry(report: Report) -> str:
    """Bounds on a record's gradient and curvature follow from the norm of the features."""
    fields = report.fields
    norm = fields.positive("feature_norm")
    follows = {"lipschitz": math.sqrt(2) * norm}
    is_last = "algorithm" not in fields.content  # else all iterates of a head in a subspace are released
    if is_last:
        follows["smoothness"] = norm**2 / 2
        if fields.has("head_radius"):
            follows["diameter"] = 2 * fields.positive("head_radius")
        else:
            fields.positive("l2")  # without a ball, only this keeps two runs together
    for name, value in follows.items():
        if not math.isclose(fields.positive(name), value, rel_tol=SAME):
            raise Contradiction(f"{name} is {fields.positive(name):g}, and {value:g} follows from the norms")
    if fields.count("expected_batch_size") > fields.count("num_examples"):
        raise Contradiction("a batch is larger than the data")
    if is_last:
        steepest = 1 - float(_slopes(fields, fields.positive("step_size"))[1])
        if steepest > 2 * (1 + SAME):
            raise Contradiction(f"a step is no contraction: step size x curvature = {steepest:g} is above 2")
    return f"gradients of a record of at most sqrt(2) x {norm:g}"


def _leaves(fields: Fields) -> Leaves:
    """Mechanisms that cost no less than the release of one run."""
    q = fields.count("expected_batch_size") / fields.count("num_examples")
    noise, steps = fields.positive("noise_multiplier"), fields.count("num_steps")
    if steps > MOST_STEPS:
        raise Unknown(f"{steps} steps are too many to compose here")
    if fields.content.get("adagrad") == "clean" and q < 1:
        raise Contradiction("a matrix of un-noised gradients of earlier batches is not amplified by sampling")
    if not _has_horizon(fields):
        return [(on_sample(q, noise), steps)]
    horizon, share = fields.count("horizon"), fields.positive("noise_share")
    if horizon > steps or share >= 1:
        raise Contradiction(f"the last {horizon} of {steps} steps, with {share:g} of their noise")
    _check_oversized(fields, horizon, q)
    shift = _shift(fields, horizon, share)
    return [(on_sample(q, noise * math.sqrt(1 - share)), horizon), (GaussianDpEvent(1 / shift), 1)]


def _slopes(fields: Fields, eta: Any) -> tuple[Any, Any]:
    """The largest and the least slope of a step without the record; a cap of batches counts for the steepest loss."""
    l2, smoothness = fields.number("l2"), fields.positive("smoothness")
    if not fields.has("batch_cap"):
        return 1 - eta * l2, 1 - eta * (smoothness + 2 * l2)
    return 1 - eta * l2, 1 - eta * (smoothness * fields.count("batch_cap") / fields.count("expected_batch_size") + l2)


def _shift(fields: Fields, horizon: int, share: float) -> float:
    """Mean of the Gaussian that hides the distance of R steps before, in units of its noise.

    Steps backwards from the end: what they move counts as much as later steps leave of it.
    """
    steps, decay = fields.count("num_steps"), fields.number("decay")
    eta = fields.positive("step_size") * np.arange(steps, steps - horizon, -1, dtype=float) ** -decay
    high, low = _slopes(fields, eta)
    shrinks = np.maximum(high, -low) if fields.has("batch_cap") else high
    kept = np.concatenate([[1.0], np.cumprod(shrinks)])
    batch, lipschitz = fields.count("expected_batch_size"), fields.positive("lipschitz")
    # without a ball: what a record adds to the distance in a step, and a step takes from it, are equal there
    first = fields.positive("step_size")
    high, low = _slopes(fields, first)
    rate = (1 - max(high, -low)) / first if fields.has("batch_cap") else fields.number("l2")
    apart = fields.positive("diameter") if fields.has("head_radius") else lipschitz / (batch * rate)
    distance = float(kept[-1]) * apart
    reach = math.sqrt(float(((kept[:-1] * eta) ** 2).sum()))
    noise = fields.positive("noise_multiplier") * lipschitz / batch
    return max(distance / (reach * noise * math.sqrt(share)), 1e-12)


def _check_oversized(fields: Fields, horizon: int, q: float) -> None:
    """Batches that are too large for a contraction are paid for by a part of delta."""
    room = (2 / fields.positive("step_size") - 2 * fields.number("l2")) / fields.positive("smoothness")
    largest = math.floor(fields.count("expected_batch_size") * room * (1 + 1e-12))
    largest = fields.count("batch_cap") if fields.has("batch_cap") else largest
    steps = horizon if fields.has("head_radius") else fields.count("num_steps")
    chance = steps * float(stats.binom.sf(largest - 1, fields.count("num_examples"), q))
    if chance > SHARE * fields.positive("delta") * (1 + 1e-6):
        raise Contradiction(f"batches above {largest} make no contraction, and cost {chance:.2g} of delta")


def check_statement(report: Report) -> str:
    """Whether the statement is the one that the report names."""
    path = report.path.with_name(STATEMENT)
    if not os.path.lexists(path):
        raise Unknown(f"there is no {path.name}")
    if hashlib.sha256(read_regular(path)).hexdigest() != report.fields.text("statement_sha256"):
        raise Contradiction(f"{path.name} is not the one that was written with the report")
    return f"{path.name} is the one that was written with the report"
