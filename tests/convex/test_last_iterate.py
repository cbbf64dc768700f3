"""The last iterate of convex losses: the printed numbers, an exact worst case, an independent optimum of the shifts."""

from __future__ import annotations

import dataclasses
import math
import time

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent, get_epsilon_gaussian
from scipy import stats

from hf_dpopt.accounting import accountants
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.convex.last_iterate import (
    LastIterate,
    ProjectedSGD,
    batch_cap_of,
    calibrate_last_iterate,
    last_iterate_epsilon,
    plateau,
)
from tests.reference import random_walk

pytestmark = pytest.mark.slow

DELTA = 1e-5


def run(noise=1.0, diameter=1.0, step_size=1.0, num_steps=10**7, **other):
    setting = {"num_examples": 10_000, "expected_batch_size": 100, "lipschitz": 1.0, "smoothness": 0.5} | other
    return ProjectedSGD(noise_multiplier=noise, diameter=diameter, step_size=step_size, num_steps=num_steps, **setting)


def epsilon(setting, **options):
    return last_iterate_epsilon(setting, DELTA, **options).epsilon


# a prototype's: noise, diameter, step size, epsilon after 1e3, 1e4 and 1e7 steps, R and theta there
PRINTED = [
    (1, 1, 1, 2.101, 6.713, 14.679, 9424, 0.32),
    (1, 1, 0.1, 2.101, 6.713, 70.076, 94962, 0.32),
    (1, 0.1, 1, 2.101, 4.089, 4.089, 1099, 0.24),
    (1, 0.01, 1, 1.721, 1.721, 1.721, 149, 0.12),
    (4, 1, 1, 0.301, 1.035, 2.209, 10048, 0.48),
    (4, 1, 0.1, 0.301, 1.035, 8.236, 100852, 0.48),
    (4, 0.1, 1, 0.301, 0.632, 0.632, 993, 0.48),
    (4, 0.01, 1, 0.186, 0.186, 0.186, 105, 0.44),
]


@pytest.mark.parametrize("noise, diameter, step_size, early, middle, late, horizon, share", PRINTED)
def test_equation_3_6_as_printed(noise, diameter, step_size, early, middle, late, horizon, share):
    for num_steps, expected in ((10**3, early), (10**4, middle), (10**7, late)):
        found = epsilon(run(noise, diameter, step_size, num_steps), form="rdp")
        assert found == pytest.approx(expected, rel=0.01)
    found = last_iterate_epsilon(run(noise, diameter, step_size), DELTA, form="rdp")
    # flat around the optimum
    assert found.horizon == pytest.approx(horizon, rel=0.08) and found.share == pytest.approx(share, abs=0.05)


@pytest.mark.parametrize(
    "noise, diameter, expected", [(1, 1, 49.624), (1, 0.1, 15.356), (4, 1, 3.449), (4, 0.1, 0.990)]
)
def test_the_papers_own_statement_as_printed(noise, diameter, expected):
    """A replaced record moves a step by 2 L: the formula with half of the noise, in half of the domain."""
    assert epsilon(run(noise / 2, diameter / 2), form="rdp") == pytest.approx(expected, rel=0.01)


class LastShift(ProjectedSGD):
    """The paper makes the whole shift in the last step, Eq. (5.3)."""

    def shift_costs(self, horizons):
        return (1 - self.step_size * self.l2) ** (2 * horizons) * (self.diameter / self.step_size) ** 2


@pytest.mark.parametrize(
    "contraction, paper, optimal", [(0.999, 6.112, 4.639), (0.99, 2.086, 1.911), (0.9, 1.228, 1.217)]
)
def test_strongly_convex_as_printed(contraction, paper, optimal):
    setting = run(l2=1 - contraction)
    assert epsilon(LastShift(**vars(setting)), form="rdp") == pytest.approx(paper, rel=0.01)
    assert epsilon(setting, form="rdp") == pytest.approx(optimal, rel=0.01)
    assert epsilon(setting) < epsilon(setting, form="rdp")


@pytest.mark.parametrize("l2, noise, num_steps", [(0.5, 8.0, 1), (0.5, 8.0, 50), (0.1, 8.0, 400), (0.02, 4.0, 3000)])
def test_strongly_convex_losses_need_no_ball(l2, noise, num_steps):
    """Remark 5.2. In the worst case, a gradient of L in every step, the last iterate is one Gaussian mechanism."""
    setting = run(
        noise, math.inf, num_steps=num_steps, num_examples=100, expected_batch_size=100, smoothness=1e-3, l2=l2
    )  # fmt: skip
    kept = (1 - l2) ** np.arange(num_steps)
    apart = kept.sum() / 100  # eta L / b in every step, of which later steps leave a part
    assert apart <= setting.distance == pytest.approx(1 / (100 * l2))
    exact = get_epsilon_gaussian(noise / 100 * math.sqrt((kept**2).sum()) / apart, DELTA)
    assert exact * (1 - 1e-6) <= epsilon(setting) <= 1.15 * exact


@pytest.mark.parametrize("batch, step_size, slack", [(1000, 1.55, 1.2), (1000, 1.65, 1.2), (20, 1.55, 2.0)])
def test_steps_up_to_2_over_m_contract_less(batch, step_size, slack):
    """Remark 5.3, on an example that is known exactly. The others' losses are ``w^2 / 2`` (M = 1, l2 = 0.2), so a step
    overshoots: the sign of w turns, its size shrinks to c. The record's loss is Huber's, and pushes on in every step.

    From far away its gradient is L in size, so both last iterates are Gaussians of one variance. Of all others there
    are b, each in every batch; the bound has room for one more, which is its slack of small batches.
    """
    num_steps, noise, start, slope = 20, 20.0, 1e6, 1 - step_size * 1.2
    cap = batch_cap_of(batch, batch, num_steps, DELTA)
    assert cap == batch + 1 and step_size > 2 / 1.4
    setting = run(
        noise, math.inf, step_size, num_steps, num_examples=batch, expected_batch_size=batch, smoothness=1.0, l2=0.2,
        batch_cap=cap,
    )  # fmt: skip
    ends = []
    for has_record in (False, True):
        w = start
        for _ in range(num_steps):
            w = slope * w - step_size * has_record * np.clip(w, -1.0, 1.0) / batch
        ends.append(w)
    apart, kept = abs(ends[1] - ends[0]), slope ** np.arange(num_steps)
    assert apart == pytest.approx(step_size / batch * np.abs(kept).sum(), rel=1e-6) and apart <= setting.distance
    stddev = step_size * noise / batch * math.sqrt((kept**2).sum())
    assert min(map(abs, ends)) > 1e3 * stddev  # the noise never brings it near 0, where the gradient is smaller
    exact = get_epsilon_gaussian(stddev / apart, DELTA)
    assert exact * (1 - 1e-6) <= epsilon(setting) <= slack * exact
    if batch == 1000:  # what a contraction to 1 - eta l2 would claim is not true
        assert epsilon(Optimist(**vars(setting))) < exact


class Optimist(ProjectedSGD):
    """Takes long steps to contract like short ones."""

    def _gaps(self, step_sizes):
        return step_sizes * self.l2


def test_long_steps_of_poisson_batches_are_paid_for_or_refused():
    """Batches vary, and the contraction is that of the largest one that delta does not pay for."""
    size = dict(num_examples=10_000, expected_batch_size=1000, num_steps=1000)
    cap = batch_cap_of(*size.values(), DELTA)
    assert 1000 * stats.binom.sf(cap - 1, 10_000, 0.1) <= 1e-3 * DELTA < 1000 * stats.binom.sf(cap - 3, 10_000, 0.1)
    long = run(4.0, 0.1, 1.6, smoothness=0.5, l2=0.5, batch_cap=cap, **size)
    found = last_iterate_epsilon(long, DELTA)
    assert found.horizon is not None and found.epsilon > 0
    assert epsilon(dataclasses.replace(long, decay=0.1)) > 0
    assert 1 - long._gaps(1.6) == pytest.approx(1.6 * (0.5 * cap / 1000 + 0.5) - 1)
    with pytest.raises(DPConfigError, match=r"above 2 / \(M B / b \+ l2\), batches having up to B = .* Use at most"):
        dataclasses.replace(long, step_size=1.9)
    with pytest.raises(DPConfigError, match=r"above 2 / \(M \+ 2 l2\)"):
        dataclasses.replace(long, batch_cap=None)


def test_without_a_ball_batches_of_all_steps_have_to_contract():
    """One that is too large may lead two runs apart, whenever it comes; in a ball only the last R steps count."""
    assert epsilon(run(diameter=0.1, smoothness=1.0, l2=0.1)) > 0
    assert epsilon(run(diameter=math.inf, smoothness=1.0, l2=0.1, num_steps=1000)) > 0
    with pytest.raises(DPConfigError, match="not rare enough"):
        epsilon(run(diameter=math.inf, smoothness=1.0, l2=0.1))


@pytest.mark.parametrize("num_steps", [1, 10, 100, 1000, 3000])
def test_never_below_the_exact_worst_case(num_steps):
    """A walk on an interval: the exact loss reaches its plateau at 8.7; one step is tight."""
    setting = run(
        diameter=6.0, num_steps=num_steps, num_examples=100, expected_batch_size=10, smoothness=0.01,
    )  # fmt: skip
    without, with_it = random_walk.laws(
        diameter=6.0, step_size=1.0, noise=0.1, drift=0.1, sample_rate=0.1, num_steps=num_steps, cells=300
    )
    exact = random_walk.epsilon(without, with_it, DELTA)
    bound = epsilon(setting)
    assert bound >= exact
    if num_steps == 1:
        assert bound == pytest.approx(exact, rel=1e-3)
    if num_steps == 3000:
        assert exact == pytest.approx(8.7, abs=0.1) and bound < epsilon(setting, form="rdp") < 48


def test_few_steps_cost_what_composition_says():
    found = last_iterate_epsilon(run(num_steps=500), DELTA)
    event = SelfComposedDpEvent(PoissonSampledDpEvent(0.01, GaussianDpEvent(1.0)), 500)
    spent = accountants.epsilon(event, DELTA, "add_or_remove_one").epsilon
    assert found == LastIterate(spent, spent, None, None)


@pytest.mark.parametrize("form", ["pld", "rdp"])
def test_more_steps_domain_and_less_noise_never_cost_less(form):
    def sorted_by(values):
        found = [epsilon(setting, form=form) for setting in values]
        return all(a <= b * (1 + 2e-3) for a, b in zip(found, found[1:], strict=False))

    assert sorted_by(run(diameter=0.03, num_steps=t) for t in (10, 300, 1000, 10**5))
    assert sorted_by(run(diameter=d) for d in (0.01, 0.03))
    assert sorted_by(run(noise=z, diameter=0.03) for z in (4, 2, 1))
    assert sorted_by(run(diameter=0.03, step_size=eta) for eta in (2.0, 1.0, 0.3))  # smaller noise in a step
    assert sorted_by(run(diameter=0.03, l2=l2) for l2 in (0.1, 0.01, 0.0))
    assert sorted_by(run(diameter=0.03, decay=decay, num_steps=10**4) for decay in (0.0, 0.5))


def test_a_query_of_ten_million_steps_takes_seconds():
    """The processor's, of the slowest case printed above: 2.4 on an idle machine, 8 on one that others slow down."""
    began = time.process_time()
    epsilon(run(step_size=0.1, diameter=1.0, noise=1.0 + 1e-6))  # nothing of it was computed before
    assert time.process_time() - began < 20


def test_the_plateau():
    """At about n D / (eta L) steps; more are free, a tenth of them are not."""
    setting = run(noise=4.0, diameter=0.1)
    found = plateau(setting, DELTA)
    assert 1000 < found < 5 * 1000
    at = {t: epsilon(dataclasses.replace(setting, num_steps=t), form="rdp") for t in (found // 2, found, 10**6)}
    assert at[found] == pytest.approx(at[10**6], rel=0.01) and at[found // 2] < 0.75 * at[found]
    assert plateau(run(diameter=1e-6), DELTA) <= 2  # one step has to share its noise
    with pytest.raises(DPConfigError, match="Use 0"):
        plateau(run(decay=0.5), DELTA)


@pytest.mark.parametrize("target", [2.0])
def test_calibration_spends_nearly_all_and_never_more(target):
    setting = run(diameter=0.1, num_steps=10**5)
    noise = calibrate_last_iterate(setting, target, DELTA)
    assert 0.99 * target < epsilon(dataclasses.replace(setting, noise_multiplier=noise)) <= target


def test_the_smallest_l2_is_as_good_as_none():
    none = epsilon(run(diameter=0.1), form="rdp")
    for l2 in (1e-300, 1e-17, 1e-15, 1e-12):
        assert epsilon(run(diameter=0.1, l2=l2), form="rdp") == pytest.approx(none, rel=1e-6)
    strong = run(smoothness=1e-3, l2=0.99, step_size=1.0, num_steps=10**6)
    assert 0 < epsilon(strong) < epsilon(run(smoothness=1e-3, l2=0.5, step_size=1.0, num_steps=10**6))


def test_where_no_plateau_is_reached_there_is_none():
    assert plateau(run(diameter=1e12), DELTA) is None


def test_many_steps_at_a_tiny_delta_are_left_to_renyi_divergences():
    """Where rounding in a convolution would no longer be small beside delta."""
    setting = run(num_examples=10**7, expected_batch_size=1000, diameter=1.0, num_steps=10**9, noise=2.0)
    tiny = last_iterate_epsilon(setting, 1e-9)
    assert tiny.epsilon == last_iterate_epsilon(setting, 1e-9, form="rdp").epsilon and tiny.horizon > 10**6


def test_large_batches_are_paid_for_or_refused():
    """At eta = 2 / M no batch above the expected one contracts; at half of it the chance is nil."""
    assert run(smoothness=1.0).largest_batch == 200 and run(smoothness=0.5, l2=0.5).largest_batch == 200
    with pytest.raises(DPConfigError, match="Use a smaller step_size"):
        epsilon(run(smoothness=1.9))
    few = run(smoothness=1.0, expected_batch_size=10, num_examples=1000)
    with pytest.raises(DPConfigError, match="not rare enough"):
        epsilon(few)
    assert epsilon(dataclasses.replace(few, num_steps=3)) > 0  # plain composition needs no contraction


@pytest.mark.parametrize(
    "change, match",
    [
        ({"step_size": 4.1}, r"above 2 / \(M \+ 2 l2\) = 4"),
        ({"step_size": 3.9, "l2": 0.1}, "Use at most 2.857"),
        ({"diameter": 0.0}, "diameter=0.0 is not > 0"),
        ({"diameter": math.inf}, "diameter=inf"),
        ({"lipschitz": -1.0}, "lipschitz"),
        ({"smoothness": math.nan}, "smoothness"),
        ({"decay": 1.0}, r"a number in \[0, 1\)"),
        ({"l2": -0.1}, "l2=-0.1 is out of range"),
        ({"num_steps": 0}, "num_steps"),
        ({"expected_batch_size": 10_001}, "more than the 10000 records"),
    ],
)
def test_refusals(change, match):
    with pytest.raises(DPConfigError, match=match):
        run(**change)


def test_no_delta_and_no_noise():
    with pytest.raises(DPConfigError, match="outside"):
        last_iterate_epsilon(run(), 1.0)
    assert epsilon(run(noise=0.0)) == math.inf


@pytest.mark.parametrize("scale", [1e-160, 1.0, 1e150])
def test_shift_costs_depend_on_the_ratio_of_diameter_and_step_size(scale):
    """Tiny numbers do not underflow to a cost of 0."""
    setting = run(diameter=2e-3 * scale, step_size=1e-2 * scale, smoothness=0.5 / scale, num_steps=100)
    assert setting.shift_costs(np.array([25])) == pytest.approx([0.04 / 25])


def test_the_gap_in_the_proof_for_replace_one():
    """Two records, batches of one, one step from one place: what docs/convex.md says of the conditional laws.

    The gradients are 1 and -1, and the first record is replaced by one of gradient -1. The noise N(0, 4) is split into
    Y and Z of variance 2 each, and Y' = Y + (the change of the gradient, if the first record is in the batch). Given
    Y = Y' = y the proof takes both iterates for equal in law, since they start in one place. They are not: Y' tells
    the batch.
    """
    y, variance = -2.0, 2.0
    is_first = 0.5 * stats.norm.pdf(y + 2, scale=variance**0.5)
    posterior = is_first / (is_first + 0.5 * stats.norm.pdf(y, scale=variance**0.5))
    assert posterior == pytest.approx(1 / (1 + math.exp(-1)))  # 0.731, and 0.5 without the change
    at = np.linspace(-12, 12, 200_001)

    def law(chance):
        return chance * stats.norm.pdf(at - 1, scale=variance**0.5) + (1 - chance) * stats.norm.pdf(
            at + 1, scale=variance**0.5
        )

    first, second = law(0.5), law(posterior)
    divergence = math.log(np.trapezoid(first**2 / second, at))
    assert divergence == pytest.approx(0.0823, abs=1e-4)  # nats, of order 2; the proof says 0
