"""`independent_noise`: independent noise, the trivial strategy."""

from __future__ import annotations

import os

import torch

from hf_dpopt.noise import independent_noise
from hf_dpopt.randomness.chacha import ChaCha20Gaussian


def test_noise_is_that_of_the_source_by_sorted_name():
    key = os.urandom(32)
    sums = {"z": torch.zeros(3, 2), "a": torch.zeros(4)}
    independent_noise(2.0).stream(ChaCha20Gaussian(key), 0.25).add_(sums, 9)
    source = ChaCha20Gaussian(key)
    assert torch.equal(sums["a"], 0.5 * source.normal((4,), step=9, tensor=0))
    assert torch.equal(sums["z"], 0.5 * source.normal((3, 2), step=9, tensor=1))
