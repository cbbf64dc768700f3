"""Correlated noise across scales that change, in units of the clip: docs/proofs/changing_scales.md, by brute force.

Every record moves the sum of a step by at most 1 clip, whatever the scales are; so the whole run is one Gaussian
mechanism of the matrix of its noise. Here the runs of the engine are compared with that matrix, record by record.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.stats import norm

from hf_dpopt import DPConfigError, PrivacyConfig, make_plan
from hf_dpopt.accounting import accountants, epsilon
from hf_dpopt.clipping import make_engine
from hf_dpopt.noise import BandedToeplitz, NuDPFTRL, Restarted, momentum_workload
from hf_dpopt.plan.compare import errors_across, ranked
from hf_dpopt.preclip import (
    DelayedPreconditioner,
    Preclip,
    QuantileClipping,
    ScaleChanges,
    ScaleThenPrivatize,
)
from hf_dpopt.preclip.subspace_projection import PublicSubspaceProjection
from hf_dpopt.sampling import SAMPLERS
from tests.preclip.loop import CLIP_SGD, NUM_RECORDS, Loop, plan

NU = {"noise_mechanism": "nu_dpftrl", "noise_kwargs": {"nu": 0.05}, "sampling": "fixed_order"}
STEPS = 12
FIXED = {"unsafe_fixed_noise_key": "17" * 32}  # of tests that look for one large value
ADAPTIVE: dict[str, Preclip] = {
    "dp2": DelayedPreconditioner(delay=4, adaptive_steps=2, eps=0.02, clipping_norm=2.0, learning_rate_ratio=0.3),
    "dp2, factored": DelayedPreconditioner(delay=2, factored=True, eps=0.02),
    "extra query": DelayedPreconditioner(delay=2, variant="extra_query", eps=0.02),
    "noise first": DelayedPreconditioner(delay=2, variant="noise_first", eps=0.02),
    "quantile": QuantileClipping(learning_rate=1.0, count_noise=0.4),
}
WAYS = ("carry_on", "restart")
CROSSING = [c for c in itertools.product(ADAPTIVE, WAYS) if c != ("quantile", "restart")]
ALONE: dict[str, Preclip] = {  # under independent noise
    "algorithm 2": DelayedPreconditioner(delay=3, clipping_norm=0.3, eps=1e-4, variant="algorithm2"),
    "fixed": ScaleThenPrivatize(
        scale={"weight": torch.tensor([[1e-3], [1.0], [1e3]]).expand(3, 6)}, clipping_norm=2.0
    ),
    "fixed, factored": ScaleThenPrivatize(
        scale={"weight": (torch.tensor([1e-3, 1.0, 1e3]), torch.linspace(0.1, 9, 6))}
    ),
}


# --- what the engine does --------------------------------------------------------------------------------------------


@pytest.mark.slow_but(6)
@pytest.mark.parametrize(("name", "way"), [*((name, None) for name in (*ALONE, *ADAPTIVE)), *CROSSING])
def test_a_record_moves_what_is_noised_by_no_more_than_the_plan_says(tmp_path, name, way):
    """Leave one out, over the scales that the run came upon: ``||C (G - G')|| <= sensitivity``, in units of the clip.

    The scales are functions of releases, so a neighbour is compared at the same releases: its gradients are taken at
    the weights and under the scales of the run, which is what the proof conditions on.
    """
    crosses = {"noise_at_changes": way, **NU} if way else {}
    made = plan(STEPS, (ADAPTIVE | ALONE)[name], adjacency="zero_out", **FIXED, **crosses)
    loop = Loop(tmp_path, made)
    moved = {b: [] for b in range(NUM_RECORDS)}
    for t in range(1, STEPS + 1):
        rows = loop.run.draw(t).tolist()
        scales = loop.preclip.scales()
        for b in moved:
            parts = []
            if b in rows:
                for scale in scales:
                    sums = make_engine(loop.model, made.clipper).empty_sum(scale)
                    batch = {"x": loop.x[[b]], "labels": loop.y[[b]]}
                    loop.engine.add_clipped_sum(sums, lambda batch=batch: loop.losses(batch), 1)
                    parts += [total.flatten().double() for total in sums.result().values()]
            moved[b].append(torch.cat(parts).numpy() if parts else None)
        loop.step(t)
    width = max(len(v) for of_record in moved.values() for v in of_record if v is not None)
    unit = made.sensitivity  # of the sums of one step
    whole = made.strategy.strategy_matrix(STEPS)
    bound = made.mechanism.sensitivity()
    largest, worst = 0.0, 0.0
    for of_record in moved.values():
        inputs = np.stack([np.zeros(width) if v is None else v for v in of_record])
        largest = max(largest, float(np.linalg.norm(inputs, axis=1).max()))
        worst = max(worst, float(np.linalg.norm(whole @ inputs)) / unit)
    assert 0.9 * unit <= largest <= unit * (1 + 1e-5), "no record reaches the bound of a step, or one exceeds it"
    if way:  # independent noise is accounted for step by step
        assert 0.3 * bound < worst <= bound * (1 + 1e-5), "nothing was tested, or a record exceeds the bound of a run"


@pytest.mark.slow_but(1)
@pytest.mark.parametrize(("name", "way"), CROSSING)
def test_whitened_the_noise_that_was_added_is_independent_at_one_level(tmp_path, name, way):
    """``C`` times what was added gives the draws back: normal, of the planned stddev, in every step and every scale."""
    made = plan(STEPS, ADAPTIVE[name], adjacency="zero_out", noise_at_changes=way, **NU)
    levels, products = [], []
    for seed in range(12):  # keys are fresh in each run
        loop = Loop(tmp_path / str(seed), made)
        for t in range(1, STEPS + 1):
            loop.step(t)
        added = [torch.cat([x.flatten() for query in noise for x in query]).numpy() for noise in loop.noise]
        draws = made.strategy.strategy_matrix(STEPS) @ np.stack(added) / (made.draw_stddev * made.sensitivity)
        levels.append(draws)
        products.append((draws[:, None, :] * draws[None, :, :]).sum(axis=-1))
    values = np.concatenate([draws.ravel() for draws in levels])
    count = len(values)
    z = norm.isf(1e-6 / (2 * STEPS * STEPS))  # false alarm 1e-6 over all pairs of steps
    assert abs(values.mean()) < z / math.sqrt(count)
    assert abs(np.square(values).mean() - 1) < z * math.sqrt(2 / count)
    per_pair = sum(products) / (count / STEPS)
    off = per_pair - np.eye(STEPS)
    assert np.abs(off).max() < 1.2 * z * math.sqrt(2 / (count / STEPS))


# --- sampled batches, by enumeration ---------------------------------------------------------------------------------


def _hockey_stick(gains_p: np.ndarray, gains_q: np.ndarray, eps: float) -> float:
    """E_P[1 - e^(eps - L)]_+ from log densities of draws of P under both."""
    return float(np.clip(1 - np.exp(eps + gains_q - gains_p), 0, None).mean())


def _adaptive(rule: str, y: np.ndarray) -> float:
    """Contribution of the record at a step in [-1, 1]: a function of what was released so far, as scales are."""
    if rule == "largest":
        return 1.0
    last = y[-1] if len(y) else 0.0
    return {"sign": 1.0 if last >= 0 else -1.0, "shrinks": 1 / (1 + abs(last))}[rule]


def _outcomes(matrix, inverse, patterns, weights, rule, stddev, num, rng, *, with_record):
    """Draws of the releases with or without the record, and their log densities under both.

    Whitened releases are ``C x + z``; x_t is a function of the releases ``y_s = x_s + (B z)_s`` of earlier steps, which
    are ``B`` times the whitened ones.
    """
    n = len(matrix)
    chosen = rng.choice(len(patterns), p=weights, size=num)
    z = stddev * rng.standard_normal((num, n))
    white = np.zeros((num, n))
    ways = np.zeros((num, n))  # contributions that the record would make, at these releases
    for i in range(num):
        for t in range(n):
            y = inverse[:t, :t] @ white[i, :t]
            ways[i, t] = _adaptive(rule, y)
            taken = np.asarray(patterns[chosen[i]][: t + 1]) * ways[i, : t + 1] if with_record else 0.0
            white[i, t] = z[i, t] + (matrix[t, : t + 1] @ taken if with_record else 0.0)
    log_with = np.logaddexp.reduce(
        [
            np.log(w) - np.square(white - (np.asarray(p) * ways) @ matrix.T).sum(axis=1) / (2 * stddev**2)
            for p, w in zip(patterns, weights, strict=True)
        ],
        axis=0,
    )
    log_without = -np.square(white).sum(axis=1) / (2 * stddev**2)
    return log_with, log_without


SAMPLED = {
    "cyclic poisson, carried on": ("cyclic_poisson", BandedToeplitz((1.0, 0.6)), 2, 6),
    "balls in bins, carried on": ("balls_in_bins", NuDPFTRL(0.1), 3, 6),
    "balls in bins, restarted": ("balls_in_bins", Restarted(NuDPFTRL(0.1), 4), 3, 6),
}


@pytest.mark.slow_but(3)
@pytest.mark.parametrize("rule", ["largest", "sign", "shrinks"])
@pytest.mark.parametrize("case", SAMPLED)
def test_no_adaptive_record_loses_more_than_the_event_says(case, rule):
    """All patterns of a sampler at small size, with contributions that follow the releases, against epsilon."""
    name, strategy, groups, n = SAMPLED[case]
    num_examples, batch = 12, 12 // groups if name == "balls_in_bins" else 2
    options = {"num_groups": groups} if name == "cyclic_poisson" else {}
    sampler = SAMPLERS[name](num_examples=num_examples, expected_batch_size=batch, **options)
    sampler.check_strategy(strategy)
    stddev, delta = 1.2, 0.05
    claimed = epsilon(sampler.release(strategy, stddev, n, planned_steps=n), delta, sampler.adjacencies[0]).epsilon
    if name == "balls_in_bins":
        patterns = [tuple(float(t % groups == b) for t in range(n)) for b in range(groups)]
        weights = np.full(groups, 1 / groups)
    else:  # given its group, the worst of which is the first, a record is drawn on its own in each turn
        turns = [t for t in range(n) if t % groups == 0]
        patterns, chances = [], []
        for bits in itertools.product((0, 1), repeat=len(turns)):
            patterns.append(tuple(float(dict(zip(turns, bits, strict=True)).get(t, 0)) for t in range(n)))
            rate = sampler.group_rate
            chances.append(math.prod(rate if bit else 1 - rate for bit in bits))
        weights = np.asarray(chances)
    matrix, inverse = strategy.strategy_matrix(n), strategy.noising_matrix(n)
    rng, num = np.random.default_rng(7), 4000
    common = (matrix, inverse, patterns, weights, rule, stddev, num, rng)
    with_p, without_p = _outcomes(*common, with_record=True)
    with_q, without_q = _outcomes(*common, with_record=False)
    slack = norm.isf(1e-6) * 0.5 / math.sqrt(num)
    assert _hockey_stick(with_p, without_p, claimed) <= delta + slack
    assert _hockey_stick(without_q, with_q, claimed) <= delta + slack
    if rule == "largest":  # and the test could tell: half of the claimed epsilon is not enough
        assert _hockey_stick(with_p, without_p, claimed / 4) > delta


# --- which way is taken ----------------------------------------------------------------------------------------------


def _compared(preclip=None, **changes):
    config = dict(
        target_epsilon=4.0, target_delta=1e-5, expected_batch_size=100, sampling="fixed_order",
        noise_mechanism="nu_dpftrl",
    ) | changes  # fmt: skip
    return ranked([make_plan(PrivacyConfig(**config), num_examples=20000, num_steps=1000, preclip=preclip)], None)[0]


@pytest.mark.parametrize("ratio", [2.0, 5.0])
def test_the_way_is_the_one_with_the_least_error(ratio):
    spec = DelayedPreconditioner(delay=50, learning_rate_ratio=ratio)  # noise of one phase is a fifth in the other
    found = {way: _compared(spec, noise_at_changes=way).rmse for way in WAYS}
    best = min(found, key=found.__getitem__)
    assert _compared(spec).plan.config.noise_at_changes == best == ("carry_on" if ratio < 3 else "restart")


def test_noise_that_is_not_taken_back_restarts():
    assert _compared(DelayedPreconditioner(delay=50, variant="noise_first")).plan.config.noise_at_changes == "restart"
    assert _compared(PublicSubspaceProjection()).plan.config.noise_at_changes == "restart"
    assert _compared(PublicSubspaceProjection(project="after_noise")).plan.config.noise_at_changes == "auto"


@pytest.mark.parametrize("workload", [False, True])
@pytest.mark.parametrize("taken_back", [True, False])
def test_the_predicted_error_is_that_of_the_matrices(taken_back, workload):
    n, factors = 30, np.resize([1.0, 1.0, 1.0, 4.0, 4.0], 30)
    changes = ScaleChanges((3, 2), (1.0, 4.0), is_taken_back=taken_back)
    strategy = NuDPFTRL(0.05)
    asked = momentum_workload(n, 0.9, np.linspace(1, 0.1, n).tolist()) if workload else None
    sums = asked.matrix() if asked else np.tril(np.ones((n, n)))
    noise = sums @ np.diag(factors)
    phase = np.arange(n) if not taken_back else np.zeros(n, int)  # gcd(3, 2) = 1: every step may be another phase
    want = sum(
        np.square(noise[:, phase == p] @ strategy.noising_matrix(n)[phase == p]).sum(axis=1)
        for p in set(phase.tolist())
    )
    np.testing.assert_allclose(errors_across(strategy, n, asked, changes), want)


def test_a_run_says_how_its_noise_crosses_and_keeps_to_it(tmp_path):
    spec = DelayedPreconditioner(delay=3, variant="noise_first")
    made = plan(STEPS, spec, noise_at_changes="carry_on", **NU)
    assert made.record.to_json()["noise_at_changes"] == "carry_on"
    loop = Loop(tmp_path, made)
    loop.step(1)
    loop.run.close()
    again = plan(STEPS, spec, **NU)
    assert again.config.noise_at_changes == "restart"
    resumed = plan(STEPS, spec, recorded=made.record, **NU)
    assert resumed.strategy == made.strategy and resumed.config.noise_at_changes == "carry_on"
    with pytest.raises(DPConfigError, match="noise_at_changes"):
        Loop(tmp_path, again)


def test_a_ledger_that_says_nothing_is_one_whose_noise_starts_anew():
    spec = DelayedPreconditioner(delay=3)
    made = plan(STEPS, spec, noise_at_changes="restart", **NU)
    recorded = made.record.to_json()
    assert "noise_at_changes" not in recorded
    for every in (recorded["noise_restart_every"], None):
        resumed = plan(STEPS, spec, recorded=made.record, noise_restart_every=every, **NU)
        assert resumed.strategy == made.strategy and resumed.record.to_json() == recorded


def test_a_sampler_without_a_proof_is_refused(monkeypatch):
    monkeypatch.setattr(SAMPLERS["fixed_order"], "takes_changing_scales", False)
    spec = DelayedPreconditioner(delay=3)
    with pytest.raises(DPConfigError, match="has no proof with sampling='fixed_order'"):
        plan(STEPS, spec, noise_at_changes="carry_on", **NU)
    assert plan(STEPS, spec, **NU).config.noise_at_changes == "restart"


def test_a_law_of_its_own_needs_a_proof_of_its_own():
    class Mine(SAMPLERS["fixed_order"]):
        name = "mine"
        adjacencies = ("zero_out",)

        def draw(self, key, step):
            return np.arange(2)

        def event(self, noise_stddev_over_clip, num_steps):
            return SAMPLERS["fixed_order"].event(self, noise_stddev_over_clip, num_steps)

        def describe(self, unit="record"):
            return "Mine."

    assert SAMPLERS["fixed_order"].takes_changing_scales and not Mine.takes_changing_scales


def test_where_nothing_changes_nothing_is_crossed():
    with pytest.raises(DPConfigError, match="no scale changes in this run"):
        plan(STEPS, noise_at_changes="carry_on", **NU)
    assert plan(STEPS, DelayedPreconditioner(delay=3)).config.noise_at_changes == "auto"  # independent noise


# --- the quantile ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adjacency", ["zero_out", "replace_one"])
def test_gradient_and_count_are_one_mechanism_under_correlated_noise(tmp_path, adjacency):
    """The weight of the count is one number of the plan, made of the stddev of the draws, and so is the sensitivity."""
    spec = QuantileClipping(count_noise=0.4)
    made = plan(STEPS, spec, adjacency=adjacency, **NU)
    moves = 2.0 if adjacency == "replace_one" else 1.0
    weight = made.draw_stddev * made.sensitivity / (0.4 * made.config.expected_batch_size)
    assert made.sensitivity == pytest.approx(moves * math.hypot(CLIP_SGD, weight / 2))
    assert made.epsilon() == plan(STEPS, adjacency=adjacency, **NU).epsilon()
    loop = Loop(tmp_path, made)
    weights = set()
    for t in range(1, STEPS + 1):
        weights.add(loop.preclip.scales()[0].count_weight)
        loop.step(t)
    assert len(weights) == 1 and weights.pop() == pytest.approx(weight)


def test_a_unit_without_gradient_adds_nothing_to_the_count(tmp_path):
    """Zeroed out, a record is one without gradient: gradient and count then move by half a weight at most."""
    made = plan(STEPS, QuantileClipping(count_noise=0.4), adjacency="zero_out", **NU)
    loop = Loop(tmp_path, made)
    scale = loop.preclip.scales()[0]

    def total(factor: float) -> dict[str, torch.Tensor]:
        sums = loop.engine.empty_sum(scale)
        batch = {"x": loop.x[:3], "labels": loop.y[:3]}
        weights = torch.tensor([1.0, 1.0, factor])
        loop.engine.add_clipped_sum(sums, lambda: loop.losses(batch) * weights, 3)
        return sums.result()

    there, zeroed = total(1.0), total(0.0)
    moved = math.sqrt(sum((there[name].double() - zeroed[name].double()).square().sum().item() for name in there))
    assert moved <= made.sensitivity * (1 + 1e-6)
    assert accountants.epsilon(made.event, made.delta, "zero_out").epsilon == made.epsilon()
