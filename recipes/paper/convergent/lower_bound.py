r"""A lower bound on the privacy loss of the last iterate: two runs that a threshold tells apart.

The instance is that of Altschuler and Talwar (2022), arXiv:2205.13710, Theorem 4.1: on a line, K an interval of length
D, every record has the loss 0 but for one, whose loss is ``L w``. Without that record the last iterate is a walk with
steps ``N(0, (eta sigma)^2)``, stopped at the ends of the interval; with it, steps in which the record is sampled are
``eta L / b`` to the left. The losses are convex, L-Lipschitz and smooth, so no bound that holds for all runs which
`ProjectedSGD` describes lies below what tells the two walks apart.

The theorem is about Renyi divergences, of the order of ``min(T, n D / (eta L))``, up to constants. Here the
distribution functions of both walks are computed, and epsilon is that of the best event "the last iterate is at most
(or above) a". So it is a lower bound on the epsilon of this pair, and with it on that of the worst case.

The computation, in units of the noise of a step: ``F_{t+1}(y) = E F_t((y + drift - z) / (1 - eta l2))``, F = 0 left of
K and 1 right of it. F is smooth inside, so it is kept as polynomials on panels that are narrow around the start and
the ends and grow with the distance from them; an integral is a Gauss-Legendre sum, and T steps are about log2(T)
products of matrices. `ERROR` is added to a probability that should be small, and taken from one that should be large.
It is measured, not proven: the tests compare with closed forms and finer panels, and with grids that are proven to
bracket the walks.

    python -m recipes.paper.convergent.lower_bound --output_dir runs/convergent

has both bounds of the first head of docs/convex.md, by the number of steps.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import sparse, special

from hf_dpopt.common.checks import check_count
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.convex.head_plan import HeadConfig, HeadPlan, make_head_plan
from hf_dpopt.convex.last_iterate import ProjectedSGD, last_iterate_epsilon
from recipes.paper.runs import experiment

ERROR = 1e-10  # of a probability: a hundred times the largest difference to finer panels that was found
NODES = 12  # of the polynomial on a panel
NARROWEST = 1.5  # panel, in units of the noise of a step
GROWTH = 0.4  # width of a panel over its distance from the start and the ends
RESOLVED = 2.0  # widest panel, over the stddev of the walk when it gets there
TAIL = 8.0  # stddevs; no walk gets further than that with probability 1e-14
PIECES = 12  # of the range of a step, in its integral
THRESHOLDS = 41  # of the events that are tried, on a panel
MOST = 80.0  # drift times half of the interval, in units of the noise: beyond, epsilon is above what ERROR can show


def last_iterate_lower_epsilon(run: ProjectedSGD, delta: float) -> float:
    """Epsilon, at delta, below which no bound on the last iterate of such a run can lie.

    Formal guarantee: there are convex losses, an initial weight and two datasets that differ in one record
    (``add_or_remove_one``, Poisson batches, a step size that does not change) for which the last iterate is not
    (epsilon', delta)-differentially private for any epsilon' below the result, numerical error of up to `ERROR` in a
    probability included. Epsilon is never above ``-log(ERROR)``, about 23.

    Args:
        run: what runs; its smoothness and dimension do not matter.
        delta: delta of the guarantee, in (0, 1).

    Raises:
        DPConfigError: for step sizes that decay.

    References:
        Altschuler and Talwar (2022), arXiv:2205.13710, Theorem 4.1 (the instance).
    """
    return last_iterate_lower_epsilons(run, [run.num_steps], delta)[0]


def last_iterate_lower_epsilons(run: ProjectedSGD, steps: Sequence[int], delta: float) -> list[float]:
    """`last_iterate_lower_epsilon` at several numbers of steps, from the same matrices.

    Args:
        run: its number of steps is not used.
        steps: numbers of steps, >= 1, in any order.
        delta: delta of the guarantee, in (0, 1).
    """
    for num_steps in steps:
        check_count("steps", num_steps)
    if not 0 < delta < 1:
        raise DPConfigError(f"delta={delta} is outside (0, 1). Use at most 1 / number of records.")
    if run.decay:
        raise DPConfigError(f"decay={run.decay:g}: the walk of the lower bound has steps of one size. Use decay=0.")
    if not run.noise_multiplier:
        return [math.inf] * len(steps)
    if not steps:
        return []
    walk = _walk_of(run, max(steps))
    if walk.drift * run.noise_multiplier < 1 - 1e-12 and len(steps) > 1:  # fewer steps bear a larger slope
        return [last_iterate_lower_epsilons(run, [num_steps], delta)[0] for num_steps in steps]
    without = _laws(dataclasses.replace(walk, drift=0.0), steps, walk)
    with_it = _laws(walk, steps, walk)
    edges = _edges(walk)
    places = (edges[:-1, None] + np.diff(edges)[:, None] * np.linspace(0, 1, THRESHOLDS)).ravel()
    between = _interpolation(places, edges, len(_nodes(edges)))
    return [_told_apart(between @ without[num_steps], between @ with_it[num_steps], delta) for num_steps in steps]


@dataclasses.dataclass(frozen=True)
class _Walk:
    """A walk on an interval that starts in its middle; lengths in units of the noise of a step.

    Attributes:
        half: half of the interval's length, or less where the walk does not get further.
        contraction: factor of the position in a step, in (0, 1].
        drift: distance to the left that the record adds to a step; >= 0.
        sample_rate: probability of such a step.
        num_steps: the most steps that are asked for.
    """

    half: float
    contraction: float
    drift: float
    sample_rate: float
    num_steps: int

    def spread(self) -> tuple[np.ndarray, np.ndarray]:
        """Distance that is not exceeded, and stddev, after numbers of steps that grow to all of them."""
        t = np.unique(np.geomspace(1, self.num_steps, 200).round())
        shrink = math.log(self.contraction)
        terms = np.expm1(t * shrink) / math.expm1(shrink) if shrink else t
        squares = np.expm1(2 * t * shrink) / math.expm1(2 * shrink) if shrink else t
        stddev = np.sqrt(squares)
        sampled = self.drift * (self.sample_rate * terms + TAIL * math.sqrt(self.sample_rate) * stddev)
        return np.minimum(sampled, self.drift * terms) + TAIL * stddev, stddev


def _walk_of(run: ProjectedSGD, num_steps: int) -> _Walk:
    """Walk of the record whose loss is ``share L w``: the largest share that keeps the numbers small, 1 nearly always.

    A smaller slope is a loss that is L-Lipschitz too, so the bound stays one.
    """
    half = run.diameter * run.expected_batch_size / (2 * run.step_size * run.lipschitz * run.noise_multiplier)
    walk = _Walk(math.inf, 1 - run.step_size * run.l2, 1 / run.noise_multiplier, run.sample_rate, num_steps)
    while True:
        reach = float(walk.spread()[0][-1])
        if walk.drift * walk.sample_rate * min(half, reach) <= MOST:
            return dataclasses.replace(walk, half=min(half, reach))
        walk = dataclasses.replace(walk, drift=0.9 * walk.drift)


def _told_apart(without: np.ndarray, with_it: np.ndarray, delta: float) -> float:
    """Largest epsilon with ``P(A) - e^epsilon Q(A) > delta``: A below or above a place, P and Q in either order."""
    pairs = [(with_it, without), (without, with_it)]
    pairs += [(1 - p, 1 - q) for p, q in pairs]
    ratios = [(p - ERROR - delta) / (np.clip(q, 0, 1) + ERROR) for p, q in pairs]
    return math.log(max(1.0, float(np.max(ratios))))


# --- distribution functions ------------------------------------------------------------------------------------------


def _laws(walk: _Walk, steps: Sequence[int], layout: _Walk) -> dict[int, np.ndarray]:
    """Distribution functions at the nodes of `layout`, left limits at the right end, after each number of steps."""
    edges = _edges(layout)
    y = _nodes(edges)
    powers = [_step(walk, y, edges)]
    while 2 ** len(powers) <= max(steps) - 1:
        matrix, offset = powers[-1]
        powers.append((matrix @ matrix, matrix @ offset + offset))
    # the first step starts in one point
    first = sum(rate * special.ndtr(y + drift) for rate, drift in _kinds(walk))
    found = {}
    for num_steps in set(steps):
        law, left = first, num_steps - 1
        for i, (matrix, offset) in enumerate(powers):
            if left >> i & 1:
                law = matrix @ law + offset
        found[num_steps] = law
    return found


def _kinds(walk: _Walk) -> list[tuple[float, float]]:
    """Probability and drift of the kinds of steps."""
    if not walk.drift:
        return [(1.0, 0.0)]
    return [(rate, drift) for rate, drift in ((1 - walk.sample_rate, 0.0), (walk.sample_rate, walk.drift)) if rate]


def _step(walk: _Walk, y: np.ndarray, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Matrix and offset that make the distribution function after a step of that before it."""
    c, half = walk.contraction, walk.half
    x, weights = np.polynomial.legendre.leggauss(16)
    matrix, offset = np.zeros((len(y), len(y))), np.zeros(len(y))
    for rate, drift in _kinds(walk):
        middle = (y + drift) / c
        low, high = np.clip(middle - 9 / c, -half, half), np.clip(middle + 9 / c, -half, half)
        cuts = low[:, None] + (high - low)[:, None] * np.linspace(0, 1, PIECES + 1)
        widths = np.diff(cuts, axis=1)[..., None]
        v = cuts[:, :-1, None] + widths * (x + 1) / 2
        density = c * np.exp(-((y[:, None, None] + drift - c * v) ** 2) / 2) / math.sqrt(2 * math.pi)
        mass = sparse.csr_array(
            ((density * widths * weights / 2).ravel(), np.arange(v.size), np.arange(len(y) + 1) * (PIECES * 16)),
            shape=(len(y), v.size),
        )
        matrix += rate * (mass @ _interpolation(v.ravel(), edges, len(y))).toarray()
        offset += rate * special.ndtr(y + drift - c * half)
    return matrix, offset


def _edges(walk: _Walk) -> np.ndarray:
    """Ends of the panels, from left to right."""
    reach, stddev = walk.spread()
    places = [0.0]
    while places[-1] < walk.half:
        r = places[-1]
        distance = min(r, walk.half - r)  # a panel ends nearer to the end of the interval than it begins
        when = min(int(np.searchsorted(reach, r)), len(stddev) - 1)
        width = max(NARROWEST, min(GROWTH * distance, RESOLVED * stddev[when]))
        if r + width < walk.half:
            width = max(NARROWEST, min(width, GROWTH * (walk.half - r - width)))
        places.append(r + width if r + 1.5 * width < walk.half else walk.half)
    right = np.array(places)
    return np.concatenate([-right[:0:-1], right])


def _unit_nodes() -> np.ndarray:
    """Chebyshev points of the second kind on [-1, 1], increasing, ends included."""
    return -np.cos(np.pi * np.arange(NODES) / (NODES - 1))


def _nodes(edges: np.ndarray) -> np.ndarray:
    middles, halves = (edges[1:] + edges[:-1]) / 2, np.diff(edges) / 2
    return (middles[:, None] + halves[:, None] * _unit_nodes()).ravel()


def _interpolation(v: np.ndarray, edges: np.ndarray, size: int) -> sparse.csr_array:
    """Matrix that makes values at `v` of values at the nodes: barycentric interpolation on the panel of each."""
    panel = np.clip(np.searchsorted(edges, v, side="right") - 1, 0, len(edges) - 2)
    at = 2 * (v - edges[panel]) / (edges[panel + 1] - edges[panel]) - 1
    weights = (-1.0) ** np.arange(NODES)
    weights[[0, -1]] /= 2
    gaps = at[:, None] - _unit_nodes()
    gaps[np.abs(gaps) < 1e-15] = 1e-15
    values = weights / gaps
    values /= values.sum(axis=1, keepdims=True)
    columns = panel[:, None] * NODES + np.arange(NODES)
    return sparse.csr_array((values.ravel(), columns.ravel(), np.arange(len(v) + 1) * NODES), shape=(len(v), size))


# --- a head ----------------------------------------------------------------------------------------------------------

NUM_EXAMPLES, NUM_LENGTHS = 67_349, 13
HEAD: dict[str, Any] = {
    "expected_batch_size": 1024, "num_steps": 100_000, "target_epsilon": 2.0, "head_radius": 10.0, "feature_norm": 1.0,
    "l2": 0.001,
}  # fmt: skip


def head_bounds(plan: HeadPlan) -> dict[str, Any]:
    """Both bounds on epsilon of the final weights after 10 steps to those of a plan without decay, with its noise."""
    steps = [int(t) for t in np.unique(np.geomspace(10, plan.sgd.num_steps, NUM_LENGTHS).round())]
    upper = [last_iterate_epsilon(dataclasses.replace(plan.sgd, num_steps=t), plan.delta).epsilon for t in steps]
    lower = last_iterate_lower_epsilons(plan.sgd, steps, plan.delta)
    return {"free_after": plan.free_steps(), "delta": plan.delta, "steps": steps, "upper": upper, "lower": lower}


def compute(given: Any = None) -> dict[str, Any]:
    return head_bounds(make_head_plan(HeadConfig(**HEAD), num_examples=NUM_EXAMPLES))


main = experiment("head", compute)

if __name__ == "__main__":
    main()
