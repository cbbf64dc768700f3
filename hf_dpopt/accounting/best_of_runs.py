r"""Selection: the best of a random number of private runs, of which nothing else is released.

Best of a number that is known costs as many budgets as there were runs. A number that is drawn from a law with a heavy
tail, and stays secret, hides how good the others were: then the best costs less than three budgets, whatever the mean.

Formal guarantee: let Q be a private mechanism whose outputs are totally ordered, K drawn from a `RunCount` without
looking at the data, and A the best of K independent outputs of Q (for ``K = 0``, which a Poisson number can be, an
output that says so). `dp_accounting`'s ``RepeatAndSelectDpEvent`` has the Renyi divergences of A (Papernot and Steinke
2022, Thm. 2 and 6); `profile_epsilon` bounds its privacy profile, proven in docs/tuning.md. What is random in Q
includes the draw of hyperparameters, so that all K runs have one law.

References:
    Papernot and Steinke (2022), arXiv:2110.03620, Def. 1, Thm. 2 (truncated negative binomial), Thm. 6 (Poisson).
    Koskela, Redberg and Wang (2024), arXiv:2402.06701 (privacy profiles of private selection).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from dp_accounting import DpEvent
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from scipy import optimize, special

from hf_dpopt.common.checks import check_real
from hf_dpopt.common.errors import DPConfigError

MOST_RUNS = 1e4  # on average
MOST_SHAPE = 100.0
POISSON = "poisson"
CONDITIONS = np.concatenate([np.linspace(0.0, 4.0, 65), np.linspace(4.25, 12.0, 32)])
"""Epsilons at which `profile_epsilon` looks at the profile of a run: fewer only make the bound larger."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunCount:
    r"""Law of the number of runs.

    Truncated negative binomial: ``P[K = k]`` is proportional to ``(1 - gamma)^k Gamma(k + shape) / k!`` for k >= 1;
    shape 1 is the geometric law, shape 0 the logarithmic one. An infinite shape is the Poisson law, k >= 0.

    Args:
        mean: expected number of runs, > 1.
        shape: eta in the papers, from 0 to 100, or infinity. Smaller costs less, and spreads the number further.

    Raises:
        DPConfigError: for a value out of range.
    """

    mean: float
    shape: float = 1.0

    def __post_init__(self) -> None:
        check_real("tuned_runs", self.mean, "a number above 1, such as 10")
        if not 1 < self.mean <= MOST_RUNS:
            raise DPConfigError(
                f"tuned_runs={self.mean:g} is no mean of a random number of runs. Use a number above 1, such as 10, "
                f"up to {MOST_RUNS:g}; for one run, leave tuning out."
            )
        if math.isnan(self.shape) or not (0 <= self.shape <= MOST_SHAPE or self.shape == math.inf):
            raise DPConfigError(
                f"tuned_shape={self.shape:g} is no shape of a truncated negative binomial law. Use 0 to "
                f"{MOST_SHAPE:g} (1 is geometric, 0 logarithmic), or inf for a Poisson number."
            )

    @classmethod
    def read(cls, public: Mapping[str, Any]) -> RunCount:
        """The law that `public_dict` describes."""
        shape = math.inf if public["shape"] == POISSON else float(public["shape"])
        return cls(mean=float(public["mean"]), shape=shape)

    def public_dict(self) -> dict[str, Any]:
        """Plain JSON values, from which `read` makes it again."""
        return {"mean": float(self.mean), "shape": POISSON if self.shape == math.inf else float(self.shape)}

    def describe(self) -> str:
        """The law in words."""
        if self.shape == math.inf:
            return f"a Poisson number of mean {self.mean:g}"
        return f"a truncated negative binomial number of mean {self.mean:g} and shape {self.shape:g}"

    def event(self, run: DpEvent) -> RepeatAndSelectDpEvent:
        """Event of the best of so many runs."""
        return RepeatAndSelectDpEvent(run, float(self.mean), float(self.shape))

    @functools.cached_property
    def gamma(self) -> float:
        """Parameter of the truncated negative binomial law, in (0, 1), rounded down: a larger mean costs more."""
        if self.shape == 1:
            return 1 / self.mean

        def excess(log_gamma: float) -> float:
            return _mean(log_gamma, self.shape) - self.mean

        low = -1.0
        while excess(low) < 0:
            low *= 2
        return math.exp(optimize.brentq(excess, low, -1e-12, xtol=1e-14)) * (1 - 1e-9)

    def probability(self, count: int) -> float:
        """Probability of a number of runs."""
        if self.shape == math.inf:
            return math.exp(count * math.log(self.mean) - self.mean - math.lgamma(count + 1))
        if count < 1:
            return 0.0
        log_gamma, eta = math.log(self.gamma), self.shape
        log_power = count * math.log1p(-self.gamma)
        if eta == 0:
            return math.exp(log_power - math.log(count) - math.log(-log_gamma))
        ways = math.lgamma(count + eta) - math.lgamma(count + 1) - math.lgamma(eta)
        return math.exp(ways + log_power) / math.expm1(-eta * log_gamma)

    def draw(self, source: random.Random) -> int:
        """Draw the number of runs.

        Args:
            source: randomness that nobody can predict, such as `random.SystemRandom()`.
        """
        left, count = source.random(), 0
        while (left := left - self.probability(count)) > 0 and count < 1000 * self.mean:
            count += 1
        return count


def _mean(log_gamma: float, shape: float) -> float:
    """Mean of the truncated negative binomial law (Def. 1 of arXiv:2110.03620)."""
    odds = math.expm1(-log_gamma)  # 1 / gamma - 1
    return odds / -log_gamma if shape == 0 else shape * odds / -math.expm1(shape * log_gamma)


def profile_epsilon(
    count: RunCount, delta: float, epsilon_of: Callable[[float], float], delta_of: Callable[[float], float]
) -> float:
    r"""Upper bound on epsilon of the best of K runs, from the privacy profile of one.

    ``epsilon_Q(delta / m) + (1 + eta) log c``, with m the mean number of runs, ``T(s) = min_x (x s + delta_Q(log x))``
    the largest probability under one data set of what has probability s under the other, and ``c`` the largest of
    ``(gamma + (1 - gamma) T(s)) / (gamma + (1 - gamma) s)`` over s in [0, 1]. With a Poisson number
    ``epsilon_Q(delta / m) + m delta_Q(0)``. The proof is in docs/tuning.md; c is at most the published
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
    if count.shape == math.inf:
        return one_run + count.mean * delta_of(0.0)
    slopes = np.array([0.0, *np.exp(CONDITIONS)])  # probabilities are at most 1, and at most x s + delta_Q(log x)
    heights = np.array([1.0, *(min(1.0, delta_of(float(e))) for e in CONDITIONS)])
    return one_run + (1 + count.shape) * math.log(_largest_ratio(count.gamma, slopes, heights))


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
