"""Facts about dp_accounting's events that the accountants and the plan share, and the one conversion of the noise.

Every event here follows dp_accounting's convention: its ``noise_multiplier`` is the stddev of the noise on the sum,
divided by the bound on ONE record's norm, whatever the adjacency.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib.metadata import version

from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    NeighboringRelation,
    NonPrivateDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    TruncatedSubsampledGaussianDpEvent,
)
from dp_accounting.dp_event import MixtureOfGaussiansDpEvent, RepeatAndSelectDpEvent
from scipy import stats

from hf_dpopt.accounting.best_of_runs import SHAPE, RunCount
from hf_dpopt.accounting.random_allocation import BallsInBinsDpEvent
from hf_dpopt.common.adjacency import SENSITIVITY_FACTOR
from hf_dpopt.common.checks import check_choice
from hf_dpopt.common.errors import DPConfigError

Composition = tuple[tuple[DpEvent, int], ...]  # different mechanisms, and how often each of them ran

RELATIONS: dict[str, NeighboringRelation] = {
    "add_or_remove_one": NeighboringRelation.ADD_OR_REMOVE_ONE,
    "zero_out": NeighboringRelation.REPLACE_SPECIAL,
    "replace_one": NeighboringRelation.REPLACE_ONE,
}


def noise_stddev_over_clip(noise_multiplier: float, adjacency: str) -> float:
    """Our noise multiplier (stddev / sensitivity) as dp_accounting's (stddev / bound on one record).

    The only place where the two meet. The factor is 2 under ``replace_one``, whose sensitivity is 2C; dp_accounting's
    accountants take it back out by doubling the shift.
    """
    return noise_multiplier * SENSITIVITY_FACTOR[adjacency]


def relation(adjacency: str) -> NeighboringRelation:
    """dp_accounting's name for an adjacency."""
    check_choice("adjacency", adjacency, RELATIONS)
    return RELATIONS[adjacency]


def flatten(event: DpEvent) -> Composition:
    """The mechanisms an event is composed of, equal ones counted together; hashable.

    Raises:
        DPConfigError: for a mechanism other than the (truncated, Poisson-sampled) Gaussian, balls in bins, and the
            best of a random number of runs of those. dp_accounting knows more, but which of its analyses are right
            for which adjacency was not checked here.
    """
    counts: dict[DpEvent, int] = {}
    for leaf, count in _leaves(event, 1):
        noise_of(leaf)
        counts[leaf] = counts.get(leaf, 0) + count
    return tuple(counts.items())


def _leaves(event: DpEvent, count: int) -> Iterator[tuple[DpEvent, int]]:
    if isinstance(event, SelfComposedDpEvent):
        yield from _leaves(event.event, event.count * count)
    elif isinstance(event, ComposedDpEvent):
        for part in event.events:
            yield from _leaves(part, count)
    elif isinstance(event, RepeatAndSelectDpEvent) and count > 0:
        yield RepeatAndSelectDpEvent(as_event(flatten(event.event)), event.mean, event.shape), count
    elif count > 0 and not isinstance(event, NoOpDpEvent):
        yield event, count


def as_event(composition: Composition) -> DpEvent:
    """One event of the mechanisms that were composed; equal compositions give equal, hashable events."""
    return ComposedDpEvent(tuple(SelfComposedDpEvent(leaf, count) for leaf, count in composition))  # type: ignore[arg-type]


def noise_of(leaf: DpEvent) -> float:
    """Noise multiplier of one mechanism; 0 if it protects nothing."""
    match leaf:
        case NonPrivateDpEvent():
            return 0.0
        case GaussianDpEvent() | TruncatedSubsampledGaussianDpEvent() | BallsInBinsDpEvent():
            return leaf.noise_multiplier
        case PoissonSampledDpEvent(event=GaussianDpEvent(noise_multiplier=noise)):
            return noise
        case MixtureOfGaussiansDpEvent():
            return leaf.standard_deviation / max(leaf.sensitivities)
        case RepeatAndSelectDpEvent():  # of the mechanism that protects least; without any, nothing is released
            return min((noise_of(part) for part, _ in flatten(leaf.event)), default=math.inf)
        case _:
            raise DPConfigError(
                f"No proof is known here for the event {leaf}. Use the events that the samplers make "
                "(hf_dpopt.sampling): (truncated) Poisson-sampled Gaussian, Gaussian, mixtures, balls in bins."
            )


def gaussian_precision(composition: Composition) -> float | None:
    """Sum of 1 / noise_multiplier^2 if there are only Gaussian mechanisms, else None.

    Together they are one Gaussian mechanism with noise multiplier ``precision ** -0.5``.
    """
    if not all(isinstance(leaf, GaussianDpEvent) for leaf, _ in composition):
        return None
    return math.fsum(count * leaf.noise_multiplier**-2 for leaf, count in composition)


def num_compositions(composition: Composition) -> int:
    """Number of mechanisms that are convolved; a repeated Gaussian is one Gaussian."""
    return sum(1 if isinstance(leaf, GaussianDpEvent) else count for leaf, count in composition)


def selected_run(composition: Composition) -> tuple[Composition, RunCount] | None:
    """One run and how many there were, where the best of them is all that happened; else None."""
    if len(composition) != 1 or composition[0][1] != 1 or not isinstance(composition[0][0], RepeatAndSelectDpEvent):
        return None
    leaf = composition[0][0]
    return (flatten(leaf.event), RunCount(mean=leaf.mean)) if leaf.shape == SHAPE else None


def split_truncation(composition: Composition) -> tuple[Composition, float]:
    r"""The same steps on untruncated Poisson batches, and the delta that pays for the difference.

    Whether the cap or more OTHER records were sampled has the same law on both datasets, so it may be revealed. If
    fewer were, the step is the Poisson step. If not, the outputs on the two datasets differ in law only when the
    record is sampled and kept; it is exposed then, together with truncation, with probability
    ``P[Binomial(n, q) > cap] * cap / n``.

    Formal guarantee: if the returned steps are (epsilon, delta - cost)-DP, the given ones are (epsilon, delta)-DP,
    under every adjacency. Much faster than the analysis of Ganesh (2025), arXiv:2508.15089, and as good while the cost
    is a small part of delta. The best of K runs costs E[K] times what a run costs: given that no run exposed the
    record, K has a law of the same kind and a smaller mean (docs/proofs/best_of_runs.md).
    """
    steps: list[tuple[DpEvent, int]] = []
    costs: list[float] = []
    for leaf, count in composition:
        if isinstance(leaf, TruncatedSubsampledGaussianDpEvent):
            n, q, cap = leaf.dataset_size, leaf.sampling_probability, leaf.truncated_batch_size
            costs.append(count * float(stats.binom.sf(cap, n, q)) * min(cap / n, 1.0))  # union bound over the steps
            leaf = PoissonSampledDpEvent(q, GaussianDpEvent(leaf.noise_multiplier))
        elif isinstance(leaf, RepeatAndSelectDpEvent):
            run, cost = split_truncation(flatten(leaf.event))
            costs.append(count * leaf.mean * cost)
            leaf = RepeatAndSelectDpEvent(as_event(run), leaf.mean, leaf.shape)
        steps.append((leaf, count))
    return tuple(steps), math.fsum(costs)


def as_poisson(composition: Composition) -> Composition:
    """Mixtures of Gaussians as Poisson-sampled Gaussians of their mean shift: for rough guesses, no bound."""

    def rough(leaf: DpEvent) -> DpEvent:
        if not isinstance(leaf, MixtureOfGaussiansDpEvent):
            return leaf
        pairs = list(zip(leaf.sensitivities, leaf.sampling_probs, strict=True))
        sampled = math.fsum(p for shift, p in pairs if shift > 0)
        mean = math.fsum(shift * p for shift, p in pairs) / sampled
        return PoissonSampledDpEvent(min(sampled, 1.0), GaussianDpEvent(leaf.standard_deviation / mean))

    return tuple((rough(leaf), count) for leaf, count in composition)


def scale_noise(composition: Composition, factor: float) -> Composition:
    """The same steps with the noise of the (Poisson-sampled) Gaussian mechanisms multiplied by ``factor``."""

    def scaled(leaf: DpEvent) -> DpEvent:
        if isinstance(leaf, PoissonSampledDpEvent):
            return PoissonSampledDpEvent(leaf.sampling_probability, scaled(leaf.event))
        return GaussianDpEvent(leaf.noise_multiplier * factor) if isinstance(leaf, GaussianDpEvent) else leaf

    return tuple((scaled(leaf), count) for leaf, count in composition)


def dp_accounting_version() -> str:
    """Version of dp_accounting, for the privacy statement: the numbers depend on it."""
    return version("dp-accounting")
