"""Recomputation of a claimed epsilon by every accountant that knows its events, and of the claims on attackers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.special import logsumexp

from hf_dpopt.verify import other_accountants
from hf_dpopt.verify.claims import Report
from hf_dpopt.verify.other_accountants import SLACK, TOLERANCE, Recomputed
from hf_dpopt.verify.outcome import (
    EPSILON,
    FAILED,
    NOT_CHECKED,
    OK,
    SIMULATION,
    Check,
    Contradiction,
    Inapplicable,
    Unknown,
    attempt,
)
from hf_dpopt.verify.plan_events import ALLOWED, Leaves, Mechanism
from hf_dpopt.verify.reading import Fields

SEED = 20240917
DRAWS = 200_000
AT_ONCE = 20_000_000  # numbers in memory
SHIFTS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0)  # of the means that are drawn from, relative to those of P
PRECISE = 0.02  # relative standard error of delta, at most
ABOVE = 0.03  # relative, by which the estimate may lie above delta: a few per mille of epsilon
ERRORS = 4.0  # standard errors beyond which a claim is refuted


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Delta at an epsilon, with its standard error."""

    delta: float
    error: float


def simulate(mechanism: Mechanism, chains: tuple[int, ...], epsilon: float) -> Estimate:
    """Delta at `epsilon` of all chains together, the larger one of record added and record removed.

    Raises:
        Unknown: if there are too many bins, or no draws come near epsilon.
    """
    roots = [_Chain(mechanism.grams(steps)) for steps in chains if steps > 0]
    found = []
    for is_removed in (True, False):
        tried = [_estimate(roots, epsilon, shift, is_removed, DRAWS // 20) for shift in SHIFTS]
        usable = [(t.error / t.delta, shift) for t, shift in zip(tried, SHIFTS, strict=True) if t.delta > 0]
        if usable:
            found.append(_estimate(roots, epsilon, min(usable)[1], is_removed, DRAWS))
    if not found:
        raise Unknown("no draw of the simulation came near the claimed epsilon")
    return max(found, key=lambda estimate: estimate.delta)


class _Chain:
    """One chain: draws of ``<y, m_j> / s^2`` for all bins, and the log density of P relative to Q."""

    def __init__(self, gram: np.ndarray):
        self.gram = gram
        values, vectors = np.linalg.eigh(gram)
        self.root = vectors * np.sqrt(np.maximum(values, 0.0))

    def draw(self, rng: np.random.Generator, num: int, shift: float) -> np.ndarray:
        """Inner products under the mixture whose means are `shift` times those of P, (num, bins)."""
        bins = rng.integers(len(self.gram), size=num)
        noise = rng.standard_normal((num, len(self.gram))) @ self.root.T
        return noise + shift * self.gram[bins]

    def log_ratio(self, products: np.ndarray, shift: float) -> np.ndarray:
        """Log density of the mixture with `shift` relative to that of Q, (num,)."""
        terms = shift * products - shift**2 * np.diag(self.gram) / 2
        return logsumexp(terms, axis=1) - math.log(len(self.gram))


def _estimate(chains: list[_Chain], epsilon: float, shift: float, is_removed: bool, num: int) -> Estimate:
    """``E_P (1 - e^(eps - L))_+`` if the record is removed, ``E_Q (1 - e^(eps + L))_+`` if it is added."""
    rng = np.random.default_rng(SEED)
    sign = 1.0 if is_removed else -1.0  # where P and Q change places, losses near -epsilon matter
    total, squares, done = 0.0, 0.0, 0
    at_once = max(1, AT_ONCE // max(len(chain.gram) for chain in chains))
    while done < num:
        size = min(at_once, num - done)
        loss, drawn = np.zeros(size), np.zeros(size)
        for chain in chains:
            products = chain.draw(rng, size, sign * shift)
            loss += chain.log_ratio(products, 1.0)
            drawn += chain.log_ratio(products, sign * shift)
        weight = np.exp((loss if is_removed else 0.0) - drawn)
        values = weight * np.maximum(0.0, -np.expm1(np.minimum(0.0, epsilon - sign * loss)))
        total, squares, done = total + values.sum(), squares + (values**2).sum(), done + size
    mean = total / done
    return Estimate(float(mean), math.sqrt(max(squares / done - mean**2, 0.0) / done))


def judge(estimate: Estimate, delta: float) -> tuple[str, bool]:
    """Sentence on an estimate, and whether it supports the claim.

    Raises:
        Contradiction: if delta is larger than was claimed, by more than chance explains.
        Unknown: if the estimate is too coarse to say.
    """
    says = f"delta {estimate.delta:.3g} +- {estimate.error:.1g} at the claimed epsilon, {delta:g} claimed"
    if estimate.delta - ERRORS * estimate.error > delta * (1 + ABOVE):
        raise Contradiction(f"{says}: more than chance explains")
    if estimate.delta + 2 * estimate.error <= delta:
        return f"{says} (simulated, no proof)", True
    if estimate.error > PRECISE * estimate.delta:
        raise Unknown(f"{says}: too coarse to tell")
    return f"{says} (simulated, no proof)", estimate.delta <= delta * (1 + ABOVE)


PRV = "opacus PRV"
ACCOUNTANTS: dict[str, Callable[[Leaves, float, str, float], Recomputed]] = {
    "exact Gaussian": other_accountants.by_gaussian,
    "dp-accounting PLD": other_accountants.by_pld,
    PRV: other_accountants.by_prv,
}
RATE_TOLERANCE = 0.01  # relative, by which a claimed rate may lie below a recomputed one: grids differ


def check_epsilons(report: Report) -> list[Check]:
    """Recompute every epsilon that a report claims."""
    planned: tuple[int, ...] = (report.planned_steps,)
    charged = planned if report.known_ledger is None else report.ledger.charged
    of_plan, of_charged = report.epsilons.values()
    if charged != planned:
        checks = attempt_epsilon(_of_steps, report, "the plan", of_plan, planned)
        checks += attempt_epsilon(_of_steps, report, "the steps charged", of_charged, charged)
    else:  # the same steps, so the same cost
        claimed = of_plan if report.known_ledger is None else min(of_plan, of_charged)
        checks = attempt_epsilon(_of_steps, report, "the plan", claimed, planned)
    if report.fields.has("epsilon_replace_one"):
        checks += attempt_epsilon(_of_swapped, report, "a swapped record")
    return checks


def attempt_epsilon(look: Callable[..., list[Check]], report: Report, what: str, *args: Any) -> list[Check]:
    """The checks that `look` makes of the report and what was claimed, or the one that says why it cannot."""
    return attempt(f"{EPSILON} of {what}", look, report, what, *args, claim=what, supports=False)


def _of_steps(report: Report, what: str, claimed: float, chains: tuple[int, ...]) -> list[Check]:
    leaves = leaves_of(report, chains)
    if report.has_bins:
        return _of_bins(report, what, claimed, chains, leaves)
    return check_epsilon(what, claimed, leaves, report.delta, report.mechanism.adjacency)


def _of_swapped(report: Report, what: str) -> list[Check]:
    """Epsilon if one record is swapped for another, which is no part of the claim but stands in the report."""
    claimed = report.fields.number("epsilon_replace_one", may_be_infinite=True)
    for mechanism in (report.mechanism, *report.earlier):
        if "replace_one" not in ALLOWED[mechanism.sampler]:
            raise Contradiction(f"{mechanism.sampler} has no proof under replace_one, and {claimed:.6g} is claimed")
    if not math.isfinite(claimed):
        return []
    return check_epsilon(what, claimed, leaves_of(report, report.most_steps), report.delta, "replace_one")


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
    title = f"{EPSILON} of {what}"
    if not leaves:
        return [Check(title, OK, f"nothing was released; {claimed:.6g} is claimed", {"claim": what, "supports": True})]
    known: dict[str, Recomputed] = {}
    unknown: list[Check] = []
    for name, recompute in ACCOUNTANTS.items():
        try:
            known[name] = recompute(leaves, delta, adjacency, claimed)
        except Inapplicable:
            continue
        except Unknown as error:
            unknown.append(Check(f"{title}, {name}", NOT_CHECKED, str(error), {"claim": what, "supports": False}))
    if not (known or unknown):
        raise Unknown(f"no accountant here knows these batches under {adjacency}")
    is_supported = any(not _is_below(claimed, one.epsilon) for one in known.values())
    # where one bound supports the claim, one that is less tight refutes nothing
    refuting = [n for n, one in known.items() if _is_below(claimed, one.least) and (n == PRV or not is_supported)]
    checks = []
    for name, one in known.items():
        status = FAILED if name in refuting else OK if is_supported or refuting else NOT_CHECKED
        said = f"{one.epsilon:.6g} recomputed{_apart(claimed, one.epsilon)}"
        if status == OK and _is_below(claimed, one.epsilon):
            said += ", a looser bound"
        if name == PRV:
            said = f"{one.least:.6g} to {one.epsilon:.6g} recomputed"
        checks.append(_comparison(f"{title}, {name}", status, what, claimed, one.epsilon, said))
    return checks + unknown


def _comparison(title: str, status: str, what: str, claimed: float, found: float, said: str) -> Check:
    is_supported = not _is_below(claimed, found)
    numbers = {"claim": what, "claimed": _spelt(claimed), "recomputed": _spelt(found), "supports": is_supported}
    return Check(title, status, f"{claimed:.6g} claimed, {said}", numbers)


def _is_below(claimed: float, found: float) -> bool:
    return claimed < found * (1 - TOLERANCE) - SLACK


def _apart(claimed: float, found: float) -> str:
    return f", {claimed / found - 1:+.2%}" if math.isfinite(claimed) and found > 0 else ""


def _spelt(value: float) -> float | str:
    return value if math.isfinite(value) else "inf"


def _of_bins(report: Report, what: str, claimed: float, chains: tuple[int, ...], leaves: Leaves) -> list[Check]:
    """Balls in bins: the bound of a record whose bin is known, and a simulation."""
    known = other_accountants.by_gaussian(leaves, report.delta, report.mechanism.adjacency, claimed).epsilon
    status = NOT_CHECKED if _is_below(claimed, known) else OK
    said = f"{known:.6g} if the batches are known{_apart(claimed, known)}"
    bound = _comparison(f"{EPSILON} of {what}, exact Gaussian", status, what, claimed, known, said)
    title = f"{EPSILON} of {what}, {SIMULATION}"
    return [bound, *attempt(title, _simulated, report, title, what, claimed, chains, claim=what, supports=False)]


def _simulated(report: Report, title: str, what: str, claimed: float, chains: tuple[int, ...]) -> list[Check]:
    if report.earlier:
        raise Unknown("earlier runs are not simulated")
    detail, supports = judge(simulate(report.mechanism, chains, claimed), report.delta)
    return [Check(title, OK if supports else NOT_CHECKED, detail, {"claim": what, "supports": supports})]


def check_attackers(report: Report) -> str:
    """The claimed true-positive rates against an independent bound on the best attacker."""
    if not report.fields.content.get("meaning"):
        raise Inapplicable("nothing is said of attackers")
    leaves = leaves_of(report, report.most_steps)
    rows = report.fields.inner("meaning").content.get("true_positives")
    if not isinstance(rows, list) or not rows:
        raise Contradiction("it states what epsilon means, and no rates of attackers")
    found = []
    for content in rows:
        row = Fields(content, "the rates of an attacker")
        false, claimed = row.positive("false_positives"), row.number("whole_profile")
        if not false < 1 or claimed > 1:
            raise Contradiction(f"{false:g} and {claimed:g} are no rates")
        recomputed = other_accountants.true_positives(
            leaves, false, report.epsilon, report.delta, report.mechanism.adjacency
        )
        said = f"{claimed:.4g} claimed, {recomputed:.4g}"
        if claimed < recomputed * (1 - RATE_TOLERANCE):
            if report.has_bins:
                raise Unknown(f"at {false:.3g} false positives, {said} if the batches are known")
            raise Contradiction(f"at {false:.3g} false positives, the most true ones are {said} recomputed")
        found.append(f"{said} recomputed at {false:g}")
    return "; ".join(found)
