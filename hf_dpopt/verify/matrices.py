"""Strategy matrices and their sensitivity, written again from the papers: what the `noise_strategy` of a plan means.

The library makes the same matrices in other ways (products of ratios, residues); where both agree, neither is a slip.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from scipy.linalg import block_diag, toeplitz
from scipy.signal import lfilter
from scipy.special import gammaln

from hf_dpopt.verify.outcome import Contradiction, Unknown
from hf_dpopt.verify.reading import Fields

MOST_DENSE = 3000  # steps of a matrix that is written out
MOST_WORK = 2 * 10**8  # numbers that are added up at full scale
ROUNDING = 1e-9  # relative, of coefficients that were computed in two ways


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A strategy as a plan records it.

    Args:
        fields: the entry of the plan.
    """

    fields: Fields

    @property
    def name(self) -> str:
        """Name of the strategy."""
        return self.fields.text("name")

    @property
    def is_independent(self) -> bool:
        """Whether C is the identity."""
        return self.name == "identity"

    @property
    def base(self) -> Strategy:
        """Strategy that this one repeats."""
        return Strategy(self.fields.inner("base"))

    @property
    def is_anytime(self) -> bool:
        """Whether the first steps of a run are a run of their own."""
        if self.name == "restarted":
            return self.base.is_anytime
        return self.name in COEFFICIENTS or self.name == "tree"

    def coefficients(self, n: int) -> np.ndarray | None:
        """First column of C, (n,), where C is Toeplitz; else None."""
        if self.name not in COEFFICIENTS:
            return None
        found = COEFFICIENTS[self.name](self.fields, n)
        if not np.isfinite(found).all() or not found[0] > 0:
            raise Contradiction(f"the coefficients of {self.name} are not finite, or the first one is not above 0")
        return found

    def matrix(self, n: int) -> np.ndarray:
        """C of n steps, one column a step; (rows, n).

        Raises:
            Unknown: for a strategy whose matrix is not in the plan, or too many steps to write it out.
        """
        if n > MOST_DENSE:
            raise Unknown(f"the matrix of {self.name} noise for {n} steps is too large to be written out")
        coefs = self.coefficients(n)
        if coefs is not None:
            return np.tril(toeplitz(coefs))
        if self.name not in MATRICES:
            raise Unknown(f"the matrix of {self.name!r:.40} noise does not stand in the report")
        return MATRICES[self.name](self, n)


# --- Toeplitz --------------------------------------------------------------------------------------------------------


def _identity(fields: Fields, n: int) -> np.ndarray:
    return np.eye(1, n)[0]


def _nu_dpftrl(fields: Fields, n: int) -> np.ndarray:
    """``(1 - (1 - nu) z)^(-1/2)``: binomials (2t over t) / 4^t, arXiv:2310.06771."""
    nu, t = fields.number("nu"), np.arange(n)
    if nu > 1:
        raise Contradiction(f"nu={nu:g} is outside [0, 1]")
    return np.exp(gammaln(2 * t + 1) - 2 * gammaln(t + 1) - t * np.log(4.0)) * (1 - nu) ** t


def _blt(fields: Fields, n: int) -> np.ndarray:
    """``prod (1 - zeros z) / (1 - poles z)`` as a filter of an impulse, arXiv:2404.16706."""
    poles, zeros = fields.numbers("poles"), fields.numbers("zeros")
    return lfilter(np.poly(zeros), np.poly(poles), np.eye(1, n)[0])


def _banded(fields: Fields, n: int) -> np.ndarray:
    coefs = fields.numbers("coefs")
    return np.concatenate([coefs, np.zeros(max(0, n - len(coefs)))])[:n]


def _banded_inverse(fields: Fields, n: int) -> np.ndarray:
    return lfilter([1.0], fields.numbers("coefs"), np.eye(1, n)[0])


COEFFICIENTS = {
    "identity": _identity,
    "nu_dpftrl": _nu_dpftrl,
    "blt": _blt,
    "banded": _banded,
    "banded_inverse": _banded_inverse,
}


# --- others ----------------------------------------------------------------------------------------------------------


def _tree(strategy: Strategy, n: int) -> np.ndarray:
    """A row of ones for every complete aligned block of ``2^h`` steps, arXiv:2103.00039."""
    blocks = [_nodes(size)[:, : end - first] for first, end, size in tree_blocks(strategy.fields, n)]
    return block_diag(*blocks)


def tree_blocks(fields: Fields, n: int) -> list[tuple[int, int, int]]:
    """First step, end, and steps of the tree, of each tree of a run; a tree may be completed by empty steps."""
    every = fields.count("restart_every") if fields.has("restart_every") else n
    is_completed = fields.has("restart_every") and fields.flag("tree_completion")
    found = []
    for first in range(0, n, every):
        end = min(first + every, n)
        size = 1 << (every - 1).bit_length() if is_completed else every
        found.append((first, end, size if first + every <= n else end - first))
    return found


def _nodes(size: int) -> np.ndarray:
    rows = []
    for height in range(size.bit_length()):
        for first in range(0, size - (1 << height) + 1, 1 << height):
            row = np.zeros(size)
            row[first : first + (1 << height)] = 1
            rows.append(row)
    return np.array(rows)


def _copies(strategy: Strategy, n: int) -> np.ndarray:
    every = strategy.fields.count("every")
    return block_diag(*[strategy.base.matrix(min(every, n - first)) for first in range(0, n, every)])


MATRICES = {
    "tree": _tree,
    "restarted": _copies,
}


# --- sensitivity over the steps that a record may take part in -----------------------------------------------------


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
