r"""Convex losses on a bounded domain: the privacy loss of the LAST iterate stops growing with the number of steps.

Projected noisy SGD, ``w_{t+1} = Proj_K[w_t - eta_t (sum_{i in B_t} grad f_i(w_t) / b + l2 w_t + sigma z_t)]`` with
``z_t ~ N(0, I)``, convex ``f_i`` that are L-Lipschitz and M-smooth on K, and K of diameter D. Only the weights after
the last step may leave; every other iterate, and whatever was measured on one, must stay secret.

The argument (Feldman et al. 2018, arXiv:1808.06651; Altschuler and Talwar 2022, arXiv:2205.13710): two runs that
differ in a record are at most D apart R steps before the end, or, for strongly convex losses in no ball at all, as far
as `ProjectedSGD.distance` says. Of the noise of each of these steps, a share theta
hides that distance, which contractive steps never enlarge, and the rest hides the record where it is sampled. So the
last iterate costs no more than R sampled Gaussian mechanisms and one Gaussian mechanism, whatever came before.

**What is proven.** Under ``add_or_remove_one`` with Poisson batches, step by step: reveal the batch without the
record (same law in both runs, and a contraction), then the record's own term, then the shift; a product of trade-off
functions bounds the whole. The record is left out of the contraction, so its sensitivity is L, not 2 L. The paper's
own statement, for batches of fixed size under ``replace_one``, is not here: its proof conditions on split noise that
depends on the batch, and we could not close that gap (docs/convex.md has the smallest case). A lower bound on all of
this: `recipes/paper/convergent/lower_bound.py`.

**What is outside**, and must be refused: losses that are not convex (every deep model), clipped gradients other than
those of generalised linear models, momentum, Adam, filters and correlated noise.

Here, too, epsilon is an upper bound: sampled Gaussian mechanisms by privacy loss distributions (the form of Bok, Su
and Altschuler 2024, arXiv:2403.00278, in trade-off functions) or by Renyi divergences (the paper's).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from dp_accounting import ComposedDpEvent, DpEvent, GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.rdp import RdpAccountant
from dp_accounting.rdp.rdp_privacy_accountant import compute_epsilon
from scipy import optimize, stats

from hf_dpopt.accounting import accountants
from hf_dpopt.accounting.accountants import FINE
from hf_dpopt.accounting.calibrate import calibrate_noise_multiplier
from hf_dpopt.common.checks import check_count, check_noise_multiplier, check_positive, check_range
from hf_dpopt.common.errors import DPConfigError

Form = Literal["pld", "rdp"]

ADJACENCY = "add_or_remove_one"  # the only one with a proof
OVERSIZED_SHARE = 1e-3  # of delta, at most, for batches that are too large to contract
HORIZONS = 400  # tried, from one step to all of them
SHARES = np.linspace(0.04, 0.96, 24)  # of the noise, that hide the distance
SEARCH_ERROR = 1e-2  # relative, of epsilon while horizon and share are searched
MANY = 10**12  # steps, for a run without end
LONGEST_PLD = 10**6  # mechanisms; more take minutes
PLAIN_LIMIT = 3.0  # plain composition costs seconds; it is left out where its RDP bound is so many times larger


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProjectedSGD:
    """Projected noisy SGD on convex losses, as far as the bounds need to know it. All values are public.

    Args:
        num_examples: n.
        expected_batch_size: b, by which sums are divided; records are sampled with probability b / n.
        num_steps: T >= 1.
        noise_multiplier: stddev of the noise on the SUM of a batch's gradients, over L; so sigma is this ``L / b``.
        diameter: D of the domain, > 0; twice the radius of a ball, or infinity without one, which asks for l2 > 0.
        lipschitz: L, the largest norm of a record's gradient on the domain, > 0.
        smoothness: M, the largest eigenvalue of a record's Hessian, > 0.
        step_size: eta of the first step, > 0.
        decay: the step size of step t is ``eta t^-decay``; in [0, 1), 0 for a constant one.
        l2: strength of a regulariser ``l2 / 2 |w|^2``, which no record has a part in; >= 0. With it the losses are
            strongly convex.
        batch_cap: B, for step sizes above ``2 / (M + 2 l2)`` (Remark 5.3 of the paper): the largest batch that a step
            is taken to contract with, which then is less; see `batch_cap_of`. None for the other step sizes.

    Raises:
        DPConfigError: for values out of range.
    """

    num_examples: int
    expected_batch_size: int
    num_steps: int
    noise_multiplier: float
    diameter: float
    lipschitz: float
    smoothness: float
    step_size: float
    decay: float = 0.0
    l2: float = 0.0
    batch_cap: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_examples", "expected_batch_size", "num_steps"):
            check_count(name, getattr(self, name))
        check_noise_multiplier(self.noise_multiplier)
        check_positive(lipschitz=self.lipschitz, smoothness=self.smoothness, step_size=self.step_size)
        check_range("decay", self.decay, 0, 1)
        check_range("l2", self.l2, 0, math.inf)
        if self.diameter != math.inf or not self.l2:
            check_positive(diameter=self.diameter)
        if self.expected_batch_size > self.num_examples:
            raise DPConfigError(
                f"expected_batch_size={self.expected_batch_size} is more than the {self.num_examples} records. Use "
                "at most all of them."
            )
        steepest, formula = self.smoothness + 2 * self.l2, "2 / (M + 2 l2)"
        if self.batch_cap is not None:
            steepest = self._steepest
            formula = f"2 / (M B / b + l2), batches having up to B = {self.batch_cap} records,"
        product, allowed = self.step_size * steepest, 2 / steepest
        if product > 2:
            raise DPConfigError(
                f"step_size={self.step_size:g} is above {formula} = {allowed:g}: a step is no contraction, and the "
                f"privacy loss may grow with every one. Use at most {allowed:g}, or half of it."
            )
        if self.diameter == math.inf and product >= 2 - 1e-12:
            raise DPConfigError(
                f"step_size={self.step_size:g} is {formula} = {allowed:g}: a step keeps distances, and without a ball "
                "nothing bounds them. Use a smaller one."
            )

    @property
    def sample_rate(self) -> float:
        return self.expected_batch_size / self.num_examples

    @property
    def distance(self) -> float:
        """Largest distance of two runs that differ in a record: D, or ``L / (b l2)`` without a ball (Remark 5.2).

        With the same noise and the same other records, a step shrinks it to ``1 - eta_t l2`` of what it was, and the
        record adds ``eta_t L / b`` at most; so it never leaves ``[0, L / (b l2)]``, in which it begins. With a
        `batch_cap`, ``1 - c_t`` is in the place of ``eta_t l2``; its share of eta_t is the least in the first step.
        """
        if self.diameter < math.inf:
            return self.diameter
        rate = self.l2 if self.batch_cap is None else float(self._gaps(self.step_size)) / self.step_size
        return self.lipschitz / (self.expected_batch_size * rate)

    def _gaps(self, step_sizes: Any) -> Any:
        """``1 - c_t``: what a step of these sizes takes from a distance at least.

        The map of a step without the record has slopes between ``1 - eta l2`` and ``1 - eta (l2 + M B / b)``, B the
        batch, and c_t is the larger one of their absolute values. Below ``2 / (M + 2 l2)`` it is the first.
        """
        gaps = step_sizes * self.l2
        return gaps if self.batch_cap is None else np.minimum(gaps, 2 - step_sizes * self._steepest)

    @property
    def _steepest(self) -> float:
        """Largest curvature of a batch of `batch_cap` records, divided by b, and of the regulariser."""
        assert self.batch_cap is not None
        return self.smoothness * self.batch_cap / self.expected_batch_size + self.l2

    @property
    def largest_batch(self) -> int:
        """Largest batch with which a step at the first step size contracts as it is taken to."""
        if self.batch_cap is not None:
            return self.batch_cap
        room = (2 / self.step_size - 2 * self.l2) / self.smoothness
        return math.floor(self.expected_batch_size * room * (1 + 1e-12))

    def shift_costs(self, horizons: np.ndarray) -> np.ndarray:
        r"""Squared mean, in units of sigma^2, of the Gaussian mechanism that hides the distance after R steps.

        Steps shrink distances to c_t of what they were, ``1 - eta_t l2`` as a rule; shifts a_t make up for the rest:
        ``sum_t P_t a_t = P_0 D`` with ``P_t = prod_{s > t} c_s``, at the cost ``sum_t (a_t / eta_t)^2``. The least is
        ``P_0^2 D^2 / sum_t (P_t eta_t)^2``: ``D^2 / (eta^2 R)`` without a regulariser (Eq. 3.6 of the paper) and, with
        one, ``(1 - c^2) / (1 - c^{2R})`` of what the paper pays, which makes the whole shift in the last step (5.3).

        Args:
            horizons: (N,), whole numbers between 1 and `num_steps`.
        """
        contraction, reach = self._reach(horizons)
        return contraction * (self.distance / self.step_size) ** 2 / reach

    def noise_norm(self, num_weights: int) -> float:
        """Norm that the noise alone would give so many weights in all steps, root mean square and without a ball.

        It grows with ``sqrt(T)`` until l2 holds it; the curvature of the losses keeps it smaller.
        """
        stddev = self.noise_multiplier * self.lipschitz / self.expected_batch_size
        return stddev * self.step_size * math.sqrt(num_weights * float(self._reach(np.array([self.num_steps]))[1][0]))

    def _reach(self, horizons: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """``P_0^2`` over the last R steps, and ``sum_t (P_t eta_t / eta)^2``, the variance of noise of variance 1."""
        if not self.decay:
            shrinks = 2 * math.log1p(-self._gaps(self.step_size))  # c^2 = exp(shrinks), exact for the smallest l2
            counted = np.expm1(shrinks * horizons) / math.expm1(shrinks) if shrinks else horizons
            return np.exp(shrinks * horizons), counted
        # step sizes and products of contractions, from the last step backwards
        shares = np.arange(self.num_steps, 0, -1, dtype=np.float64)[: int(horizons.max())] ** -self.decay
        products = np.concatenate([[1.0], np.cumprod(1 - self._gaps(self.step_size * shares))])
        sums = np.cumsum((products[:-1] * shares) ** 2)
        return products[horizons] ** 2, sums[horizons - 1]


def batch_cap_of(num_examples: int, expected_batch_size: int, num_steps: int, delta: float) -> int:
    """Size that no Poisson batch of the run reaches without the record, but for `OVERSIZED_SHARE` of delta."""
    rare = OVERSIZED_SHARE * delta / num_steps * (1 - 1e-6)
    return int(stats.binom.isf(rare, num_examples, expected_batch_size / num_examples)) + 1


@dataclasses.dataclass(frozen=True)
class LastIterate:
    """A bound on what the last iterate reveals.

    Attributes:
        epsilon: the smaller one of both bounds, at the delta asked for.
        composition: epsilon of all iterates together; infinite where it was not computed, being far above.
        horizon: R, the steps before the end that count; None if plain composition is the better bound.
        share: theta, of the noise's variance, that hides the distance; None likewise.
    """

    epsilon: float
    composition: float
    horizon: int | None
    share: float | None


def last_iterate_epsilon(
    run: ProjectedSGD,
    delta: float,
    *,
    form: Form = "pld",
    relative_error: float = FINE,
) -> LastIterate:
    """Epsilon of the weights after the last step, the smaller one of this bound and plain composition.

    Formal guarantee: under ``add_or_remove_one``, if the run is as described (see the module) and nothing but its last
    iterate leaves, it is (epsilon, delta)-differentially private. A part of delta pays for batches that are too large
    for a contraction.

    Args:
        run: what runs.
        delta: delta of the guarantee, in (0, 1).
        form: "pld" is tighter; "rdp" is Eq. (3.6) of the paper.
        relative_error: tolerated excess of epsilon by discretisation.

    Raises:
        DPConfigError: if batches that are too large are not rare enough.

    References:
        Altschuler and Talwar (2022), arXiv:2205.13710, Eq. (3.6); of (5.3), with a cheaper shift; Remarks 5.2 and 5.3.
        Bok, Su and Altschuler (2024), arXiv:2403.00278 (trade-off functions).
    """
    if not 0 < delta < 1:
        raise DPConfigError(f"delta={delta} is outside (0, 1). Use at most 1 / number of records.")
    if not run.noise_multiplier:
        return LastIterate(math.inf, math.inf, None, None)
    kept = delta * (1 - OVERSIZED_SHARE)
    bound, horizon, share = _by_renyi(run, kept)
    if form == "pld" and _pld_is_exact(horizon, kept):
        horizon, share = _refined(run, kept, horizon, share)
        bound = _epsilon(_event(run, horizon, share), kept, relative_error)
    plain = _plain(run, delta, form, bound, relative_error)
    if plain <= bound:
        return LastIterate(plain, plain, None, None)
    _check_oversized(run, horizon, delta)
    return LastIterate(bound, plain, horizon, share)


def event_of(run: ProjectedSGD, found: LastIterate) -> DpEvent:
    """Event of the last iterate: mechanisms that reveal no less and compose with those of other runs.

    Args:
        run: what ran.
        found: result of `last_iterate_epsilon` of form "pld" with the cheapest shifts. Of every run that is composed,
            `OVERSIZED_SHARE` of delta is for batches that are too large.
    """
    if found.horizon is None or found.share is None:
        step = PoissonSampledDpEvent(run.sample_rate, GaussianDpEvent(run.noise_multiplier))
        return SelfComposedDpEvent(step, run.num_steps)
    return _event(run, found.horizon, found.share)


def calibrate_last_iterate(run: ProjectedSGD, target_epsilon: float, delta: float) -> float:
    """The smallest noise multiplier, within about 0.2 %, with which the last iterate costs no more than the target.

    Args:
        run: its noise multiplier is not used.
        target_epsilon: > 0.
        delta: delta of the guarantee, in (0, 1).
    """

    def epsilon_at(noise_multiplier: float, relative_error: float) -> float:
        noisy = dataclasses.replace(run, noise_multiplier=noise_multiplier)
        return last_iterate_epsilon(noisy, delta, relative_error=relative_error).epsilon

    return calibrate_noise_multiplier(functools.lru_cache(maxsize=None)(epsilon_at), target_epsilon)


def plateau(run: ProjectedSGD, delta: float) -> int | None:
    """Number of steps beyond which further ones are free: there plain composition exceeds the bound without end.

    It is of the order of ``n D / (eta L)``, whatever the batch size.

    Args:
        run: its number of steps is not used; the step size has to be constant, else the plateau depends on the end.
        delta: delta of the guarantee, in (0, 1).

    Returns:
        None if it is not reached in `MANY` steps.

    Raises:
        DPConfigError: for step sizes that decay.
    """
    if run.decay:
        raise DPConfigError(f"decay={run.decay:g}: noise of small steps hides less, and no plateau is reached. Use 0.")
    many = dataclasses.replace(run, num_steps=MANY)
    flat = _by_renyi(many, delta)[0]
    step = _step_divergences(run.sample_rate, run.noise_multiplier)

    def exceeds(log_steps: float) -> float:
        return _renyi_epsilon(step, round(math.exp(log_steps)), 0.0, delta) - flat

    if exceeds(0.0) >= 0:
        return 1
    if exceeds(math.log(MANY)) <= 0:
        return None
    return math.ceil(math.exp(optimize.brentq(exceeds, 0.0, math.log(MANY), xtol=1e-4)))


# --- the two terms ---------------------------------------------------------------------------------------------------


def _event(run: ProjectedSGD, horizon: int, share: float) -> DpEvent:
    """R sampled Gaussian mechanisms with the rest of the noise, and the one that hides the distance."""
    sampled = PoissonSampledDpEvent(run.sample_rate, GaussianDpEvent(run.noise_multiplier * math.sqrt(1 - share)))
    return ComposedDpEvent([SelfComposedDpEvent(sampled, horizon), GaussianDpEvent(1 / _mean(run, horizon, share))])


def _mean(run: ProjectedSGD, horizon: int, share: float) -> float:
    """Mean of the Gaussian that hides the distance, in units of its stddev."""
    sigma = run.noise_multiplier * run.lipschitz / run.expected_batch_size
    (cost,) = run.shift_costs(np.array([horizon]))
    return max(math.sqrt(cost / share) / sigma, 1e-12)  # the shift is nearly nothing after many contractions


def _plain(run: ProjectedSGD, delta: float, form: Form, bound: float, relative_error: float) -> float:
    """Epsilon of all iterates; infinite if it is seen without much work that it is no match for the bound."""
    step = _step_divergences(run.sample_rate, run.noise_multiplier)
    rough = _renyi_epsilon(step, run.num_steps, 0.0, delta)
    if form == "rdp":
        return rough
    if rough > PLAIN_LIMIT * bound:
        return math.inf
    if not _pld_is_exact(run.num_steps, delta):
        return rough
    return _epsilon(event_of(run, LastIterate(bound, bound, None, None)), delta, relative_error)


def _pld_is_exact(num_steps: int, delta: float) -> bool:
    """Whether rounding in the convolution of so many losses, about 1e-17 each, is nothing beside delta."""
    return num_steps <= LONGEST_PLD and delta >= accountants.MIN_PLD_DELTA * max(1.0, num_steps / 1e5)


def _epsilon(event: DpEvent, delta: float, relative_error: float) -> float:
    with np.errstate(over="ignore"):  # of losses in the hundreds, which are then no bound
        return accountants.epsilon(event, delta, ADJACENCY, relative_error=relative_error).epsilon


def _check_oversized(run: ProjectedSGD, horizon: int, delta: float) -> None:
    """Whether another record's batch is too large has the same law on both datasets, so it may be revealed.

    Where none of the last R batches is, the bound holds; R P[Binomial(n, q) >= largest_batch] of delta pays for the
    rest. The record itself may be one more. Without a ball all T steps have to contract.
    """
    num_steps = horizon if run.diameter < math.inf else run.num_steps
    log_chance = float(stats.binom.logsf(run.largest_batch - 1, run.num_examples, run.sample_rate))
    log_cost = math.log(num_steps) + log_chance
    if log_cost > math.log(OVERSIZED_SHARE * delta):
        raise DPConfigError(
            f"With step_size={run.step_size:g}, batches of more than {run.largest_batch} records make no contraction, "
            f"and are not rare enough: they cost {math.exp(min(0.0, log_cost)):.1g} of delta={delta:g}. Use a smaller "
            "step_size or a larger expected_batch_size."
        )


# --- horizon and share -----------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def _step_divergences(sample_rate: float, noise_multiplier: float) -> tuple[float, ...]:
    """Renyi divergences of one sampled Gaussian mechanism, at `_ORDERS`."""
    accountant = RdpAccountant()
    with accountants.quiet_absl():
        accountant.compose(PoissonSampledDpEvent(sample_rate, GaussianDpEvent(noise_multiplier)))
    return tuple(accountant.rdp)


_ORDERS = RdpAccountant().orders


def _renyi_epsilon(step: tuple[float, ...], num_steps: int, squared_mean: float, delta: float) -> float:
    """Epsilon of `num_steps` mechanisms and a Gaussian of that mean."""
    return float(compute_epsilon(_ORDERS, num_steps * np.array(step) + _ORDERS * squared_mean / 2, delta)[0])


def _by_renyi(run: ProjectedSGD, delta: float) -> tuple[float, int, float]:
    """Eq. (3.6): least epsilon over horizon and share, and where it is attained."""
    best = _least(run, delta, _horizons(1, run.num_steps, HORIZONS), SHARES)
    step = SHARES[1] - SHARES[0]
    around = np.clip(np.linspace(best[2] - step, best[2] + step, 9), 1e-3, 1 - 1e-3)
    near = _horizons(max(1, best[1] / 1.2), min(best[1] * 1.2, run.num_steps), 40)
    return min(best, _least(run, delta, near, around))


def _horizons(first: float, last: float, num: int) -> np.ndarray:
    return np.unique(np.geomspace(first, last, num).round().astype(np.int64))


def _least(run: ProjectedSGD, delta: float, horizons: np.ndarray, shares: np.ndarray) -> tuple[float, int, float]:
    sigma = run.noise_multiplier * run.lipschitz / run.expected_batch_size
    squares = run.shift_costs(horizons) / sigma**2
    found = []
    for share in shares:
        step = _step_divergences(run.sample_rate, run.noise_multiplier * math.sqrt(1 - share))

        def at(i: int, step: tuple[float, ...] = step, share: float = share) -> float:
            return _renyi_epsilon(step, int(horizons[i]), float(squares[i] / share), delta)

        i = _valley(at, len(horizons))
        found.append((at(i), int(horizons[i]), float(share)))
    return min(found)


def _valley(value: Callable[[int], float], size: int) -> int:
    """Index at which a sequence that falls and then rises is least, by thirds; any index is a valid choice."""
    low, high = 0, size - 1
    while high - low > 2:
        left, right = low + (high - low) // 3, high - (high - low) // 3
        low, high = (low, right - 1) if value(left) <= value(right) else (left + 1, high)
    return min(range(low, high + 1), key=value)


def _refined(run: ProjectedSGD, delta: float, horizon: int, share: float) -> tuple[int, float]:
    """Horizon and share that are good for privacy loss distributions; any are valid."""

    longest = min(run.num_steps, LONGEST_PLD, max(horizon, int(1e5 * delta / accountants.MIN_PLD_DELTA)))

    def clipped(x: np.ndarray) -> tuple[int, float]:
        wanted = round(math.exp(float(np.clip(x[0], 0.0, 60.0))))
        return min(max(1, wanted), longest), float(np.clip(x[1], 0.01, 0.99))

    @functools.cache
    def epsilon(horizon: int, share: float) -> float:
        return _epsilon(_event(run, horizon, share), delta, SEARCH_ERROR)

    start = np.array([math.log(horizon), share])
    found = optimize.minimize(
        lambda x: epsilon(*clipped(x)), start, method="Nelder-Mead",
        options={"maxfev": 16, "initial_simplex": [start, start + [0.2, 0.0], start + [0.0, 0.05]]},
    )  # fmt: skip
    return clipped(found.x)
