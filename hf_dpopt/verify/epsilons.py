"""Recomputation of a claimed epsilon, by every accountant that knows its events."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial

from dp_accounting.dp_event import RepeatAndSelectDpEvent

from hf_dpopt.verify import accountants, bins
from hf_dpopt.verify.accountants import SLACK, TOLERANCE, Recomputed
from hf_dpopt.verify.claims import Report
from hf_dpopt.verify.events import ALLOWED, BINS, Leaves
from hf_dpopt.verify.outcome import (
    EPSILON,
    FAILED,
    NOT_CHECKED,
    OK,
    SIMULATION,
    UNCOMPUTABLE,
    Check,
    Contradiction,
    Inapplicable,
    Unknown,
)

PRV = "opacus PRV"
ACCOUNTANTS: dict[str, Callable[[Leaves, float, str], Recomputed]] = {
    "exact Gaussian": accountants.by_gaussian,
    "dp-accounting PLD": accountants.by_pld,
    "dp-accounting RDP": accountants.by_rdp,
    "privacy profile of one run": accountants.by_selection,
    "sum over the tunings and the rest": accountants.by_sum,
    PRV: accountants.by_prv,
}
TIGHT = ("exact Gaussian", "dp-accounting PLD")


def check_epsilons(report: Report, charged: tuple[int, ...] | None) -> list[Check]:
    """Recompute every epsilon that a report claims.

    Args:
        report: the report.
        charged: steps of each chain by the ledger; None if it cannot be relied on.
    """
    checks: list[Check] = []
    planned = (report.planned_steps,)
    wanted: list[tuple[str, float, tuple[int, ...]]] = [("the plan", report.epsilons["the plan"], planned)]
    if charged is not None and charged != planned:
        wanted.append(("the steps charged", report.epsilons["the steps charged"], charged))
    elif charged is not None:  # the same steps, so the same cost
        wanted[0] = ("the plan", min(report.epsilons.values()), planned)
    for what, claimed, chains in wanted:
        checks += or_failure(what, partial(_of, report, what, claimed, chains))
    if report.fields.has("epsilon_replace_one"):
        most = charged if charged is not None and sum(charged) > sum(planned) else planned
        checks += or_failure("a swapped record", lambda: _of_swapped(report, most))
    return checks


def or_failure(what: str, look: Callable[[], list[Check]]) -> list[Check]:
    """The checks that `look` makes, or the one that says why it cannot."""
    try:
        return look()
    except (Contradiction, Unknown, *UNCOMPUTABLE) as error:
        status = NOT_CHECKED if isinstance(error, Unknown) else FAILED
        return [Check(f"{EPSILON} of {what}", status, str(error), {"claim": what, "supports": False})]


def _of(report: Report, what: str, claimed: float, chains: tuple[int, ...]) -> list[Check]:
    adjacency = report.mechanism.adjacency
    leaves = leaves_of(report, chains)
    if BINS in (report.mechanism.sampler, *(run.sampler for run in report.earlier)):
        return _of_bins(report, what, claimed, chains, leaves)
    return check_epsilon(what, claimed, leaves, report.delta, adjacency)


def _of_swapped(report: Report, chains: tuple[int, ...]) -> list[Check]:
    """Epsilon if one record is swapped for another, which is no part of the claim but stands in the report."""
    claimed = report.fields.number("epsilon_replace_one", may_be_infinite=True)
    for mechanism in (report.mechanism, *report.earlier):
        if "replace_one" not in ALLOWED[mechanism.sampler]:
            raise Contradiction(f"{mechanism.sampler} has no proof under replace_one, and {claimed:.6g} is claimed")
    if not math.isfinite(claimed):
        return []
    return check_epsilon("a swapped record", claimed, leaves_of(report, chains), report.delta, "replace_one")


def leaves_of(report: Report, chains: tuple[int, ...]) -> Leaves:
    """Mechanisms of a run whose chains have so many steps, and of the earlier runs, and how often each ran."""
    found = report.mechanism.leaves(chains)
    for run in report.earlier:
        found = found + run.leaves(tuple(int(steps) for steps in run.fields.numbers("charged")))
    return found


def check_epsilon(what: str, claimed: float, leaves: Leaves, delta: float, adjacency: str) -> list[Check]:
    """Recompute one epsilon. It is supported if it is not below the least of the upper bounds, up to `TOLERANCE`.

    Args:
        what: what was claimed.
        claimed: epsilon.
        leaves: mechanisms, and how often each ran.
        delta: delta of the claim.
        adjacency: which data sets are neighbours.
    """
    if not leaves:
        detail = f"nothing was released; {claimed:.6g} is claimed"
        return [Check(f"{EPSILON} of {what}", OK, detail, {"claim": what, "supports": True})]
    tried = [_by(name, what, claimed, leaves, delta, adjacency) for name in ACCOUNTANTS]
    checks = [check for check in tried if check is not None]
    if not checks:
        detail = f"no accountant here knows these batches under {adjacency}"
        return [Check(f"{EPSILON} of {what}", NOT_CHECKED, detail, {"claim": what, "supports": False})]
    is_supported = any(check.numbers.get("supports") for check in checks)
    is_refuted = any(check.status == FAILED for check in checks)
    if is_supported:  # a bound that is less tight refutes nothing
        return [_with(check, OK) if check.status == FAILED and PRV not in check.name else check for check in checks]
    if not is_refuted:
        return [_with(check, NOT_CHECKED) if check.status == OK else check for check in checks]
    return checks


def _with(check: Check, status: str) -> Check:
    return dataclasses.replace(check, status=status)


def _by(name: str, what: str, claimed: float, leaves: Leaves, delta: float, adjacency: str) -> Check | None:
    """The check of one accountant; None if it is one for other mechanisms."""
    title = f"{EPSILON} of {what}, {name}"
    try:
        found = ACCOUNTANTS[name](leaves, delta, adjacency)
    except Inapplicable:
        return None
    except Unknown as error:
        return Check(title, NOT_CHECKED, str(error), {"claim": what, "supports": False})
    numbers = {"claim": what, "claimed": _spelt(claimed), "recomputed": _spelt(found.epsilon)}
    is_supported = not _is_below(claimed, found.epsilon)
    if name == PRV:
        detail = f"{claimed:.6g} claimed, {found.least:.6g} to {found.epsilon:.6g} recomputed"
        is_false = _is_below(claimed, found.least)
    else:
        detail = f"{claimed:.6g} claimed, {found.epsilon:.6g} recomputed{_apart(claimed, found.epsilon)}"
        is_false = not is_supported and name in TIGHT and found.coarseness <= TOLERANCE
    return Check(title, FAILED if is_false else OK, detail, numbers | {"supports": is_supported})


def _is_below(claimed: float, found: float) -> bool:
    return claimed < found * (1 - TOLERANCE) - SLACK


def _apart(claimed: float, found: float) -> str:
    if not math.isfinite(claimed) or found <= 0:
        return ""
    return f", {claimed / found - 1:+.2%}"


def _of_bins(report: Report, what: str, claimed: float, chains: tuple[int, ...], leaves: Leaves) -> list[Check]:
    """Balls in bins: the bound of a record whose bin is known, and a simulation."""
    delta, adjacency = report.delta, report.mechanism.adjacency
    is_tuned = any(isinstance(leaf, RepeatAndSelectDpEvent) for leaf, _ in leaves)
    known = (accountants.by_sum if is_tuned else accountants.by_gaussian)(leaves, delta, adjacency).epsilon
    is_above = not _is_below(claimed, known)
    detail = f"{claimed:.6g} claimed, {known:.6g} if the batches are known{_apart(claimed, known)}"
    numbers = {"claim": what, "claimed": _spelt(claimed), "recomputed": _spelt(known), "supports": is_above}
    checks = [Check(f"{EPSILON} of {what}, exact Gaussian", OK if is_above else NOT_CHECKED, detail, numbers)]
    title, numbers = f"{EPSILON} of {what}, {SIMULATION}", {"claim": what, "supports": False}
    try:
        if report.earlier:
            raise Unknown("earlier runs are not simulated")
        said, supports = bins.judge(bins.simulate(report.mechanism, chains, claimed), delta)
    except Contradiction as error:
        return [*checks, Check(title, FAILED, str(error), numbers)]
    except Unknown as error:
        return [*checks, Check(title, NOT_CHECKED, str(error), numbers)]
    return [*checks, Check(title, OK if supports else NOT_CHECKED, said, numbers | {"supports": supports})]


def _spelt(value: float) -> float | str:
    return value if math.isfinite(value) else "inf"
