"""The claim of a convex head, whose final weights alone were released (or all iterates of one in a subspace).

The bound on the last iterate is written again from the papers (arXiv:2205.13710, arXiv:2403.00278): the last R steps
with a part of their noise, and one Gaussian mechanism that hides how far the weights may have been apart before.
"""

from __future__ import annotations

import functools
import hashlib
import math
from pathlib import Path

import numpy as np
from dp_accounting import GaussianDpEvent
from scipy import stats

from hf_dpopt.verify import epsilons
from hf_dpopt.verify.chain import LedgerFile
from hf_dpopt.verify.events import Leaves, on_sample
from hf_dpopt.verify.outcome import OK, Check, Contradiction, Unknown, attempt
from hf_dpopt.verify.reading import Fields

STATEMENT = "statement.md"
SAME = 1e-9  # relative, of numbers that follow from others
SHARE = 1e-3  # of delta, at most, for batches that are too large to contract
MOST_STEPS = 10**7
FREE = ("allow_large_delta",)
IN_LEDGER_ONLY = ("noise_rng", "num_public_records", "public_records")
IN_REPORT_ONLY = ("ledger_digest", "statement_sha256", "eval_data_privacy", "data_dependent_preprocessing")


def verify_head(fields: Fields, ledger: LedgerFile | None, folder: Path, output_dir: Path | None) -> list[Check]:
    """All checks of a head's report but that of the ledger's chain."""
    looks = {
        "report": lambda: _form(fields),
        "ledger digest": lambda: _digest(fields, _needed(ledger)),
        "steps": lambda: _steps(fields, _needed(ledger)),
        "plan": lambda: _plan(fields, _needed(ledger)),
        "unit": lambda: _unit(fields),
        "delta": lambda: _delta(fields),
        "geometry": lambda: _geometry(fields),
    }
    checks = [attempt(name, look) for name, look in looks.items()]
    if checks[0].status != OK:
        return checks
    checks += epsilons.or_failure("the release", functools.partial(_epsilon, fields, ledger))
    checks.append(attempt("statement", functools.partial(_statement, fields, folder)))
    return checks


def _epsilon(fields: Fields, ledger: LedgerFile | None) -> list[Check]:
    """Recompute epsilon, for as many runs as the ledger charges."""
    num_runs = max(1, sum(steps > 0 for steps in ledger.charged)) if ledger is not None else 1
    delta = fields.positive("delta")
    kept = delta * (1 - num_runs * SHARE) if _has_horizon(fields) else delta
    leaves = [(leaf, count * num_runs) for leaf, count in _leaves(fields)]
    return epsilons.check_epsilon("the release", fields.number("epsilon"), leaves, kept, "add_or_remove_one")


def _needed(ledger: LedgerFile | None) -> LedgerFile:
    if ledger is None:
        raise Contradiction("the ledger cannot be relied on, so nothing shows what was charged")
    return ledger


def _form(fields: Fields) -> str:
    if fields.text("kind") != "convex_head":
        raise Contradiction(f"kind {fields.text('kind')!r:.40} is unknown")
    if fields.content.get("epsilon") is None or not fields.number("noise_multiplier") > 0:
        raise Contradiction("NOT PRIVATE, as the report says itself: there is no noise")
    return f"claims epsilon {fields.number('epsilon'):.6g} at delta {fields.positive('delta'):g}"


def _digest(fields: Fields, ledger: LedgerFile) -> str:
    if fields.text("ledger_digest") != ledger.digests[-1]:
        raise Contradiction("the report names another last record than the ledger has: one was replaced or cut")
    return f"the ledger ends with {ledger.digests[-1][:16]}.., which the report names"


def _steps(fields: Fields, ledger: LedgerFile) -> str:
    """The run is charged at once, before its first record is read."""
    steps = fields.count("num_steps")
    if any(chain.is_unsafe for chain in ledger.chains.values()):
        raise Contradiction("a noise key was fixed by hand, so nothing is private")
    charged = [chain.steps for chain in ledger.chains.values() if chain.steps]
    if not charged or any(found != [steps] for found in charged):
        raise Contradiction(f"the ledger does not charge the {steps} steps of the report: {charged!r:.60}")
    return f"{steps} charged in {len(charged)} run{'s' * (len(charged) > 1)}"


def _plan(fields: Fields, ledger: LedgerFile) -> str:
    if not ledger.plans:
        raise Contradiction("the ledger has no plan")
    for plan in ledger.plans:
        names = {*fields.content, *plan} - {*FREE, *IN_LEDGER_ONLY, *IN_REPORT_ONLY}
        for name in sorted(names):
            if name not in plan or name not in fields.content or fields.content[name] != plan[name]:
                was, says = plan.get(name), fields.content.get(name)
                raise Contradiction(f"{name} is {says!r:.60} in the report and {was!r:.60} in the ledger")
    return "the same mechanism in the report and in the ledger"


def _unit(fields: Fields) -> str:
    if (fields.text("unit"), fields.text("adjacency")) != ("example", "add_or_remove_one"):
        raise Contradiction("a head has a proof for single records, added or removed, and for nothing else")
    return "example, under add_or_remove_one"


def _delta(fields: Fields) -> str:
    delta, n = fields.positive("delta"), fields.count("num_examples")
    if delta >= 1 / n and fields.content.get("allow_large_delta") is not True:
        raise Contradiction(f"{delta:g} is not below 1/n = {1 / n:.3g}")
    return f"{delta:g}, with n = {n}"


def _is_subspace(fields: Fields) -> bool:
    return "algorithm" in fields.content


def _has_horizon(fields: Fields) -> bool:
    return fields.has("horizon")


def _geometry(fields: Fields) -> str:
    """Bounds on a record's gradient and curvature follow from the norm of the features."""
    norm = fields.positive("feature_norm")
    follows = {"lipschitz": math.sqrt(2) * norm}
    if not _is_subspace(fields):
        follows |= {"smoothness": norm**2 / 2, "diameter": 2 * fields.positive("head_radius")}
    for name, value in follows.items():
        if not math.isclose(fields.positive(name), value, rel_tol=SAME):
            raise Contradiction(f"{name} is {fields.positive(name):g}, and {value:g} follows from the norms")
    if fields.count("expected_batch_size") > fields.count("num_examples"):
        raise Contradiction("a batch is larger than the data")
    if not _is_subspace(fields):
        reach = fields.positive("step_size") * (fields.positive("smoothness") + 2 * fields.number("l2"))
        if reach > 2 * (1 + SAME):
            raise Contradiction(f"a step is no contraction: step size x curvature = {reach:g} is above 2")
    return f"gradients of a record of at most sqrt(2) x {norm:g}"


def _leaves(fields: Fields) -> Leaves:
    """Mechanisms that cost no less than the release of one run."""
    q = fields.count("expected_batch_size") / fields.count("num_examples")
    noise, steps = fields.positive("noise_multiplier"), fields.count("num_steps")
    if steps > MOST_STEPS:
        raise Unknown(f"{steps} steps are too many to compose here")
    if _is_subspace(fields) or not _has_horizon(fields):
        return [(on_sample(q, noise), steps)]
    horizon, share = fields.count("horizon"), fields.positive("noise_share")
    if horizon > steps or share >= 1:
        raise Contradiction(f"the last {horizon} of {steps} steps, with {share:g} of their noise")
    _check_oversized(fields, horizon, q)
    shift = _shift(fields, horizon, share)
    return [(on_sample(q, noise * math.sqrt(1 - share)), horizon), (GaussianDpEvent(1 / shift), 1)]


def _shift(fields: Fields, horizon: int, share: float) -> float:
    """Mean of the Gaussian that hides the distance of R steps before, in units of its noise.

    Steps backwards from the end: what they move counts as much as later steps leave of it.
    """
    steps, l2, decay = fields.count("num_steps"), fields.number("l2"), fields.number("decay")
    eta = fields.positive("step_size") * np.arange(steps, steps - horizon, -1, dtype=float) ** -decay
    kept = np.concatenate([[1.0], np.cumprod(1 - eta * l2)])
    distance = float(kept[-1]) * fields.positive("diameter")
    reach = math.sqrt(float(((kept[:-1] * eta) ** 2).sum()))
    noise = fields.positive("noise_multiplier") * fields.positive("lipschitz") / fields.count("expected_batch_size")
    return max(distance / (reach * noise * math.sqrt(share)), 1e-12)


def _check_oversized(fields: Fields, horizon: int, q: float) -> None:
    """Batches that are too large for a contraction are paid for by a part of delta."""
    room = (2 / fields.positive("step_size") - 2 * fields.number("l2")) / fields.positive("smoothness")
    largest = math.floor(fields.count("expected_batch_size") * room * (1 + 1e-12))
    chance = horizon * float(stats.binom.sf(largest - 1, fields.count("num_examples"), q))
    if chance > SHARE * fields.positive("delta") * (1 + 1e-6):
        raise Contradiction(f"batches above {largest} make no contraction, and cost {chance:.2g} of delta")


def _statement(fields: Fields, folder: Path) -> str:
    path = folder / STATEMENT
    if not path.is_file():
        raise Unknown(f"there is no {STATEMENT}")
    if hashlib.sha256(path.read_bytes()).hexdigest() != fields.text("statement_sha256"):
        raise Contradiction(f"{STATEMENT} is not the one that was written with the report")
    return f"{STATEMENT} is the one that was written with the report"
