"""Projected noisy SGD on a softmax head, with a public key: the data of the experiments are public."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np
import torch

from hf_dpopt.accounting.calibrate import calibrate_noise_multiplier
from hf_dpopt.convex.head_training import gradient_sum, projected
from hf_dpopt.convex.last_iterate import ProjectedSGD, calibrate_last_iterate, last_iterate_epsilon

FAR = 1e9  # diameter of a domain that bounds nothing: SGD without projection, accounted by plain composition


def iterates(
    features: torch.Tensor, labels: torch.Tensor, num_labels: int, sgd: ProjectedSGD, seed: int
) -> Iterator[torch.Tensor]:
    """The weights after each step, float64, (K, D), from zero on; Poisson batches, in a ball of half the diameter.

    Args:
        features: (n, D).
        labels: int64, (n,), in [0, num_labels).
        num_labels: K.
        sgd: what is run; without decay.
        seed: of batches and noise.
    """
    n, batch = len(features), sgd.expected_batch_size
    rng = np.random.default_rng(seed)
    weights = torch.zeros(num_labels, features.size(1), dtype=torch.float64)
    stddev = sgd.noise_multiplier * sgd.lipschitz
    for _ in range(sgd.num_steps):
        rows = torch.from_numpy(rng.choice(n, rng.binomial(n, sgd.sample_rate), replace=False, shuffle=False))
        total = gradient_sum(features[rows], labels[rows], weights)
        total += torch.from_numpy(rng.normal(0.0, stddev, weights.shape))
        weights = projected(weights - sgd.step_size * (total / batch + sgd.l2 * weights), sgd.diameter / 2)
        yield weights


@functools.cache
def noise_of(setting: ProjectedSGD, epsilon: float, delta: float, accounting: str) -> float:
    """The noise multiplier that keeps the budget, by "composition" or by the bound on the "last iterate"."""
    if accounting == "last iterate":
        return calibrate_last_iterate(setting, epsilon, delta)
    everywhere = dataclasses.replace(setting, diameter=FAR, l2=0.0)  # composition knows of neither

    def epsilon_at(noise: float, error: float) -> float:
        noisy = dataclasses.replace(everywhere, noise_multiplier=noise)
        return last_iterate_epsilon(noisy, delta, relative_error=error).composition

    return calibrate_noise_multiplier(epsilon_at, epsilon)
