"""What every registered mechanism promises about its noise."""

from __future__ import annotations

import dataclasses
import os

import pytest
import scipy.stats
import torch

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise import MECHANISMS
from hf_dpopt.plan.choose import make_plan
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.randomness.chacha import ChaCha20Gaussian

ALPHA = 1e-8  # two-sided false-alarm probability per case, whatever the key
SENSITIVITY, MULTIPLIER, NUM_STEPS = 0.5, 0.7, 12
OPTIONS = {"banded": {"num_bands": 3}}
VARIANTS = {
    **{name: {"noise_mechanism": name, "noise_kwargs": OPTIONS.get(name, {})} for name in MECHANISMS},
    "nu_dpftrl, exact": {"noise_mechanism": "nu_dpftrl", "noise_kwargs": {"backend": "regenerate"}},
    "banded, fixed order": {"noise_mechanism": "banded", "sampling": "fixed_order"},
    "blt, restarted": {"noise_mechanism": "blt", "noise_restart_every": 5},
    "honaker, restarted": {"noise_mechanism": "honaker", "noise_restart_every": 5},
}


def mechanism_of(name: str):
    config = PrivacyConfig(noise_multiplier=MULTIPLIER, expected_batch_size=25, **VARIANTS[name])
    return make_plan(config, num_examples=100, num_steps=NUM_STEPS).mechanism


@pytest.fixture(params=sorted(VARIANTS))
def mechanism(request):
    return mechanism_of(request.param)


def _stream(mechanism, key=None):
    source = ChaCha20Gaussian(os.urandom(32) if key is None else key)
    return mechanism.stream(source, SENSITIVITY, first_step=1)


def _zeros() -> dict[str, torch.Tensor]:
    """Every kind of shape: large, tiny, without dimensions, without elements, strided."""
    shapes = {"w": (130, 257), "bias": (5,), "scale": (), "none": (0, 3), "long": (70_001,)}
    return {name: torch.zeros(shape) for name, shape in shapes.items()} | {"strided": torch.zeros(40, 30).mT[::2]}


@pytest.mark.slow_but(12)
def test_every_coordinate_of_every_tensor_is_noised_in_every_step(mechanism):
    """Of 1e5 coordinates: in later steps two draws cancel exactly, in float32, with probability 4e-8 each."""
    stream, previous = _stream(mechanism), _zeros()
    zeros = {name: torch.zeros(total.shape, dtype=torch.int64) for name, total in previous.items()}
    for step in (1, 2, 3):
        sums = _zeros()
        stream.add_(sums, step)
        for name, total in sums.items():
            zeros[name] += total == 0
            some = total.flatten() if step == 1 or total.numel() <= 10 else total.flatten()[[0, -1]]
            assert (some != 0).all(), (name, step)
            assert not torch.equal(total, previous[name]) or total.numel() == 0, name
        assert sum(int((total == 0).sum()) for total in sums.values()) <= 2
        previous = sums
    assert all((count < 2).all() for count in zeros.values())


def test_noise_has_the_claimed_law_in_every_step(mechanism):
    """Chi-square on the energy of the 30,096 coordinates of every step, against `row_norm`, at level ALPHA.

    Power: a stddev off by 4% is caught with probability > 0.999.
    """
    stream = _stream(mechanism)
    sizes = {"a": 20_000, "b": 96, "c": 10_000}
    low, high = scipy.stats.chi2.ppf([ALPHA / 2 / NUM_STEPS, 1 - ALPHA / 2 / NUM_STEPS], df=sum(sizes.values()))
    for step in range(1, NUM_STEPS + 1):
        sums = {name: torch.zeros(size) for name, size in sizes.items()}
        stream.add_(sums, step)
        stddev = MULTIPLIER * mechanism.sensitivity() * SENSITIVITY * mechanism.row_norm(step - 1)
        energy = sum((total.double() / stddev).square().sum().item() for total in sums.values())
        assert low < energy < high, (step, energy)


@pytest.mark.slow_but(12)
def test_noise_is_added_to_what_is_there(mechanism):
    """The release minus the sum is the noise that an empty batch would have got, whatever the order of the dict."""
    key = os.urandom(32)
    streams = [_stream(mechanism, key) for _ in "12"]
    noise, sums = _zeros(), {n: torch.randn_like(t) for n, t in reversed(_zeros().items())}
    released = {n: t.clone() for n, t in sums.items()}
    streams[0].add_(noise, 1)
    streams[1].add_(released, 1)
    for n, total in sums.items():
        torch.testing.assert_close(released[n] - total, noise[n], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_sums_that_are_not_float32_are_refused(mechanism, dtype):
    with pytest.raises((AssertionError, DPConfigError), match="float32|'w': torch"):
        _stream(mechanism).add_({"w": torch.zeros(3, dtype=dtype)}, 1)


@pytest.mark.slow_but(10)
@pytest.mark.parametrize("again", [2, 1])
def test_a_step_is_noised_once(mechanism, again):
    stream = _stream(mechanism)
    for step in (1, 2):
        stream.add_({"w": torch.zeros(3)}, step)
    with pytest.raises((AssertionError, DPConfigError), match=f"noise of step {again} was asked for after"):
        stream.add_({"w": torch.zeros(3)}, again)


@pytest.mark.parametrize("value", [-0.5, float("nan"), float("inf")])
def test_impossible_noise_multipliers_are_refused(mechanism, value):
    with pytest.raises(DPConfigError, match="Use a finite number > 0"):
        dataclasses.replace(mechanism, noise_multiplier=value)


@pytest.mark.parametrize("name", sorted(set(MECHANISMS) - {"gaussian"}))
def test_correlated_noise_cannot_be_switched_off(name):
    config = PrivacyConfig(noise_multiplier=0.0, expected_batch_size=25, **VARIANTS[name])
    with pytest.raises(DPConfigError, match="noise_mechanism='gaussian'"):
        make_plan(config, num_examples=100, num_steps=NUM_STEPS)
