"""Sensitivity of a strategy matrix C: the largest ``||C u||`` over the participation patterns u of one record.

Contributions are vectors of norm at most 1 (the clip); for matrices with ``C^T C >= 0`` entrywise, patterns of ones
are the worst case (arXiv:2211.06530, Section 2), and entries are replaced by their absolute values otherwise
(arXiv:2306.08153, Eq. 5). All functions return the sensitivity, not its square.

n = steps, k = participations, b = minimum separation.
"""

from __future__ import annotations

import numpy as np

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise.participation import Participation

ROUNDING = 1e-12  # coefficients are computed; a rise below this is rounding


def is_monotone(coefs: np.ndarray) -> bool:
    """Whether the coefficients are non-negative and non-increasing, as the exact theorem asks."""
    return bool((coefs >= 0).all() and (np.diff(coefs) <= ROUNDING * abs(coefs[0])).all())


def toeplitz_sensitivity(coefs: np.ndarray, participation: Participation) -> float:
    """Exact, for non-negative and non-increasing coefficients: the worst record takes part in steps 0, b, 2b, ...

    Args:
        coefs: first column of C over the steps of the run, (n,).
        participation: k and b; "fixed_epoch" has the same worst pattern.

    Raises:
        DPConfigError: for coefficients that are negative or increase.

    References:
        Kalinin and Lampert (2024), arXiv:2405.13763, Theorem 2.
    """
    if not is_monotone(coefs):
        raise DPConfigError(
            "The exact sensitivity needs coefficients that are >= 0 and do not increase; these do not. Use "
            "toeplitz_sensitivity_bound, which holds for all."
        )
    n, total = len(coefs), np.zeros(len(coefs))
    for first in range(0, participation.fits(n) * participation.min_sep, participation.min_sep):
        total[first:] += coefs[: n - first]
    return float(np.linalg.norm(total))


def toeplitz_sensitivity_bound(coefs: np.ndarray, participation: Participation) -> float:
    """An upper bound for any coefficients: the exact value of the smallest monotone sequence above their sizes."""
    majorant = np.maximum.accumulate(np.abs(coefs)[::-1])[::-1]
    return toeplitz_sensitivity(majorant, participation)


def banded_sensitivity(column_norms: np.ndarray, participation: Participation) -> float:
    """Exact, for a p-banded C (of any signs) and b >= p: the columns a record meets are orthogonal.

    Args:
        column_norms: L2 norms of the columns of C, (n,).
        participation: k and b.
    """
    squares = np.asarray(column_norms) ** 2
    if participation.kind == "fixed_epoch":
        return float(np.sqrt(_best_of_an_epoch(np.diag(squares), participation)))
    return float(np.sqrt(best_spaced_sum(squares[None, :], participation)[0]))


def gram_sensitivity(gram: np.ndarray, participation: Participation) -> float:
    """Sensitivity from ``C^T C``: exact for "fixed_epoch" if it is >= 0 entrywise; else an upper bound.

    Args:
        gram: (n, n).
        participation: k and b.

    References:
        Choquette-Choo et al. (2023), arXiv:2306.08153, Eq. 5 and Algorithm 4 (in O(n^2 k)).
    """
    sizes = np.abs(gram)
    if participation.kind == "fixed_epoch":
        return float(np.sqrt(_best_of_an_epoch(sizes, participation)))
    if participation.fits(len(gram)) == 1:
        return float(np.sqrt(sizes.diagonal().max()))
    rows = best_spaced_sum(sizes, participation)
    return float(np.sqrt(best_spaced_sum(rows[None, :], participation)[0]))


def best_spaced_sum(values: np.ndarray, participation: Participation) -> np.ndarray:
    """Largest sum of at most k entries of each row that are at least b apart; entries are >= 0; (rows,)."""
    num_rows, n = values.shape
    b = participation.min_sep
    best = np.zeros((n + 1, num_rows))  # best[t]: with the entries before t
    for _ in range(participation.fits(n)):
        of_more = np.zeros_like(best)
        for t in range(n):
            of_more[t + 1] = np.maximum(of_more[t], values[:, t] + best[max(0, t + 1 - b)])
        best = of_more
    return best[n]


def _best_of_an_epoch(sizes: np.ndarray, participation: Participation) -> float:
    n, b = len(sizes), participation.min_sep
    found = []
    for offset in range(min(b, n)):
        steps = np.arange(offset, n, b)[: participation.max_participations]
        found.append(sizes[np.ix_(steps, steps)].sum())
    return max(found)
