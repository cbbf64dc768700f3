"""Participation of a record in a run, and sensitivity of a strategy matrix C to it.

The sensitivity is the largest ``||C u||`` over the participation patterns u of one record. Contributions are vectors
of norm at most 1 (the clip); for matrices with ``C^T C >= 0`` entrywise, patterns of ones are the worst case
(arXiv:2211.06530, Section 2), and entries are replaced by their absolute values otherwise (arXiv:2306.08153, Eq. 5).
All functions return the sensitivity, not its square.

n = steps, k = participations, b = minimum separation.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import numpy as np

from hf_dpopt.common.checks import check_choice, check_count
from hf_dpopt.common.errors import DPConfigError

Kind = Literal["min_sep", "fixed_epoch"]


@dataclasses.dataclass(frozen=True)
class Participation:
    """The participation patterns that a sampler promises: sets of steps in which one record may be used.

    Args:
        max_participations: k, largest number of steps with the record; >= 1.
        min_sep: b, any two of them are at least this many steps apart; >= 1. 1 means that every step is allowed.
        kind: "min_sep" for every pattern within k and b; "fixed_epoch" for ``o, o + b, o + 2 b, ..`` alone, with any
            offset ``o < b`` (one order for all epochs of b steps).

    Raises:
        DPConfigError: for counts below 1 or an unknown kind.
    """

    max_participations: int = 1
    min_sep: int = 1
    kind: Kind = "min_sep"

    def __post_init__(self) -> None:
        check_count("max_participations", self.max_participations)
        check_count("min_sep", self.min_sep)
        check_choice("kind", self.kind, get_args(Kind))

    def fits(self, n: int) -> int:
        """Largest number of participations that fit into n steps."""
        return min(self.max_participations, -(-n // self.min_sep))

    def check(self, n: int) -> None:
        """Refuse more participations than n steps have room for: somebody counted epochs or steps wrong."""
        if self.fits(n) < self.max_participations:
            raise DPConfigError(
                f"{self.max_participations} participations at least {self.min_sep} steps apart do not fit into {n} "
                f"steps. Use max_participations <= {self.fits(n)}, a smaller min_sep, or more steps."
            )


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
    return float(np.linalg.norm(_worst_total(coefs, participation)))


def squared_sensitivity(coefs: np.ndarray, participation: Participation) -> tuple[float, np.ndarray]:
    """Square of `toeplitz_sensitivity` and its gradient, (n,); for coefficients that are >= 0 and do not increase."""
    n, total, slope = len(coefs), _worst_total(coefs, participation), np.zeros(len(coefs))
    for first in _worst_steps(n, participation):
        slope[: n - first] += 2 * total[first:]
    return float(total @ total), slope


def _worst_steps(n: int, participation: Participation) -> range:
    return range(0, participation.fits(n) * participation.min_sep, participation.min_sep)


def _worst_total(coefs: np.ndarray, participation: Participation) -> np.ndarray:
    """C u for the worst record, (n,)."""
    n, total = len(coefs), np.zeros(len(coefs))
    for first in _worst_steps(n, participation):
        total[first:] += coefs[: n - first]
    return total


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
