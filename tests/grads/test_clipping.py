"""From norms to factors: the bound holds at float32 for every norm there is, and `sensitivity` is what it says."""

from __future__ import annotations

import math

import pytest
import torch

from hf_dpopt.clipping.thresholds import CLIPPINGS, AutomaticClipping, make_clipping
from hf_dpopt.common.adjacency import SENSITIVITY_FACTOR
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.plan.choose import make_plan
from hf_dpopt.plan.config import PrivacyConfig

NUM_RECORDS = 20_000
NORMS = [1e-20, 1e-6, 0.37, 1.0, 12.5, 1e6, 1e15]  # clipping norms
# Squares of float32 gradients: their range ends at 3.4e38, their normal numbers begin at 1.2e-38.
EXTREME = [0.0, 1e-45, 1e-38, 1e-30, 1e-12, 0.5, 1.0, 1.0000001, 2.0, 1e12, 1e30, 3.4e38]


def random_squares(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Squared norms over the whole range of float32, and many around 1."""
    exponents = torch.empty(NUM_RECORDS // 2, dtype=torch.float64).uniform_(-44, 38)
    around_one = torch.empty(NUM_RECORDS // 2, dtype=torch.float64).uniform_(0.25, 4)
    return torch.cat([10**exponents, around_one]).to(dtype)


def clipped(factors_B: torch.Tensor, squares_B: torch.Tensor) -> torch.Tensor:
    """What the clip leaves of the norms, rounded once more to their own precision as the product is."""
    return (factors_B * squares_B.sqrt()).double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("clipping_norm", NORMS)
@pytest.mark.parametrize("name", CLIPPINGS)
def test_no_record_exceeds_the_bound(name, clipping_norm, dtype):
    """Not by an ulp: the product with the rounded factor is compared exactly."""
    for squares in (random_squares(dtype), torch.tensor(EXTREME, dtype=dtype)):
        squares = squares * torch.tensor(clipping_norm, dtype=torch.float64).square().to(dtype)
        squares = squares[squares.isfinite()]
        factors = make_clipping(name, clipping_norm).factors({"": squares})[""]
        assert factors.isfinite().all() and (factors >= 0).all() and factors.dtype == dtype
        assert (clipped(factors, squares) <= clipping_norm).all()


@pytest.mark.parametrize("clipping_norm", [1e-3, 1.0, 50.0])
def test_flat_leaves_small_records_alone_and_brings_large_ones_to_the_bound(clipping_norm):
    norms = torch.logspace(-4, 4, 1001) * clipping_norm
    factors = make_clipping("flat", clipping_norm).factors({"": norms.square()})[""]
    want = norms.double().clamp(max=clipping_norm)  # g * min(1, C / ||g||)
    torch.testing.assert_close(factors.double() * norms.double(), want, rtol=3e-6, atol=0)


@pytest.mark.parametrize("clipping_norm", [1e-3, 1.0, 50.0])
def test_automatic_is_the_papers_formula(clipping_norm):
    """Bu et al. 2022, Eq. 4 with gamma 0.01: C / (norm + gamma), also for small records."""
    norms = torch.logspace(-4, 4, 1001)
    factors = make_clipping("automatic", clipping_norm).factors({"": norms.square()})[""]
    torch.testing.assert_close(factors.double(), clipping_norm / (norms.double() + 0.01), rtol=3e-6, atol=0)
    assert AutomaticClipping(clipping_norm=1.0).gamma == 0.01


@pytest.mark.parametrize("num_groups", [1, 2, 7, 150])
def test_per_layer_bounds_the_whole_record(num_groups):
    """Each layer to C / sqrt(L); all of them large, the record reaches C and does not exceed it."""
    clipping, clipping_norm = make_clipping("per_layer", 0.3), 0.3
    squares = {f"layer{i}": random_squares() for i in range(num_groups)}
    factors = clipping.factors(squares)
    layers_LB = torch.stack([clipped(factors[g], squares[g]) for g in squares])
    assert (layers_LB <= clipping_norm / math.sqrt(num_groups)).all()
    assert (layers_LB.square().sum(dim=0).sqrt() <= clipping_norm).all()
    large = {g: torch.tensor([1e8]) for g in squares}
    reached = torch.stack([clipped(clipping.factors(large)[g], large[g]) for g in large]).square().sum().sqrt()
    assert reached == pytest.approx(clipping_norm, rel=3e-6)


def test_layers_are_the_modules_that_own_parameters():
    per_layer = make_clipping("per_layer", 1.0)
    assert per_layer.group("bert.layer.0.query.weight") == per_layer.group("bert.layer.0.query.bias")
    assert per_layer.group("bert.layer.0.query.weight") != per_layer.group("bert.layer.0.key.weight")
    for name in ("flat", "automatic"):
        assert make_clipping(name, 1.0).group("a.weight") == make_clipping(name, 1.0).group("b.bias")


def test_layers_are_clipped_independently():
    """A large layer takes nothing from a small one."""
    factors = make_clipping("per_layer", 1.0).factors({"small": torch.tensor([0.01]), "large": torch.tensor([1e6])})
    assert factors["small"] == pytest.approx(1.0, abs=3e-6)
    assert factors["large"] == pytest.approx(1e-3 / math.sqrt(2), rel=3e-6)


# a squared norm that rounding made negative has no root
NEGATIVE = -1.0


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, NEGATIVE])
@pytest.mark.parametrize("name", CLIPPINGS)
def test_a_record_without_finite_norm_gets_exactly_zero_in_all_groups(name, bad):
    squares = {"a": torch.tensor([1.0, bad, 4.0]), "b": torch.tensor([1.0, 1.0, 1.0])}
    factors = make_clipping(name, 0.5).factors(squares)
    assert all(f[1] == 0 for f in factors.values())
    assert all(f[0] > 0 and f[2] > 0 for f in factors.values())
    alone = make_clipping(name, 0.5).factors({g: s[[0, 2]] for g, s in squares.items()})
    assert all(torch.equal(factors[g][[0, 2]], alone[g]) for g in squares)  # the others do not notice


@pytest.mark.parametrize("name", CLIPPINGS)
def test_a_record_without_gradient_has_a_finite_factor(name):
    factor = make_clipping(name, 2.0).factors({"": torch.zeros(1)})[""]
    assert factor.isfinite().all() and factor > 0 and factor * 0.0 == 0


# --- sensitivity -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CLIPPINGS)
@pytest.mark.parametrize("adjacency, times", [("add_or_remove_one", 1), ("zero_out", 1), ("replace_one", 2)])
def test_sensitivity_per_adjacency(name, adjacency, times):
    assert make_clipping(name, 0.37).sensitivity(adjacency) == times * 0.37


def test_every_adjacency_is_known():
    assert SENSITIVITY_FACTOR.keys() == {"add_or_remove_one", "zero_out", "replace_one"}
    with pytest.raises(KeyError):
        make_clipping("flat", 1.0).sensitivity("add_one")


@pytest.mark.parametrize("name", CLIPPINGS)
@pytest.mark.parametrize("adjacency", SENSITIVITY_FACTOR)
def test_neighbours_reach_the_sensitivity_and_not_more(name, adjacency):
    """One record is exchanged for its opposite, for zero or for nothing, beside two others, in two layers."""
    clipping = make_clipping(name, 0.8)

    def clipped_sum(records_BP: torch.Tensor) -> torch.Tensor:
        layers = {"a": records_BP[:, :3], "b": records_BP[:, 3:]}
        squares: dict[str, torch.Tensor] = {}
        for layer, g in layers.items():
            group = clipping.group(f"{layer}.weight")
            squares[group] = squares.get(group, torch.zeros(len(g))) + g.square().sum(dim=1)
        factors = clipping.factors(squares)
        parts = [(factors[clipping.group(f"{layer}.weight")][:, None] * g).sum(dim=0) for layer, g in layers.items()]
        return torch.cat(parts).double()

    others = torch.randn(2, 6)
    record = torch.tensor([[3.0, 4.0, 0.0, 0.0, 3.0, 4.0]]) * 1e4  # both layers equally large, so per_layer reaches C
    instead = {"add_or_remove_one": others[:0], "zero_out": torch.zeros(1, 6), "replace_one": -record}[adjacency]
    moved = (clipped_sum(torch.cat([others, record])) - clipped_sum(torch.cat([others, instead]))).norm().item()
    assert moved == pytest.approx(clipping.sensitivity(adjacency), rel=1e-5)  # automatic misses it by gamma / norm
    assert moved <= clipping.sensitivity(adjacency) * (1 + 1e-6)


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan])
@pytest.mark.parametrize("name", CLIPPINGS)
def test_a_norm_that_bounds_nothing_is_refused(name, value):
    with pytest.raises(DPConfigError, match=f"clipping_norm={value} bounds nothing.*Give a finite number > 0"):
        make_clipping(name, value)


@pytest.mark.parametrize("name", ["", "Flat", "adaptive"])
def test_an_unknown_rule_is_refused(name):
    with pytest.raises(DPConfigError, match=f"clipping='{name}'.*Use one of: 'flat', 'per_layer', 'automatic'"):
        make_clipping(name, 1.0)


@pytest.mark.parametrize("name", CLIPPINGS)
def test_a_plan_has_the_rule_of_its_config(name):
    config = PrivacyConfig(noise_multiplier=1.0, expected_batch_size=4, clipping=name, clipping_norm=0.25)
    assert make_plan(config, num_examples=16, num_steps=2).clipper == CLIPPINGS[name](clipping_norm=0.25)
