"""Correlated noise kept or drawn again: the window of draws, and its memory."""

from __future__ import annotations

import pytest
import torch

from hf_dpopt.noise import BandedInverse
from hf_dpopt.noise.streams import HistoryStream
from hf_dpopt.randomness.chacha import ChaCha20Gaussian

STEPS, SIZE, KEY = 20, 300, bytes(range(32))


def _stream(strategy, **options):
    return strategy.stream(ChaCha20Gaussian(KEY), scale=0.7, num_steps=STEPS, **options)


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
        strategy.rows(STEPS), ChaCha20Gaussian(KEY), scale=0.7, num_steps=STEPS,
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
