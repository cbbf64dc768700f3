"""Poisson sampling of records, with a guarantee for users: every user has a bounded number of them."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import dp_accounting
from dp_accounting.dp_event import MixtureOfGaussiansDpEvent
from scipy import stats

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.sampling.poisson import PoissonSampler
from hf_dpopt.sampling.sampler import Steps, repeat


@dataclasses.dataclass(frozen=True, kw_only=True)
class CappedPoissonSampler(PoissonSampler):
    r"""Each record is sampled with probability q; no user has more than ``records_per_user`` of them.

    What is sampled are places: every user has G, whether a record stands in them or not. So q depends on how many
    users there are, and on nothing that they wrote.

    Example-level sampling (ELS): records are clipped, and a user with G of them moves a batch by j clipping norms,
    j ~ Binomial(G, q). The event is that mixture of Gaussians, so many records of one user in a batch, which are rare,
    are charged as such. The group-privacy factor G would be far larger.

    Formal guarantee: holds for users with at most ``records_per_user`` of the ``num_examples`` places.

    Args:
        records_per_user: G, >= 1.

    References:
        Charles et al. (2024), arXiv:2407.07737, Section 3 (ELS); Choquette-Choo et al. (2023), arXiv:2310.15526,
        Lemma 4.5 (a mixture with vectors of bounded norm is dominated by that with the bounds).
    """

    records_per_user: int = 1

    name: ClassVar[str] = "capped_poisson"
    repeats_one_event: ClassVar[bool] = True
    adjacencies: ClassVar[tuple[str, ...]] = ("add_or_remove_one", "zero_out")
    samples_records_of_users: ClassVar[bool] = True
    takes: ClassVar[tuple[str, ...]] = ("records_per_user",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.records_per_user < 1:
            raise DPConfigError(f"records_per_user={self.records_per_user} leaves nothing. Use an integer >= 1.")

    def event(self, noise_stddev_over_clip: float, num_steps: Steps) -> dp_accounting.DpEvent:
        if self.records_per_user == 1:
            return super().event(noise_stddev_over_clip, num_steps)
        counts = range(self.records_per_user + 1)
        step = MixtureOfGaussiansDpEvent(
            noise_stddev_over_clip,
            tuple(float(j) for j in counts),
            tuple(float(p) for p in stats.binom.pmf(counts, self.records_per_user, self.sample_rate)),
        )
        return repeat(step, self.max_participations(num_steps))

    def why_not(self, adjacency: str) -> str:
        return "what a swapped user moves is a mixture with two sets of records, for which no analysis is known."

    def describe(self, unit: str = "record") -> str:
        return (
            f"Example-level sampling: each of the {self.num_examples // self.records_per_user} {unit}s has "
            f"{self.records_per_user} places for records, which are chosen before the first step; some may stay "
            f"empty. In each step each of the {self.num_examples} places takes part independently with probability "
            f"{self.sample_rate:.6g} ({self.expected_batch_size} on average)."
        )
