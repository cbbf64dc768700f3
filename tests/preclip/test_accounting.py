"""What a preconditioner changes in the plan: nothing, but for a second query in every step."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import scipy.optimize
import scipy.stats
import torch

from hf_dpopt import DPConfigError, PrivateRun, private_step
from hf_dpopt.clipping import make_engine
from hf_dpopt.clipping.scaling import Scale
from hf_dpopt.common.types import ClippedSums
from hf_dpopt.postprocess import Postprocess
from hf_dpopt.preclip import PRECLIPS, DelayedPreconditioner, Identity, Preclip
from hf_dpopt.preclip.preconditioner import _Nothing
from hf_dpopt.run.ledger import LEDGER
from hf_dpopt.run.stages import Stages
from tests.preclip.loop import CLIP_SGD, EXPECTED, NUM_RECORDS, Loop, plan
from tests.preclip.loop import model as loop_model
from tests.reference.gaussian_mixtures import gaussian_delta


@pytest.mark.parametrize("name", ["dp2_rmsprop", "dp2_adagrad", "dp2_yogi"])
@pytest.mark.parametrize("variant", ["dp2", "noise_first"])
def test_a_scale_of_released_values_costs_nothing(name, variant):
    options = {"delay": 3, "variant": variant, "clipping_norm": 5.0}
    with_it = plan(20, preconditioner=name, preconditioner_kwargs=options)
    without = plan(20)
    assert with_it.epsilon() == without.epsilon() and with_it.event == without.event
    assert with_it.sensitivity == without.sensitivity == CLIP_SGD


TWO_QUERIES = ["extra_query", "algorithm2"]


@pytest.mark.parametrize("variant", TWO_QUERIES)
def test_two_queries_are_one_gaussian_of_noise_smaller_by_the_root_of_two(tmp_path, variant):
    """sigma on each of two sums costs what sigma / sqrt(2) on one does; the plan's noise is sqrt(2) louder on each."""
    double = DelayedPreconditioner(delay=3, variant=variant)
    sigma = 1.3
    two, one = plan(20, double, noise_multiplier=sigma / math.sqrt(2)), plan(20, noise_multiplier=sigma / math.sqrt(2))
    assert two.epsilon() == one.epsilon()
    assert two.sensitivity == pytest.approx(math.sqrt(2) * CLIP_SGD)
    loop = Loop(tmp_path, two)
    assert loop.run.noise.draw_stddev == pytest.approx(sigma * CLIP_SGD)
    loop.step(1)
    first, second = loop.noise[0]
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True))  # noise of its own for each
    swapped = plan(20, double, noise_multiplier=sigma, adjacency="replace_one", sampling="fixed_order")
    assert swapped.sensitivity == pytest.approx(2 * math.sqrt(2) * CLIP_SGD)


def test_every_step_of_algorithm_2_pays_for_two_queries_and_epsilon_is_that_of_the_composition():
    """Independent of the plan's accountant: zCDP of T Gaussians, each of sensitivity sqrt(2) C and noise sigma C.

    Records in every batch, so no sampling hides the constant: rho = T (sqrt(2) C)^2 / (2 (sigma C)^2) = T / sigma^2.
    """
    num_steps, sigma = 8, 9.0
    made = plan(
        num_steps, DelayedPreconditioner(delay=3, variant="algorithm2"), noise_multiplier=sigma / math.sqrt(2),
        expected_batch_size=NUM_RECORDS, sampling="fixed_order", adjacency="zero_out",
    )  # fmt: skip
    rho = num_steps / sigma**2
    mu = math.sqrt(2 * rho)  # of the one Gaussian mechanism that all releases together are

    exact = scipy.optimize.brentq(lambda epsilon: gaussian_delta(mu, epsilon) - made.delta, 1e-6, 50)
    assert made.epsilon() == pytest.approx(exact, rel=1e-3) and made.epsilon() >= exact * (1 - 1e-9)


@pytest.mark.parametrize("step", range(1, 7))
def test_every_step_of_algorithm_2_adds_the_noise_that_was_planned_to_both_queries(tmp_path, step):
    """A plain step asks its second query all the same: no step is released with less noise than it was charged for."""
    loop = Loop(tmp_path, plan(6, DelayedPreconditioner(delay=3, variant="algorithm2")))
    for t in range(1, step):
        loop.step(t)
    scales = loop.preclip.scales()
    assert len(scales) == 2 and (scales[1] is None) == (step % 3 == 1)
    loop.step(step)
    assert all(added.abs().min() > 0 for query in loop.noise[-1] for added in query)


def test_the_ledger_names_the_preconditioner_and_keeps_to_it(tmp_path):
    loop = Loop(tmp_path, plan(6, DelayedPreconditioner(delay=2, clipping_norm=3.0)))
    loop.step(1)
    loop.run.close()
    text = (tmp_path / "out" / LEDGER).read_text()
    recorded = [json.loads(line) for line in text.splitlines() if '"preclip"' in line]
    assert recorded and '"delay": 2' in text.replace('":2', '": 2') and "dp2" in text
    with pytest.raises(DPConfigError, match="preclip"):
        Loop(tmp_path, plan(6, DelayedPreconditioner(delay=3, clipping_norm=3.0)))
    with pytest.raises(DPConfigError, match="preclip"):
        Loop(tmp_path, plan(6))


def test_a_step_takes_the_preconditioner_of_its_own_run_alone(tmp_path):
    spec = DelayedPreconditioner(delay=2)
    loop = Loop(tmp_path, plan(6, spec))
    loop.step(1)
    assert loop.run.preclip is loop.preclip
    idle = PrivateRun(plan(6, spec), output_dir=tmp_path / "idle", private_state_dir=tmp_path / "keys of idle")
    with pytest.raises(DPConfigError, match="start_preclip"):
        private_step(loop.engine, loop.losses, [], run=idle, step=1)
    assert idle.charged == [0]  # refused before it was charged
    plain = PrivateRun(plan(6), output_dir=tmp_path / "plain", private_state_dir=tmp_path / "keys of plain")
    private_step(loop.engine, loop.losses, [], run=plain, step=1)  # nothing to start where there is none


def test_nothing_is_released_that_was_not_charged_and_nothing_twice(tmp_path):
    run = PrivateRun(plan(6), output_dir=tmp_path / "out", private_state_dir=tmp_path / "keys")
    sums = ClippedSums({"weight": torch.zeros(3)})
    with pytest.raises(DPConfigError, match=r"not begun.*run\.begin"):
        run.release(sums, 1)
    run.begin(1, make_engine(loop_model(), run.plan.clipper))
    assert run.charged == [1]
    assert run.release(sums, 1)["weight"].abs().min() > 0
    with pytest.raises(DPConfigError, match="not begun"):
        run.release(sums, 1)


def test_steps_are_taken_in_order(tmp_path):
    """Samplers draw by the number of a step: a record would be shown in steps 1, 11, 21, paid for as one epoch."""
    run = PrivateRun(plan(30), output_dir=tmp_path / "out", private_state_dir=tmp_path / "keys")
    engine = make_engine(loop_model(), run.plan.clipper)
    run.begin(1, engine)
    for wrong in (1, 3, 11, 0):
        with pytest.raises(DPConfigError, match=f"Step {wrong} is not the one after those charged: 2 is next"):
            run.begin(wrong, engine)
    assert run.charged == [1]
    run.begin(2, engine)


@pytest.mark.parametrize("claim", ["queries", "count"])
def test_an_inherited_sensitivity_ratio_is_compared_with_the_step(tmp_path, claim):
    """Three sums, or a count beside one, under the ratio of one sum: epsilon would be that of the one."""

    class Working(_Nothing):
        def scales(self):
            return (None, None, None) if claim == "queries" else (Scale({}, count_weight=100.0),)

    class Lying(Identity):
        num_queries = 3 if claim == "queries" else 1

        def start(self, parameters, **kwargs):
            return Working()

    run = PrivateRun(plan(6, Lying()), output_dir=tmp_path / "out", private_state_dir=tmp_path / "keys")
    engine = make_engine(loop_model(), run.plan.clipper)
    run.start_preclip(engine)
    with pytest.raises(DPConfigError, match="sensitivity_ratio of the preconditioner leaves a query or a count out"):
        run.begin(1, engine)
    assert run.charged == [0]


def test_a_preconditioner_whose_author_misspells_the_sensitivity_cannot_be_made():
    """Else it would be accounted for as one that sums clipped gradients alone: a false epsilon."""

    class Extension(Preclip):
        name = "extension"

        def sensitivity_ration(self, noise_multiplier, expected_batch_size):
            return 1.0688

        def parameters(self):
            return {"name": self.name}

        def start(self, parameters, **unused):
            return Identity().start()

    class Mended(Extension):
        sensitivity_ratio = Extension.sensitivity_ration

    with pytest.raises(TypeError, match="abstract method '?sensitivity_ratio"):
        Extension()
    assert plan(6, Mended()).sensitivity == 1.0688 * CLIP_SGD


def test_every_registered_preconditioner_says_its_sensitivity_itself():
    for cls, _ in PRECLIPS.values():
        assert "sensitivity_ratio" in vars(cls), cls


@pytest.mark.slow_but(2)
@pytest.mark.parametrize("strategy", ["gaussian", "nu_dpftrl", "blt", "banded", "honaker", "tree", "dense"])
@pytest.mark.parametrize("restart", [None, 4])
def test_the_level_of_the_noise_is_that_of_the_matrices(tmp_path, strategy, restart):
    """`MechanismLevel` against B B^T of the whole run."""
    num_steps = 11
    options = {} if strategy == "gaussian" else {"sampling": "fixed_order", "noise_restart_every": restart}
    if strategy == "banded":
        options["noise_kwargs"] = {"num_bands": 3}
    made = plan(num_steps, noise_mechanism=strategy, **options)
    loop = Loop(tmp_path, made)
    level = loop.run.noise_level()
    noising = made.strategy.noising_matrix(num_steps)
    gram = noising @ noising.T * (made.draw_stddev * made.sensitivity / EXPECTED) ** 2
    for t in range(num_steps):
        loop.run._taken = t + 1
        assert level.variance() == pytest.approx(gram[t, t], rel=1e-9)
        for lag in range(1, num_steps):
            expected = gram[t, t - lag] if lag <= t else 0.0
            assert level.covariance(lag) == pytest.approx(expected, rel=1e-9, abs=1e-12 * gram[0, 0])
        for k in range(1, t + 2):
            mean = gram[t + 1 - k : t + 1, t + 1 - k : t + 1].sum() / k**2
            assert level.variance_of_mean(k) == pytest.approx(mean, rel=1e-9)


class Gained(Postprocess):
    """A map of the chain that multiplies by another number in every step, and one that asks for the level."""

    gain = 1.0

    def __init__(self):
        self.noise, self.told = None, []

    def set_noise(self, level):
        self.noise = level

    def __call__(self, released):
        self.told.append((self.noise.variance(), self.noise.covariance(1)))
        self.gain /= 2
        return {name: g * self.gain for name, g in released.items()}

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def test_a_level_within_the_chain_is_that_of_the_maps_before(tmp_path):
    """Two maps that halve their gain in every step: the covariance has the gains of both steps."""
    correlated = dict(noise_mechanism="nu_dpftrl", noise_kwargs={"nu": 0.05}, sampling="fixed_order")
    made = plan(6, **correlated)
    loop = Loop(tmp_path, made)
    first, second = Gained(), Gained()
    Stages(loop.run, loop.engine, loop.optimizer, [first, second])
    loop.preclip = loop.run.preclip
    for t in range(1, 7):
        loop.step(t, after_noise=(first, second))
    noising = made.strategy.noising_matrix(6)
    gram = noising @ noising.T * (made.draw_stddev * made.sensitivity / EXPECTED) ** 2
    gains = 0.5 ** np.arange(1, 7)
    lags = [0.0, *(gram[t, t - 1] for t in range(1, 6))]
    assert np.array(first.told) == pytest.approx(np.stack([np.diag(gram), lags], axis=1), rel=1e-9)
    scaled = [0.0, *(gains[t] * gains[t - 1] * gram[t, t - 1] for t in range(1, 6))]
    assert np.array(second.told) == pytest.approx(np.stack([gains**2 * np.diag(gram), scaled], axis=1), rel=1e-9)


def test_a_level_that_differs_between_coordinates_is_not_given(tmp_path):
    loop = Loop(tmp_path, plan(6, DelayedPreconditioner(delay=1, variant="noise_first")))
    level = loop.run.noise_level(loop.preclip)
    loop.step(1)
    assert level.variance() > 0
    loop.step(2)
    with pytest.raises(DPConfigError, match="not of one known level"):
        level.variance()
