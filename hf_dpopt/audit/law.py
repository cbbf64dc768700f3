"""Tests of what an exact implementation releases: the law of the noise, and what a canary adds to it.

An epsilon bound from a thousand canaries misses noise that is a quarter too small. The law is known exactly, so these
tests see far less: with 20,000 values, noise that is 5 % off. Each has a threshold of its own, and all together raise
a false alarm with probability at most `alpha`.

Released values are whitened by the declared correlation first: ``W = B^-1 Y / stddev`` has independent standard normal
entries where no record has a gradient.

Shape legend: T = steps, M = canaries, Q = quiet coordinates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from scipy import linalg, stats

from hf_dpopt.audit.canaries import QUIET, ROWS, WIDTH
from hf_dpopt.audit.observe import Observation

FAR = (2.0, 3.0, 4.0)  # standard deviations beyond which values are counted
SLACK = 1e-4  # float32 weights hold a release to about this part of a clip


@dataclasses.dataclass(frozen=True)
class Finding:
    """Outcome of one test.

    Attributes:
        name: what was tested.
        has_passed: whether what was seen is likely enough.
        seen: the observed values, in words.
        p_value: probability of something as unlikely in an exact implementation, all comparisons of the test counted.
    """

    name: str
    has_passed: bool
    seen: str
    p_value: float


class Whitened:
    """Released values in units in which the noise is standard normal and independent from step to step."""

    def __init__(self, observation: Observation):
        plan, num_steps = observation.plan, len(observation.canaries_TM)
        self.observation, self.plan = observation, plan
        self.stddev = plan.draw_stddev * plan.sensitivity / plan.clipper.clipping_norm  # of a draw, in clips
        self.matrix = _square(plan.strategy.noising_matrix(num_steps))  # B, lower triangular
        self.canaries_TM = self.whiten(observation.canaries_TM)
        self.quiet_TQ = {name: self.whiten(values) for name, values in observation.quiet_TQ.items()}
        # what one clip in step s adds to the whitened values of all steps, a column for each s
        self.columns = linalg.solve_triangular(self.matrix, np.eye(num_steps), lower=True) / self.stddev
        self.moved_TM = self.columns @ observation.drawn_TM.astype(float)  # by a canary that takes part

    def whiten(self, values_TQ: np.ndarray) -> np.ndarray:
        """Values in clips -> independent standard normal entries, (T, Q), where there is noise alone."""
        found: np.ndarray = linalg.solve_triangular(self.matrix, values_TQ, lower=True) / self.stddev
        return found


def _square(matrix_TD: np.ndarray) -> np.ndarray:
    """The lower-triangular matrix that gives noise of the same law: trees draw more normals than there are steps."""
    num_steps, num_draws = matrix_TD.shape
    return matrix_TD if num_draws == num_steps else linalg.cholesky(matrix_TD @ matrix_TD.T, lower=True)


def test_all(observation: Observation, alpha: float = 1e-6) -> list[Finding]:
    """Run all tests; together they raise a false alarm with probability at most `alpha`."""
    whitened = Whitened(observation)
    tests: tuple[Callable[[Whitened, float], Finding], ...] = (
        scale, time, space, tails, contribution, remainder, sampling,
    )  # fmt: skip
    return [test(whitened, alpha / len(tests)) for test in tests]


test_all.__test__ = False  # type: ignore[attr-defined]  # pytest takes the name for its own


def scale(w: Whitened, alpha: float) -> Finding:
    """Noise has the declared stddev in every step, on every tensor and where canaries were left out (chi-square)."""
    parts = w.quiet_TQ | {"canaries left out": w.canaries_TM[:, ~w.observation.included]}
    parts |= {"a step": np.concatenate([*w.quiet_TQ.values()], axis=1)}
    p_values, words = [], []
    for name, values in parts.items():
        if not values.size:
            continue
        totals, num = np.square(values).sum(axis=1), values.shape[1]
        if name == "a step":
            p_values += [_two_sided_chi2(total, num) for total in totals]
            words.append(f"{np.sqrt(totals.min() / num):.3f} to {np.sqrt(totals.max() / num):.3f} by step")
        else:
            p_values.append(_two_sided_chi2(float(totals.sum()), values.size))
            words.append(f"{np.sqrt(totals.sum() / values.size):.4f} on {name}")
    return _finding("noise: stddev / declared", min(p_values) * len(p_values), alpha, ", ".join(words))


def time(w: Whitened, alpha: float) -> Finding:
    """Whitened noise of different steps is independent: no draw returns, none is left out of the correlation."""
    values = np.concatenate([*w.quiet_TQ.values()], axis=1)
    num = values.shape[1]
    products = values @ values.T / num
    above = np.triu_indices(len(products), k=1)
    if not len(above[0]):
        return Finding("noise: steps independent", True, "one step", 1.0)
    largest = float(np.abs(products[above]).max()) * np.sqrt(num)
    p = 2 * stats.norm.sf(largest) * len(above[0])
    return _finding("noise: steps independent", p, alpha, f"largest of {len(above[0])} products {largest:.1f} s.e.")


def space(w: Whitened, alpha: float) -> Finding:
    """Noise of different coordinates is independent: tensors, their halves and neighbours share no draws."""
    pairs: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for name, values in w.quiet_TQ.items():
        half = values.shape[1] // 2
        pairs[f"halves of {name}"] = values[:, :half], values[:, half : 2 * half]
        pairs[f"neighbours in {name}"] = values[:, :-1:2], values[:, 1::2]
    rows, quiet = w.quiet_TQ[ROWS], w.quiet_TQ[QUIET]
    elements = np.delete(np.arange(w.canaries_TM.shape[1] * WIDTH), slice(None, None, WIDTH))  # of the whole embedding
    both = elements < quiet.shape[1]
    pairs["elements of two tensors"] = rows[:, both], quiet[:, elements[both]]
    found = {}
    for name, (a, b) in pairs.items():
        num = min(a.shape[1], b.shape[1])
        found[name] = abs(float((a[:, :num] * b[:, :num]).sum())) / np.sqrt(a[:, :num].size)
    worst = max(found, key=lambda name: found[name])
    p = 2 * stats.norm.sf(found[worst]) * len(found)
    return _finding(
        "noise: coordinates independent", p, alpha, f"largest of {len(found)}: {worst}, {found[worst]:.1f} s.e."
    )


def tails(w: Whitened, alpha: float) -> Finding:
    """Noise is Gaussian: by the distance of Kolmogorov and Smirnov, and by the numbers of values that are far out."""
    values = np.concatenate([v.ravel() for v in w.quiet_TQ.values()])
    found = stats.kstest(values, "norm")
    p_values = [float(found.pvalue)]
    for bound in FAR:
        beyond, rate = int((np.abs(values) > bound).sum()), 2 * stats.norm.sf(bound)
        p_values += [2 * stats.binom.cdf(beyond, values.size, rate), 2 * stats.binom.sf(beyond - 1, values.size, rate)]
    words = f"distance {found.statistic:.4f}, largest |z| {np.abs(values).max():.2f} of {values.size}"
    return _finding("noise: Gaussian", min(p_values) * len(p_values), alpha, words)


def contribution(w: Whitened, alpha: float) -> Finding:
    """A canary, which is longer than the clip, adds one clip to each step that drew it, and no canary adds more.

    Less than a clip is a fault as well: whatever clips sums of records, or filters them, makes it less. Where layers
    have clips of their own, a canary has that of its layer, and only more than a clip is looked for.
    """
    taken = w.observation.included & (np.square(w.moved_TM).sum(axis=0) > 0)
    moved, seen = w.moved_TM[:, taken], w.canaries_TM[:, taken]
    if not moved.size:
        return Finding("a record adds one clip", True, "no canary took part", 1.0)
    info_M = np.square(moved).sum(axis=0)
    each_M = (moved * seen).sum(axis=0) / info_M
    mean, error = float((info_M * each_M).sum() / info_M.sum()), float(1 / np.sqrt(info_M.sum()))
    largest = float(((each_M - 1 - SLACK) * np.sqrt(info_M)).max())
    too_low = stats.norm.cdf((mean - 1 + SLACK) / error) if w.plan.clipper.has_one_group else 1.0
    p = 3 * min(stats.norm.sf((mean - 1 - SLACK) / error), too_low, stats.norm.sf(largest) * len(info_M))
    words = f"{mean:.4f} clips on average (s.e. {error:.4f}), the largest {largest:.1f} s.e. above one"
    return _finding("a record adds one clip", p, alpha, words)


def remainder(w: Whitened, alpha: float) -> Finding:
    """A canary took part in no step that did not draw it: there is noise alone (one-sided)."""
    included = w.observation.included
    seen, drawn = w.canaries_TM[:, included], w.observation.drawn_TM[:, included]
    if drawn.all():
        return Finding("a record is in the steps that drew it alone", True, "every step drew all of them", 1.0)
    left = seen - w.moved_TM[:, included]
    total, num = float(np.square(left).sum()), left.size
    p = float(stats.chi2.sf(total, num))
    return _finding(
        "a record is in the steps that drew it alone", p, alpha, f"mean square of what is left {total / num:.4f}"
    )


def sampling(w: Whitened, alpha: float) -> Finding:
    """The batches that were drawn have the law of the sampler: their sizes, and how often a canary is in one."""
    drawn, sampler = w.observation.drawn_TM, w.plan.sampler
    if sampler.name not in ("poisson", "truncated_poisson"):
        most = drawn.sum(axis=0).max()
        allowed = sampler.max_participations(len(drawn))
        words = f"a canary was in at most {most} steps, {allowed} allowed"
        return _finding("sampling", most <= allowed, alpha, words)
    rate, (num_steps, num) = sampler.sample_rate, drawn.shape
    if rate == 1:
        return _finding("sampling", float(drawn.all()), alpha, f"{drawn.mean():.4f} of the canaries in a batch, of 1")
    sizes, counts = drawn.sum(axis=1), drawn.sum(axis=0)
    spread = rate * (1 - rate)
    p_total = 2 * stats.norm.sf(abs(drawn.mean() - rate) / np.sqrt(spread / drawn.size))
    p_sizes = _two_sided_chi2(np.square(sizes - num * rate).sum() / (num * spread), num_steps)
    p_counts = _two_sided_chi2(np.square(counts - num_steps * rate).sum() / (num_steps * spread), num)
    words = (
        f"{drawn.mean():.4f} of the canaries in a batch, of {rate:.4f}; variance / binomial of sizes "
        f"{np.square(sizes - num * rate).mean() / (num * spread):.2f}, of counts "
        f"{np.square(counts - num_steps * rate).mean() / (num_steps * spread):.2f}"
    )
    return _finding("sampling", 3 * min(p_total, p_sizes, p_counts), alpha, words)


def _two_sided_chi2(total: float, num: int) -> float:
    return float(2 * min(stats.chi2.cdf(total, num), stats.chi2.sf(total, num)))


def _finding(name: str, p_value: float, alpha: float, seen: str) -> Finding:
    p_value = min(1.0, float(p_value))
    return Finding(name, p_value >= alpha, seen, p_value)
