"""What every registered mechanism promises about its noise, and what `GaussianMechanism` promises beyond that."""

from __future__ import annotations

import dataclasses
import os

import pytest
import scipy.stats
import torch

from hf_dpopt.errors import DPConfigError
from hf_dpopt.mechanisms import MECHANISMS, GaussianMechanism, make_noise_source

ALPHA = 1e-6  # two-sided false-alarm probability per case, whatever the key
KINDS = ["secure", "fast"]
SENSITIVITY, MULTIPLIER = 0.5, 0.7


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture(params=sorted(MECHANISMS))
def stream(request, kind):
    mechanism = MECHANISMS[request.param](noise_multiplier=MULTIPLIER)
    return mechanism.stream(make_noise_source(kind, os.urandom(32)), SENSITIVITY)


def _zeros() -> dict[str, torch.Tensor]:
    """Every kind of shape: large, tiny, without dimensions, without elements, strided."""
    shapes = {"w": (130, 257), "bias": (5,), "scale": (), "none": (0, 3), "long": (70_001,)}
    return {name: torch.zeros(shape) for name, shape in shapes.items()} | {"strided": torch.zeros(40, 30).mT[::2]}


# --- contract of all mechanisms ---


def test_every_coordinate_of_every_tensor_is_noised_in_every_step(stream):
    """A coordinate is exactly 0 by chance with probability below 1e-14, and 3e5 of them are drawn."""
    previous = _zeros()
    for step in (1, 2, 5):
        sums = _zeros()
        stream.add_(sums, step)
        for name, total in sums.items():
            assert (total != 0).all(), name
            assert not torch.equal(total, previous[name]) or total.numel() == 0, name
        previous = sums


def test_noise_has_the_claimed_law(stream):
    """Chi-square on the energy of 32 steps of 4096 coordinates over three tensors, and of each tensor, at level ALPHA.

    Power: a stddev off by 2% is caught with probability > 0.999.
    """
    energies = dict.fromkeys(("a", "b", "c"), 0.0)
    sizes = {"a": 3000, "b": 96, "c": 1000}
    for step in range(1, 33):
        sums = {name: torch.zeros(size) for name, size in sizes.items()}
        stream.add_(sums, step)
        for name, total in sums.items():
            energies[name] += (total.double() / (MULTIPLIER * SENSITIVITY)).square().sum().item()
    energies["all"], sizes["all"] = sum(energies.values()), 4096
    for name, energy in energies.items():
        low, high = scipy.stats.chi2.ppf([ALPHA / 8, 1 - ALPHA / 8], df=32 * sizes[name])
        assert low < energy < high, name


def test_noise_stddev_is_the_stated_one(stream):
    assert stream.noise_stddev == pytest.approx(MULTIPLIER * SENSITIVITY)


@pytest.mark.parametrize("name", sorted(MECHANISMS))
def test_noise_is_added_to_what_is_there(name, kind):
    """The release minus the sum is the noise that an empty batch would have got, whatever the order of the dict."""
    key = os.urandom(32)
    streams = [
        MECHANISMS[name](noise_multiplier=MULTIPLIER).stream(make_noise_source(kind, key), SENSITIVITY) for _ in "12"
    ]
    noise, sums = _zeros(), {n: torch.randn_like(t) for n, t in reversed(_zeros().items())}
    released = {n: t.clone() for n, t in sums.items()}
    streams[0].add_(noise, 4)
    streams[1].add_(released, 4)
    for n, total in sums.items():
        torch.testing.assert_close(released[n] - total, noise[n], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_sums_that_are_not_float32_are_refused(stream, dtype):
    with pytest.raises(AssertionError, match="'w': torch"):
        stream.add_({"w": torch.zeros(3, dtype=dtype)}, 1)


@pytest.mark.parametrize("again", [3, 2])
def test_a_step_is_noised_once(stream, again):
    stream.add_({"w": torch.zeros(3)}, 3)
    with pytest.raises(AssertionError, match=f"noise of step {again} was asked for after that of step 3"):
        stream.add_({"w": torch.zeros(3)}, again)


@pytest.mark.parametrize("name", sorted(MECHANISMS))
@pytest.mark.parametrize("value", [-0.5, float("nan"), float("inf")])
def test_impossible_noise_multipliers_are_refused(name, value):
    with pytest.raises(DPConfigError, match="Use a finite number > 0"):
        MECHANISMS[name](noise_multiplier=value)


@pytest.mark.parametrize("name", sorted(MECHANISMS))
def test_mechanisms_are_frozen(name):
    with pytest.raises(dataclasses.FrozenInstanceError):
        MECHANISMS[name](noise_multiplier=1.0).noise_multiplier = 0.1


# --- GaussianMechanism ---


def test_independent_noise_is_the_trivial_strategy():
    assert GaussianMechanism(1.3).sensitivity() == 1.0


def test_noise_is_that_of_the_source_by_sorted_name(kind):
    key = os.urandom(32)
    sums = {"z": torch.zeros(3, 2), "a": torch.zeros(4)}
    GaussianMechanism(2.0).stream(make_noise_source(kind, key), 0.25).add_(sums, 9)
    source = make_noise_source(kind, key)
    assert torch.equal(sums["a"], 0.5 * source.normal((4,), step=9, tensor=0))
    assert torch.equal(sums["z"], 0.5 * source.normal((3, 2), step=9, tensor=1))


def test_noise_multiplier_zero_changes_nothing(kind):
    sums = {"w": torch.randn(1000)}
    before = sums["w"].clone()
    GaussianMechanism(0.0).stream(make_noise_source(kind, os.urandom(32)), 1.0).add_(sums, 1)
    assert torch.equal(sums["w"], before)


def test_the_noise_is_as_large_as_the_sensitivity_says():
    """``replace_one`` doubles the sensitivity and with it the noise."""
    source = make_noise_source("secure", os.urandom(32))
    once, twice = (GaussianMechanism(0.7).stream(source, c).noise_stddev for c in (1.0, 2.0))
    assert (once, twice) == (0.7, 1.4)
