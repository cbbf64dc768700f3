"""Correlated noise kept or drawn again: the window of draws, and its memory."""

from __future__ import annotations

import pytest
import torch

from hf_dpopt import DPConfigError, PrivacyConfig, make_plan
from hf_dpopt.noise import BandedInverse, NuDPFTRL
from hf_dpopt.noise.streams import HistoryStream
from hf_dpopt.randomness.cipher import make_noise_source

STEPS, SIZE, KEY = 20, 300, bytes(range(32))


def _stream(strategy, **options):
    return strategy.stream(make_noise_source("secure", KEY), scale=0.7, num_steps=STEPS, **options)


def _noise(stream, steps) -> list[torch.Tensor]:
    found = []
    for step in steps:
        stream.add_(sums := {"w": torch.zeros(SIZE)}, step)
        found.append(sums["w"])
    return found


@pytest.mark.parametrize("bands", [1, 2, 5, STEPS])
def test_a_window_keeps_what_later_steps_use_and_changes_no_bit(bands):
    strategy = BandedInverse.of_nu(bands)
    windowed = _stream(strategy, backend="history")
    whole = HistoryStream(
        strategy.rows(STEPS), make_noise_source("secure", KEY), scale=0.7, num_steps=STEPS,
    )  # fmt: skip
    for one, other in zip(_noise(windowed, range(12)), _noise(whole, range(12)), strict=True):
        assert torch.equal(one, other)
    assert windowed.bytes_kept() == 4 * SIZE * min(bands - 1, 12) and whole.bytes_kept() == 4 * SIZE * 12
    assert strategy.cost(STEPS, backend="history").kept == bands - 1
    resumed = _stream(strategy, backend="history")
    resumed.continue_at(12)
    for one, other in zip(_noise(resumed, range(12, STEPS)), _noise(whole, range(12, STEPS)), strict=True):
        assert torch.equal(one, other)
    assert resumed.bytes_kept() <= 4 * SIZE * max(bands - 1, 1)


def test_noise_without_a_window_keeps_all_its_draws():
    stream = _stream(NuDPFTRL(0.1), backend="history")
    _noise(stream, range(12))
    assert stream.bytes_kept() == 4 * SIZE * 12 and NuDPFTRL(0.1).cost(STEPS, backend="history").kept == STEPS - 1


def _plan(name: str, **kwargs):
    config = PrivacyConfig(
        noise_multiplier=1.0, target_delta=1e-3, expected_batch_size=10, noise_mechanism=name, noise_kwargs=kwargs
    )
    return make_plan(config, num_examples=200, num_steps=STEPS)


def test_a_backend_that_the_noise_has_not_is_refused():
    with pytest.raises(DPConfigError, match="backend='other'"):
        _plan("banded", num_bands=2, backend="other")
    with pytest.raises(DPConfigError, match="Independent noise keeps nothing"):
        _plan("gaussian", backend="other")
