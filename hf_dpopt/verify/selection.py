"""Epsilon of the best of a random number of runs, of which nothing else was released, recomputed from one run's event.

Two ways that are not the run's own: dp-accounting's Renyi bound (arXiv:2110.03620), and the privacy profile of one run
(arXiv:2402.06701) with the bound on its condition taken at many probabilities, one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from dp_accounting import ComposedDpEvent, SelfComposedDpEvent
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from scipy import optimize

from hf_dpopt.verify.outcome import Contradiction
from hf_dpopt.verify.reading import Fields

POISSON = "poisson"
STEPS = 64  # intervals of epsilon at which the profile is looked at, for each unit
LARGEST_CONDITION = 12
SHARES = 100_000  # probabilities at which the condition is computed


def read_law(plan: Fields) -> tuple[float, float] | None:
    """Mean and shape of the number of runs of which the best was released; None for a run by itself."""
    if not plan.has("tuned"):
        return None
    law = plan.inner("tuned")
    is_poisson = law.content.get("shape") == POISSON
    shape = math.inf if is_poisson else law.number("shape")
    mean = law.positive("mean")
    if mean <= 1 or shape < 0:
        raise Contradiction(f"no number of runs has mean {mean:g} and shape {shape:g}")
    return mean, shape


def best_of(leaves: list, law: tuple[float, float]) -> RepeatAndSelectDpEvent:
    """Event of the best of the runs."""
    run = ComposedDpEvent(tuple(SelfComposedDpEvent(leaf, count) for leaf, count in leaves))  # type: ignore[arg-type]
    return RepeatAndSelectDpEvent(run, *law)


def leaves_of(event: RepeatAndSelectDpEvent) -> list:
    """Mechanisms of one run, and how often each ran: what `best_of` was made of."""
    return [(part.event, part.count) for part in event.event.events]  # type: ignore[attr-defined]


def gamma_of(mean: float, shape: float) -> float:
    """Parameter of the truncated negative binomial law, from its mean, by the derivative of its generating function.

    The mean is ``f'(1) / (f(1) - f(0))`` of ``f(x) = (1 - (1 - gamma) x)^-shape``, or of its logarithm for shape 0.
    """

    def excess(gamma: float) -> float:
        if shape == 0:
            return (1 - gamma) / gamma / -math.log(gamma) - mean
        return shape * (1 - gamma) * gamma ** (-shape - 1) / (gamma**-shape - 1) - mean

    low = 0.5
    while excess(low) < 0:
        low /= 2
    return float(optimize.brentq(excess, low, 1 - 1e-9, xtol=1e-15))


def condition(law: tuple[float, float], delta_of: Callable[[float], float]) -> float:
    """Log of how much likelier a good output can be made by the other runs, under one data set than the other.

    Args:
        law: mean and shape of the number of runs.
        delta_of: delta of one run at an epsilon >= 0.
    """
    mean, shape = law
    if math.isinf(shape):
        return mean * delta_of(0.0)
    gamma = gamma_of(mean, shape)
    epsilons = np.arange(0, LARGEST_CONDITION * STEPS + 1) / STEPS
    deltas = np.array([delta_of(float(e)) for e in epsilons])
    better = np.concatenate([[0.0], np.geomspace(1e-9, 1.0, SHARES)])  # share of outputs that are better, ours
    most = np.ones_like(better)  # and the largest it can be under the other data set
    for e, d in zip(epsilons, deltas, strict=True):
        np.minimum(most, math.exp(e) * better + d, out=most)
    # between two of the shares: the larger numerator over the smaller denominator
    ratio = (gamma + (1 - gamma) * most[1:]) / (gamma + (1 - gamma) * better[:-1])
    return (1 + shape) * float(np.log(max(1.0, ratio.max())))
