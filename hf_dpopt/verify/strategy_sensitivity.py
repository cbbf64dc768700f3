"""Sensitivity of a strategy over the steps that a record may take part in."""

from __future__ import annotations

import dataclasses

import numpy as np

from hf_dpopt.verify.matrices import MOST_DENSE, ROUNDING, Strategy, tree_blocks
from hf_dpopt.verify.outcome import Unknown

MOST_WORK = 2 * 10**8  # numbers that are added up at full scale


@dataclasses.dataclass(frozen=True)
class Uses:
    """Steps in which a record may take part: k times at most, and b steps apart, exactly.

    Args:
        most: k; 1 for a record whose steps meet orthogonal columns, which then are mechanisms of their own.
        apart: b.
    """

    most: int
    apart: int

    def patterns(self, n: int) -> list[np.ndarray]:
        """All patterns of n steps that no other one contains."""
        if self.most == 1:
            return [np.array([t]) for t in range(n)]
        return [np.arange(first, n, self.apart)[: self.most] for first in range(min(self.apart, n))]


def by_formula(strategy: Strategy, n: int, uses: Uses) -> float:
    """Largest ``||C u||`` of n steps, exact or above it.

    Non-negative, non-increasing Toeplitz coefficients: the record of the first step (arXiv:2405.13763, Theorem 2).
    Columns that do not overlap: their norms. Trees: nodes are counted. Else the sizes of the inner products are added
    up over every pattern (arXiv:2306.08153, Eq. 5), which is exact where none is negative.

    Raises:
        Unknown: where there are too many steps for any of these.
    """
    coefs = strategy.coefficients(n)
    if coefs is not None:
        bands = int(np.flatnonzero(coefs)[-1]) + 1
        is_falling = bool((coefs >= 0).all() and (np.diff(coefs) <= ROUNDING * coefs[0]).all())
        first = uses.patterns(n)[0]  # it begins in the first step: of columns that are cut at the end, the longest
        if uses.most == 1 or bands <= uses.apart:
            return float(np.sqrt(np.cumsum(coefs**2)[::-1][first].sum()))
        if is_falling:
            return float(np.linalg.norm(_summed(coefs, first)))
        if n > MOST_DENSE and (coefs >= 0).all() and n * uses.apart * uses.most <= MOST_WORK:
            return max(float(np.linalg.norm(_summed(coefs, pattern))) for pattern in uses.patterns(n))
    if strategy.name == "tree":
        return _of_tree(strategy, n, uses)
    matrix = strategy.matrix(n)
    if (matrix >= 0).all():
        return max(float(np.linalg.norm(matrix[:, pattern].sum(axis=1))) for pattern in uses.patterns(n))
    gram = np.abs(matrix.T @ matrix)
    return float(np.sqrt(max(gram[np.ix_(pattern, pattern)].sum() for pattern in uses.patterns(n))))


def _summed(coefs: np.ndarray, pattern: np.ndarray) -> np.ndarray:
    total = np.zeros(len(coefs))
    for t in pattern:
        total[t:] += coefs[: len(coefs) - t]
    return total


def _of_tree(strategy: Strategy, n: int, uses: Uses) -> float:
    if n * n.bit_length() > MOST_WORK:
        raise Unknown(f"a tree of {n} steps is too large to count its nodes")
    blocks, worst = tree_blocks(strategy.fields, n), 0
    for pattern in uses.patterns(n):
        total = 0
        for first, end, size in blocks:
            inside = pattern[(pattern >= first) & (pattern < end)] - first
            for height in range(size.bit_length()):
                nodes, hits = np.unique(inside >> height, return_counts=True)
                total += int((hits[(nodes + 1) << height <= size] ** 2).sum())
        worst = max(worst, total)
    return float(np.sqrt(worst))
