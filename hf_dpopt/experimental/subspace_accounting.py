"""Privacy cost of releasing AdaGrad's matrix of un-noised gradients beside the gradients (arXiv:2008.06570).

Its releases and those of the gradients are Gaussian mechanisms that compose adaptively. None of them is amplified by
sampling: the matrix of step t depends on the batches of all steps so far, so the same random draws cannot hide twice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from dp_accounting import DpEvent, GaussianDpEvent, NonPrivateDpEvent, get_sigma_gaussian

from hf_dpopt.accounting import accountants
from hf_dpopt.accounting.events import noise_stddev_over_clip
from hf_dpopt.common.adjacency import SENSITIVITY_FACTOR
from hf_dpopt.common.checks import check_count, check_noise_multiplier
from hf_dpopt.common.errors import DPConfigError


@dataclasses.dataclass(frozen=True)
class GoeRelease:
    """One release of ``G_t + B_t``.

    Args:
        num_participations: p_t, the most of the first t steps that one record takes part in; >= 1.
        noise_stddev: noise stddev of a diagonal entry of B_t, gradient units; the others have ``1 / sqrt(2)`` of it.
    """

    num_participations: int
    noise_stddev: float


@dataclasses.dataclass(frozen=True)
class GoeBudget:
    """Privacy cost of a run with a released preconditioner: zCDP (rho) by part, epsilon of both together.

    Attributes:
        gradients, preconditioner: rho of either part; they add up.
        epsilon, delta: privacy of the whole run; exact for Gaussian mechanisms.
        event: both parts as one event of dp_accounting.
    """

    gradients: float
    preconditioner: float
    epsilon: float
    delta: float
    event: DpEvent

    @property
    def rho(self) -> float:
        return self.gradients + self.preconditioner


def goe_sensitivity(num_participations: int, clipping_norm: float, adjacency: str) -> float:
    r"""``sqrt(2 p) C``, largest Frobenius change of ``(sum_s u_s u_s^T)^{1/2}``; twice that for ``replace_one``.

    Args:
        num_participations: p, the most steps that one record takes part in; >= 1.
        clipping_norm: C, bound on the change of one u_s (a sum of clipped gradients, not their mean); > 0.
        adjacency: a key of `hf_dpopt.common.adjacency.SENSITIVITY_FACTOR`.

    Raises:
        DPConfigError: for values out of range.

    References:
        Araki and Yamagami (1981), Comm. Math. Phys. 81, 89-96: ``|| |X| - |Y| ||_F <= sqrt(2) || X - Y ||_F``.
        Kairouz et al. (2021), arXiv:2008.06570, Lemma 4.1, has the same order; its proof drops cross terms.
    """
    check_count("num_participations", num_participations)
    if not (math.isfinite(clipping_norm) and clipping_norm > 0):
        raise DPConfigError(f"clipping_norm={clipping_norm} bounds nothing. Give a finite number > 0, gradient units.")
    if adjacency not in SENSITIVITY_FACTOR:
        raise DPConfigError(f"adjacency={adjacency!r} is unknown. Use one of: {', '.join(SENSITIVITY_FACTOR)}.")
    return math.sqrt(2 * num_participations) * clipping_norm * SENSITIVITY_FACTOR[adjacency]


def goe_zcdp(releases: Sequence[GoeRelease], *, clipping_norm: float, adjacency: str = "zero_out") -> float:
    r"""zCDP (rho) of all releases, ``sum_t (2 p_t C^2) / (2 sigma_B(t)^2)``; four times that for ``replace_one``.

    Formal guarantee: releases of `gaussian_orthogonal_ensemble` noise are together rho-zCDP, however later steps were
    chosen from earlier releases. Infinite without noise, 0 without releases.

    Args:
        releases: releases of the run, in any order.
        clipping_norm: C, as for `goe_sensitivity`.
        adjacency: relation of neighbouring datasets, a key of `hf_dpopt.common.adjacency.SENSITIVITY_FACTOR`.

    References:
        Bun and Steinke (2016), arXiv:1605.02635, Prop. 1.6 (Gaussian mechanism) and Lemma 1.7 (composition).
    """
    return math.fsum(
        0.5 * _precision(goe_sensitivity(r.num_participations, clipping_norm, adjacency), r.noise_stddev)
        for r in releases
    )


def goe_budget(
    releases: Sequence[GoeRelease],
    *,
    clipping_norm: float,
    gradient_noise_multiplier: float,
    num_participations: int,
    delta: float,
    adjacency: str = "zero_out",
) -> GoeBudget:
    """Both parts of the budget of a run.

    Args:
        releases: releases of the preconditioner.
        clipping_norm: C, as for `goe_sensitivity`.
        gradient_noise_multiplier: stddev / sensitivity of the noise in the gradients; unitless, >= 0.
        num_participations: largest number of steps of the run that one record takes part in, >= 1.
        delta: delta of the whole run, in (0, 1).
        adjacency: relation of neighbouring datasets, a key of `hf_dpopt.common.adjacency.SENSITIVITY_FACTOR`.
    """
    check_noise_multiplier(gradient_noise_multiplier)
    check_count("num_participations", num_participations)
    gradients = 0.5 * num_participations * _precision(1.0, gradient_noise_multiplier)
    preconditioner = goe_zcdp(releases, clipping_norm=clipping_norm, adjacency=adjacency)
    total = 2 * (gradients + preconditioner)  # of one Gaussian mechanism that stands for all, 1 / noise_multiplier^2
    event: DpEvent = NonPrivateDpEvent()
    if math.isfinite(total):
        event = GaussianDpEvent(noise_stddev_over_clip(total**-0.5, adjacency))
    spent = accountants.epsilon(event, delta, adjacency).epsilon
    return GoeBudget(gradients, preconditioner, spent, delta, event)


def split_budget(
    target_epsilon: float, delta: float, *, share: float, num_participations: int, num_releases: int
) -> tuple[float, float]:
    """Noise multipliers of gradients and of preconditioners that together spend a budget.

    Formal guarantee: `goe_budget` of ``num_releases`` releases, each with a noise stddev of that multiplier times its
    `goe_sensitivity`, is at most ``target_epsilon``.

    Args:
        target_epsilon, delta: the budget.
        share: share of the budget, in zCDP, that goes to the preconditioner; in (0, 1).
        num_participations: largest number of steps that one record takes part in, >= 1.
        num_releases: number of releases of the preconditioner, >= 1.

    Returns:
        Noise multipliers of gradients and of preconditioners (stddev / sensitivity; unitless).
    """
    check_count("num_participations", num_participations)
    check_count("num_releases", num_releases)
    if not 0 < share < 1:
        raise DPConfigError(f"share={share} leaves nothing for one of the parts. Use a number in (0, 1); 0.1, say.")
    precision = get_sigma_gaussian(target_epsilon, delta) ** -2 * (1 - 1e-8)  # the accountant rounds up
    return math.sqrt(num_participations / ((1 - share) * precision)), math.sqrt(num_releases / (share * precision))


def _precision(sensitivity: float, stddev: float) -> float:
    return (sensitivity / stddev) ** 2 if stddev > 0 else math.inf
