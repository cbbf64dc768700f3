"""Lower bounds on epsilon from one run: how well guesses of which canaries took part came out.

Every canary is in or out with probability 1/2, and the auditor guesses from scores (larger means "in") for those
with the highest and the lowest ones, and leaves out the others. The second bound asks for more and gives more:

* `one_run`: no assumption about the mechanism (Steinke, Nasr and Jagielski 2023, arXiv:2305.08846, Theorem 5.2).
* `independent`: that the trade-off curve is that of a Gaussian mechanism, that the scores of the canaries are
  independent of each other, as they are where every canary has coordinates and noise of its own, and that a threshold
  was fixed beforehand. With a single release of a Gaussian mechanism nothing is lost but the error of the sample (Nasr
  et al. 2023, arXiv:2302.07956, compare canaries so over many runs).

A bound that is far below the claim does not say that the claim is loose: the attack may be weak.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from dp_accounting import get_epsilon_gaussian
from scipy import special, stats

from hf_dpopt.common.errors import DPConfigError

SHARES = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # of the canaries that are guessed; each is a test of its own
LARGEST_EPSILON = 200.0


@dataclasses.dataclass(frozen=True)
class Guesses:
    """Numbers of guesses made, and of right ones.

    Attributes:
        num_canaries: m, canaries, each in or out by a draw of its own.
        num_guesses: r, canaries that were guessed; even.
        num_correct: v, right guesses.
    """

    num_canaries: int
    num_guesses: int
    num_correct: int


def guess(scores: np.ndarray, included: np.ndarray) -> tuple[Guesses, ...]:
    """Guess the extreme scores, for each of `SHARES`: half of them in, half out.

    Args:
        scores: one for each canary, (m,); the larger, the more likely in. Equal scores are ordered by a permutation
            that knows nothing of them, so that rows which stand in the order of `included` tell nothing.
        included: whether each took part, (m,), bool, with probability 1/2 each, independent of all else.

    Raises:
        DPConfigError: for scores that are not finite, another number of draws, or fewer than 2 canaries.
    """
    scores, included = np.asarray(scores, dtype=np.float64), np.asarray(included)
    if scores.ndim != 1 or scores.shape != included.shape or len(scores) < 2 or not np.isfinite(scores).all():
        raise DPConfigError(
            f"Scores of shape {scores.shape} and draws of shape {included.shape} make no audit. Give one finite score "
            "and one of 0 and 1 for each of at least 2 canaries."
        )
    if not np.isin(included, (0, 1)).all():
        raise DPConfigError("Whether a canary took part is 0 or 1; other values are there.")
    places = np.random.default_rng(len(scores)).permutation(len(scores))
    ins = included.astype(bool)[places[np.argsort(scores[places], kind="stable")]]
    halves = sorted({max(1, int(share * len(ins) / 2)) for share in SHARES})
    return tuple(Guesses(len(ins), 2 * k, int(ins[-k:].sum() + (~ins[:k]).sum())) for k in halves)


def lower_bounds(
    scores: np.ndarray,
    included: np.ndarray,
    *,
    delta: float,
    significance: float = 0.05,
    threshold: float | None = None,
) -> dict[str, float]:
    """Lower bounds on epsilon at `delta`, by method; each is wrong with probability at most `significance`.

    The numbers of guesses are fixed beforehand and share the significance (Bonferroni). 0: nothing is refuted.

    Args:
        scores: one for each canary, (m,); the larger, the more likely in.
        included: whether each took part, (m,), with probability 1/2 each.
        delta: failure probability of the claim.
        significance: largest probability of a bound that is too high, for each method.
        threshold: score above which a canary is more likely in than out, fixed before the scores were seen; the bound
            `independent` is made of it, and left out without one.

    Raises:
        DPConfigError: for scores that `guess` refuses, or delta or significance outside of (0, 1).
    """
    for name, value in (("delta", delta), ("significance", significance)):
        if not 0 < value < 1:
            raise DPConfigError(f"{name}={value} makes no bound. Use a number between 0 and 1.")
    trials = guess(scores, included)
    each = significance / len(trials)
    bounds = {"one_run": max(_largest_refuted(t, each, delta) for t in trials)}
    if threshold is not None:
        num_correct = int(((np.asarray(scores) > threshold) == np.asarray(included).astype(bool)).sum())
        bounds["independent"] = epsilon_of_gaussian(_mu_if_independent(len(scores), num_correct, significance), delta)
    return bounds


def one_run_p_value(guesses: Guesses, epsilon: float, delta: float) -> float:
    """Largest probability with which an (epsilon, delta)-DP mechanism lets so many guesses be right.

    Source: arXiv:2305.08846, Theorem 5.2 with Algorithm 1: ``beta + 2 m delta max_i (P[B >= v - i] - beta) / i`` with
    ``B ~ Bin(r, e^eps / (1 + e^eps))`` and ``beta = P[B >= v]``.
    """
    right = 1 / (1 + math.exp(-epsilon))
    v, r = guesses.num_correct, guesses.num_guesses
    beta = float(stats.binom.sf(v - 1, r, right))
    i = np.arange(1, v + 1)
    alpha = float(np.max((stats.binom.sf(v - i - 1, r, right) - beta) / i, initial=0.0))
    return min(1.0, beta + 2 * guesses.num_canaries * delta * alpha)


def _mu_if_independent(num_canaries: int, num_correct: int, significance: float) -> float:
    """Smallest mu that independent guesses do not refute: each is right with probability at most Phi(mu / 2).

    The probability has the one-sided bound of Clopper and Pearson (1934).
    """
    if num_correct == 0:
        return 0.0
    right = float(stats.beta.ppf(significance, num_correct, num_canaries - num_correct + 1))
    return max(0.0, 2 * float(special.ndtri(right)))


def _largest_refuted(guesses: Guesses, significance: float, delta: float) -> float:
    """Largest epsilon that is refuted, to 1e-4; 0 if none is. What is refuted at x is refuted below."""

    def is_refuted(epsilon: float) -> bool:
        return one_run_p_value(guesses, epsilon, delta) <= significance

    if not is_refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while high < LARGEST_EPSILON and is_refuted(high):
        low, high = high, 2 * high
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if is_refuted(middle) else (low, middle)
    return low


def epsilon_of_gaussian(mu: float, delta: float) -> float:
    """Epsilon at `delta` of a mu-GDP mechanism (Dong, Roth and Su 2022, arXiv:1905.02383, Corollary 2.13)."""
    return float(get_epsilon_gaussian(1 / mu, delta)) if mu > 0 else 0.0
