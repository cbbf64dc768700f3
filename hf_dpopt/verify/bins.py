"""Balls in bins, by simulation: delta at the claimed epsilon, drawn from the dominating pair of the paper.

No accountant of dp-accounting or opacus knows these batches. The pair is ``P = mean_j N(m_j, s^2)`` against
``Q = N(0, s^2)`` (arXiv:2410.06266), so ``delta(eps)`` is a mean over draws; those are taken where the losses are near
epsilon, and weighted. What comes out has a standard error and is no proof, which the line says.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from scipy.special import logsumexp

from hf_dpopt.verify.outcome import Contradiction, Unknown
from hf_dpopt.verify.plan_events import Mechanism

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
