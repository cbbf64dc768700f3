"""DP^2 against a slow float64 reference that is fed the same batches and the same noise."""

from __future__ import annotations

import math

import pytest
import torch

from hf_dpopt import DPConfigError, PrivacyConfig, make_plan
from hf_dpopt.postprocess import IndependentNoise
from hf_dpopt.preclip import DelayedPreconditioner, make_preclip, queries
from hf_dpopt.preclip.delayed import VARIANTS
from tests.preclip.loop import EXPECTED, Loop, plan
from tests.preclip.loop import gradient as of_record
from tests.reference.dp2 import trajectory

CLIP, OWN_CLIP, RATE, RATIO, BETA, EPS = 0.7, 2.5, 0.05, 3.0, 0.8, 1e-3


def _compare(
    tmp_path,
    spec: DelayedPreconditioner,
    num_steps: int,
    noise_multiplier: float = 1.0,
    tolerance: float = 2e-5,
    **config,
) -> None:
    made = plan(num_steps, spec, clipping_norm=CLIP, noise_multiplier=noise_multiplier, **config)
    loop = Loop(tmp_path, made, rate=RATE)
    visited, seen = [], []
    for t in range(1, num_steps + 1):
        visited.append(loop.weights())
        loop.step(t)
        seen.append(loop.weights())
    s1 = spec.delay
    variance = (noise_multiplier * math.sqrt(spec.num_queries) * CLIP / EXPECTED) ** 2 / s1
    want = trajectory(
        visited, of_record, loop.batches, loop.noise,
        expected=EXPECTED, s1=s1, s2=spec.adaptive_steps or s1, clip_sgd=CLIP,
        clip_adaptive=spec.clipping_norm or CLIP, rate=RATE, rate_adaptive=RATE * spec.learning_rate_ratio,
        rule=spec.second_moment, beta=spec.beta, eps=spec.eps if spec.eps is not None else math.sqrt(variance),
        factored=spec.factored, variance=variance if spec.unbiased else 0.0, variant=spec.variant,
        eps_of=None if spec.eps is not None else lambda count: math.sqrt(variance * s1 / count),
    )  # fmt: skip
    for got, expected in zip(seen, want, strict=True):
        for g, w in zip(got, expected, strict=True):
            assert (g.double() - w).abs().max() <= tolerance * w.abs().max()


@pytest.mark.slow_but(8)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("factored", [False, True], ids=["full", "factored"])
@pytest.mark.parametrize("rule", ["rmsprop", "adagrad", "yogi"])
def test_every_step_is_the_papers(tmp_path, rule, factored, variant):
    spec = DelayedPreconditioner(
        delay=3, second_moment=rule, eps=EPS, beta=BETA, clipping_norm=OWN_CLIP, learning_rate_ratio=RATIO,
        factored=factored, variant=variant,
    )  # fmt: skip
    # noise that is divided by small D afterwards is large, and its rounding in float32 with it
    _compare(tmp_path, spec, 14, tolerance=1e-4 if variant == "noise_first" else 2e-5)


OF_ALGORITHM_2 = {"variant": "algorithm2"}


@pytest.mark.parametrize("changes", [
    {"adaptive_steps": 2}, {"adaptive_steps": 7}, {"delay": 1}, {"unbiased": True}, {"eps": None},
    {"unbiased": True, "factored": True, "eps": None}, {"clipping_norm": None, "learning_rate_ratio": 1.0},
    # the first mean is of one release, those after it of `delay`: noise and floor are those of so many
    *(OF_ALGORITHM_2 | more for more in (
        {"delay": 2}, {"unbiased": True}, {"eps": None}, {"unbiased": True, "eps": None, "delay": 5},
        {"clipping_norm": None, "learning_rate_ratio": 1.0},
    )),
], ids=str)  # fmt: skip
def test_options_do_what_they_say(tmp_path, changes):
    values = dict(delay=3, eps=EPS, beta=BETA, clipping_norm=OWN_CLIP, learning_rate_ratio=RATIO)
    # an unbiased second moment may come near 0 and is divided by then: rounding shows
    tolerance = 1e-3 if "unbiased" in changes else 2e-5
    _compare(tmp_path, DelayedPreconditioner(**(values | changes)), 12, tolerance=tolerance)


def test_without_noise_it_is_exact(tmp_path):
    _compare(tmp_path, DelayedPreconditioner(delay=3, eps=EPS, clipping_norm=OWN_CLIP), 12, noise_multiplier=0.0)


def test_algorithm_2_refreshes_from_the_first_step_on():
    """Step by step by hand, in one dimension: steps 0, s, 2 s take the plain release, and D is made of it, too."""
    spec = DelayedPreconditioner(delay=3, eps=0.5, beta=0.5, variant="algorithm2")
    state = spec.start({"w": torch.zeros(1)}, clipping_norm=1.0, noise=IndependentNoise(0.0))
    plain, second = [4.0, 1.0, 2.0, 6.0, 3.0], [100.0, 200.0, 300.0, 400.0, 500.0]
    divisors, got = [], []
    for p, q in zip(plain, second, strict=True):
        _, scale = state.scales()
        divisors.append(1.0 if scale is None else 1 / scale.weights("w", torch.zeros(1)).item())
        got.append(state.receive(queries.join([{"w": torch.tensor([v])} for v in (p, q)]))["w"].item())
    assert got == [4.0, 200.0, 300.0, 6.0, 500.0]
    first = math.sqrt(0.5 * 4.0**2)  # the mean of one release
    then = math.sqrt(0.5 * first**2 + 0.5 * ((1.0 + 2.0 + 6.0) / 3) ** 2)  # of those after it, up to its own
    assert divisors == pytest.approx([1.0, first + 0.5, first + 0.5, 1.0, then + 0.5])


@pytest.mark.slow
def test_algorithm_2_is_for_independent_noise():
    """Its updates come from two streams of noise in turn, so what one step added, the next does not take back."""
    asked = dict(noise_mechanism="nu_dpftrl", noise_kwargs={"nu": 0.1}, sampling="fixed_order")
    options = {"delay": 3, "variant": "algorithm2"}
    with pytest.raises(DPConfigError, match="noise_mechanism='gaussian'"):
        plan(12, DelayedPreconditioner(**options), **asked)
    with pytest.raises(DPConfigError, match="variant='extra_query'"):
        plan(12, preconditioner="dp2_rmsprop", preconditioner_kwargs=options, **asked)
    budget = dict(noise_mechanism="auto", target_epsilon=4.0, noise_multiplier=None)
    assert plan(12, DelayedPreconditioner(**options), **budget).strategy.is_independent


@pytest.mark.parametrize(("way", "strategy"), [("restart", "restarted"), ("carry_on", "blt")])
def test_correlated_noise_crosses_a_change_of_the_scale(tmp_path, way, strategy):
    spec = DelayedPreconditioner(delay=4, adaptive_steps=2, eps=EPS, clipping_norm=OWN_CLIP, unbiased=False)
    asked = dict(
        noise_mechanism="nu_dpftrl", noise_kwargs={"nu": 0.1}, sampling="fixed_order", noise_at_changes=way
    )  # fmt: skip
    made = plan(12, spec, **asked)
    assert made.config.noise_restart_every == (2 if way == "restart" else None) and made.strategy.name == strategy
    _compare(tmp_path, spec, 12, **asked)


def test_restarts_that_miss_a_change_are_refused_if_they_were_to_meet_it():
    spec = DelayedPreconditioner(delay=4)
    correlated = dict(noise_mechanism="nu_dpftrl", noise_kwargs={"nu": 0.1}, sampling="fixed_order")
    made = plan(16, spec, noise_restart_every=2, **correlated)
    assert made.config.noise_restart_every == 2 and made.config.noise_at_changes == "restart"
    with pytest.raises(DPConfigError, match="divisor of 4"):
        plan(16, spec, noise_restart_every=3, noise_at_changes="restart", **correlated)
    made = plan(16, spec, noise_restart_every=3, **correlated)  # at steps of one's own, and across the changes
    assert made.config.noise_restart_every == 3 and made.config.noise_at_changes == "carry_on"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("factored", [False, True], ids=["full", "factored"])
def test_a_state_continues_bit_for_bit_in_every_phase(factored, variant):
    spec = DelayedPreconditioner(delay=3, adaptive_steps=None if variant in ("extra_query", "algorithm2") else 2, factored=factored,
                                 eps=None, clipping_norm=2.0, variant=variant)  # fmt: skip
    shapes = {"w": torch.zeros(4, 3), "b": torch.zeros(4)}
    noise = IndependentNoise(0.01)
    generator = torch.Generator().manual_seed(0)
    steps = [
        [{n: torch.randn(p.shape, generator=generator) for n, p in shapes.items()} for _ in range(spec.num_queries)]
        for _ in range(14)
    ]

    def take(state, step):
        scales = state.scales()
        out = state.receive(queries.join([{n: g.clone() for n, g in query.items()} for query in step]))
        whole = [
            {n: s.weights(n, p) for n, p in shapes.items()} | {"factor": torch.tensor(s.factor)} for s in scales if s
        ]
        return [*whole, out, {"gain": torch.tensor(state.gain if state.gain is not None else math.nan)}]

    reference = spec.start(shapes, clipping_norm=1.0, noise=noise)
    for k, step in enumerate(steps):
        resumed = spec.start(shapes, clipping_norm=1.0, noise=noise)
        resumed.load_state_dict(reference.state_dict())
        for later in steps[k:]:
            a = take(resumed, later)
            if later is steps[k]:
                b = take(reference, step)
                assert len(a) == len(b)
                for x, y in zip(a, b, strict=True):
                    assert all(torch.equal(x[n], y[n]) or x[n].isnan().all() for n in y), k


def test_the_state_of_another_preconditioner_is_refused():
    shapes = {"w": torch.zeros(4, 3)}
    full, factored = (DelayedPreconditioner(factored=f).start(shapes, clipping_norm=1.0, noise=IndependentNoise(1.0))
                      for f in (False, True))  # fmt: skip
    with pytest.raises(DPConfigError, match="options that the run began with"):
        factored.load_state_dict(full.state_dict())
    with pytest.raises(DPConfigError, match="options that the run began with"):
        full.load_state_dict({})


@pytest.mark.parametrize(("options", "match"), [
    ({"delay": 0}, "delay"), ({"delay": 2.5}, "delay"), ({"adaptive_steps": 0}, "adaptive_steps"),
    ({"second_moment": "adam"}, "rmsprop"), ({"eps": 0.0}, "> 0"), ({"eps": math.nan}, "finite"),
    ({"beta": 1.0}, r"\[0, 1\)"), ({"beta": -0.1}, r"\[0, 1\)"), ({"clipping_norm": 0}, "> 0"),
    ({"clipping_norm": math.inf}, "finite"), ({"learning_rate_ratio": -1}, "> 0"), ({"unbiased": 1}, "of type .*True or False"),
    ({"factored": "yes"}, "factored=.*True or False"), ({"variant": "variant1"}, "extra_query"),
    ({"variant": "extra_query", "adaptive_steps": 3, "delay": 2}, "leave adaptive_steps out"),
    ({"variant": "algorithm2", "adaptive_steps": 3}, "leave adaptive_steps out"),
    ({"variant": "algorithm2", "delay": 1}, "delay of 2 or more"),
])  # fmt: skip
def test_what_is_out_of_range_is_refused(options, match):
    with pytest.raises(DPConfigError, match=match):
        DelayedPreconditioner(**options)


@pytest.mark.parametrize(
    ("options", "num_steps", "delay"),
    [({}, 8, 1), ({}, 50, 5), ({}, 5000, 200), ({"variant": "algorithm2"}, 8, 2), ({"delay": 3}, 50, 3)],
)
def test_a_plan_takes_a_tenth_of_its_steps_for_the_delay(options, num_steps, delay):
    config = PrivacyConfig(
        target_epsilon=8, target_delta=1e-5, expected_batch_size=20, preconditioner="dp2_rmsprop",
        preconditioner_kwargs=options,
    )  # fmt: skip
    assert make_plan(config, num_examples=1000, num_steps=num_steps).preclip.delay == delay


def test_a_continued_run_keeps_its_delay():
    config = PrivacyConfig(
        noise_multiplier=1, target_delta=1e-5, expected_batch_size=20, preconditioner="dp2_rmsprop"
    )  # fmt: skip
    plan = make_plan(config, num_examples=1000, num_steps=50)
    longer = make_plan(config, num_examples=1000, num_steps=80, recorded=plan.record)
    assert longer.preclip.delay == plan.preclip.delay == 5


def test_options_of_a_name_are_checked():
    assert make_preclip("dp2_yogi", {"delay": 7}).second_moment == "yogi"
    assert make_preclip("dp2_yogi", {"delay": 7}, 20).delay == 7
    with pytest.raises(DPConfigError, match="does not know delays.*It knows: delay"):
        make_preclip("dp2_rmsprop", {"delays": 7})
    with pytest.raises(DPConfigError, match="does not know second_moment"):
        make_preclip("dp2_rmsprop", {"second_moment": "yogi"})
    with pytest.raises(DPConfigError, match="leave them out"):
        make_preclip("none", {"delay": 7})
    with pytest.raises(DPConfigError, match="Use one of"):
        make_preclip("dp2")
