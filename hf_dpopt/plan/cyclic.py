"""Cyclic Poisson sampling: the noise that a number of groups needs, and the number of bands that is best."""

from __future__ import annotations

from hf_dpopt.accounting import accountants
from hf_dpopt.accounting.calibrate import calibrate_noise_multiplier
from hf_dpopt.noise import Workload, banded
from hf_dpopt.sampling.cyclic_poisson import CyclicPoissonSampler


def cyclic_noise_multiplier(
    num_steps: int,
    num_examples: int,
    batch_size: int,
    num_groups: int,
    epsilon: float,
    delta: float,
    *,
    adjacency: str = "add_or_remove_one",
) -> float:
    """Smallest noise stddev that a run may have, for a strategy with as many bands and columns of norm 1.

    Args:
        num_steps: length of the run.
        num_examples, batch_size, num_groups: settings of the sampler.
        epsilon, delta: the budget.
        adjacency: "add_or_remove_one" or "zero_out".
    """
    sampler = CyclicPoissonSampler(
        num_examples=num_examples, expected_batch_size=batch_size, num_groups=num_groups
    )  # fmt: skip
    sampler.check_adjacency(adjacency)

    def epsilon_at(noise_multiplier: float, error: float) -> float:
        event = sampler.event(noise_multiplier, num_steps)
        return accountants.epsilon(event, delta, adjacency, relative_error=error).epsilon

    return calibrate_noise_multiplier(epsilon_at, epsilon)


def choose_num_bands(
    num_steps: int,
    num_examples: int,
    batch_size: int,
    epsilon: float,
    delta: float,
    *,
    adjacency: str = "add_or_remove_one",
    workload: Workload | None = None,
    max_bands: int | None = None,
) -> int:
    """Number of bands, and groups of a cyclic sampler, with the least error for a budget.

    More bands correlate the noise of more steps, but a record is then sampled from a smaller group, more often. Looks
    through powers of two, and the bands with which every group is one batch, which is no sampling at all.

    Args:
        num_steps: length of the run.
        num_examples, batch_size: settings of the sampler.
        epsilon, delta: the budget.
        adjacency: "add_or_remove_one" or "zero_out".
        workload: what the bands are tuned for; None for prefix sums.
        max_bands: limit of the memory, for every band but the first keeps a copy of the gradient; None for no limit.

    References:
        Choquette-Choo et al. (2023), arXiv:2306.08153, Section 5.
    """

    def noise_multiplier_of(num_bands: int) -> float:
        return cyclic_noise_multiplier(
            num_steps, num_examples, batch_size, num_bands, epsilon, delta, adjacency=adjacency
        )

    most = max(1, min(num_steps, num_examples // batch_size, max_bands or num_steps))
    return banded.choose_num_bands(num_steps, most, noise_multiplier_of, workload)
