r"""Selection: the best of a random number of private runs, of which nothing else is released.

Best of a number that is known costs as many budgets as there were runs. A number that is drawn from a law with a heavy
tail, and stays secret, hides how good the others were: then the best costs less than three budgets, whatever the mean.

Formal guarantee: let Q be a private mechanism whose outputs are totally ordered, K drawn from a `RunCount` without
looking at the data, and A the best of K independent outputs of Q. `dp_accounting`'s ``RepeatAndSelectDpEvent`` has the
Renyi divergences of A (Papernot and Steinke 2022, Thm. 2); `profile_epsilon` bounds its privacy profile, proven in
docs/proofs/best_of_runs.md. What is random in Q includes the draw of hyperparameters, so that all K runs have one law.

References:
    Papernot and Steinke (2022), arXiv:2110.03620, Def. 1, Thm. 2 (truncated negative binomial).
    Koskela, Redberg and Wang (2024), arXiv:2402.06701 (privacy profiles of private selection).
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from dp_accounting import DpEvent
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from scipy import special

from hf_dpopt.common.checks import check_real
from hf_dpopt.common.errors import DPConfigError, shown

MOST_RUNS = 1e4  # on average
SHAPE = 1.0  # eta of the geometric law among the truncated negative binomial ones
CONDITIONS = np.concatenate([np.linspace(0.0, 4.0, 65), np.linspace(4.25, 12.0, 32)])
"""Epsilons at which `profile_epsilon` looks at the profile of a run: fewer only make the bound larger."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunCount:
    r"""Geometric law of the number of runs: ``P[K = k] = gamma (1 - gamma)^(k - 1)`` for k >= 1, with gamma 1 / mean.

    It is the truncated negative binomial law of the papers with eta = 1.

    Args:
        mean: expected number of runs, > 1.

    Raises:
        DPConfigError: for a value out of range.
    """

    mean: float

    def __post_init__(self) -> None:
        check_real("tuned_runs", self.mean, "a number above 1, such as 10")
        if not 1 < self.mean <= MOST_RUNS:
            raise DPConfigError(
                f"tuned_runs={self.mean:g} is no mean of a random number of runs. Use a number above 1, such as 10, "
                f"up to {MOST_RUNS:g}; for one run, leave tuning out."
            )

    @classmethod
    def read(cls, public: Mapping[str, Any]) -> RunCount:
        """The law that `public_dict` describes.

        Raises:
            DPConfigError: for another law.
        """
        if public["shape"] != SHAPE:
            raise DPConfigError(
                f"tuned={shown(dict(public))} is not a geometric number of runs. Leave that run out, and add its "
                "epsilon and delta to those of this one."
            )
        return cls(mean=float(public["mean"]))

    def public_dict(self) -> dict[str, Any]:
        """Plain JSON values, from which `read` makes it again."""
        return {"mean": float(self.mean), "shape": SHAPE}

    def describe(self) -> str:
        """The law in words."""
        return f"a geometric number of mean {self.mean:g}"

    def event(self, run: DpEvent) -> RepeatAndSelectDpEvent:
        """Event of the best of so many runs."""
        return RepeatAndSelectDpEvent(run, float(self.mean), SHAPE)

    def probability(self, count: int) -> float:
        """Probability of a number of runs."""
        return (1 - 1 / self.mean) ** (count - 1) / self.mean if count >= 1 else 0.0

    def draw(self, source: random.Random) -> int:
        """Draw the number of runs.

        Args:
            source: randomness that nobody can predict, such as `random.SystemRandom()`.
        """
        left, count = source.random(), 0
        while (left := left - self.probability(count)) > 0 and count < 1000 * self.mean:
            count += 1
        return count


def profile_epsilon(
    count: RunCount, delta: float, epsilon_of: Callable[[float], float], delta_of: Callable[[float], float]
) -> float:
    r"""Upper bound on epsilon of the best of K runs, from the privacy profile of one.

    ``epsilon_Q(delta / m) + 2 log c``, with m = 1 / gamma the mean number of runs, ``T(s)`` the least
    ``x s + delta_Q(log x)`` over x, which is the largest probability under one data set of what has probability s
    under the other, and ``c`` the largest of ``(gamma + (1 - gamma) T(s)) / (gamma + (1 - gamma) s)`` over s in
    [0, 1]. The proof is in docs/proofs/best_of_runs.md; c is at most the published
    ``exp(e) + (1 / gamma - 1) delta_Q(e)`` for every e >= 0.

    Args:
        count: law of K.
        delta: delta of the bound, in (0, 1).
        epsilon_of: upper bound on epsilon of one run at a delta.
        delta_of: upper bound on delta of one run at an epsilon >= 0.
    """
    one_run = epsilon_of(delta / count.mean)
    if math.isinf(one_run):
        return math.inf
    slopes = np.array([0.0, *np.exp(CONDITIONS)])  # probabilities are at most 1, and at most x s + delta_Q(log x)
    heights = np.array([1.0, *(min(1.0, delta_of(float(e))) for e in CONDITIONS)])
    return one_run + (1 + SHAPE) * math.log(_largest_ratio(1 / count.mean, slopes, heights))


def _largest_ratio(gamma: float, slopes: np.ndarray, heights: np.ndarray) -> float:
    """Largest ``(gamma + (1 - gamma) T(s)) / (gamma + (1 - gamma) s)``, T being the least of some lines.

    Between two kinks both are linear, and their ratio is monotone: it is largest at 0, at 1, or where two lines meet.
    """
    rises, falls = slopes[:, None] - slopes[None, :], heights[None, :] - heights[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        meets = (falls / rises)[rises != 0]
    s = np.unique(np.concatenate([[0.0, 1.0], meets[(meets > 0) & (meets < 1)]]))
    largest = np.min(slopes[:, None] * s[None, :] + heights[:, None], axis=0)
    return max(1.0, float(np.max((gamma + (1 - gamma) * largest) / (gamma + (1 - gamma) * s))))


def gaussian_delta(noise_multiplier: float, epsilon: float) -> float:
    """Exact delta of a Gaussian mechanism (Balle and Wang 2018, arXiv:1805.06530, Thm. 8), rounded up.

    Args:
        noise_multiplier: noise stddev / sensitivity, > 0.
        epsilon: >= 0.
    """
    half, shift = 0.5 / noise_multiplier, epsilon * noise_multiplier
    first, second = special.log_ndtr(half - shift), epsilon + special.log_ndtr(-half - shift)
    return math.exp(first) * -math.expm1(min(0.0, second - first)) * (1 + 1e-9) + 1e-15
