"""Which noise goes with which sampler, and what a run of the two releases.

A pair that is not here has no proof and raises. `noise_stddev` is that of the draws Z relative to the bound on ONE
record (dp_accounting's convention, see `events`), called sigma_z in the papers.

============  =============================  =====================================================================
noise         sampler                        event
============  =============================  =====================================================================
independent   Poisson, truncated, fixed      the sampler's own, per step
any           fixed order                    one Gaussian of noise stddev / sensitivity (arXiv:2211.06530)
<= p bands    cyclic Poisson, p groups       ceil(T / p) Poisson-sampled Gaussians (arXiv:2306.08153, Theorem 4)
C >= 0        balls in bins                  the mixture over the bins (arXiv:2410.06266)
============  =============================  =====================================================================
"""

from __future__ import annotations

import functools

from dp_accounting import ComposedDpEvent, DpEvent, GaussianDpEvent, NoOpDpEvent

from hf_dpopt.accounting.balls_in_bins import BallsInBinsDpEvent
from hf_dpopt.common.errors import DPBudgetExceeded, DPConfigError
from hf_dpopt.noise import IdentityStrategy, NoiseStrategy, Participation, TreeAggregation
from hf_dpopt.sampling import BallsInBinsSampler, CyclicPoissonSampler, FixedOrderSampler, Sampler
from hf_dpopt.sampling.base import Steps, as_chains


def check_pair(strategy: NoiseStrategy, sampler: Sampler) -> None:
    """Refuses a strategy and a sampler whose combination has no proof here.

    Raises:
        DPConfigError: with the reason, and the samplers that would do.
    """
    reason = _why_not(strategy, sampler)
    if reason:
        raise DPConfigError(f"{strategy.name} noise with sampling={sampler.name!r} has no privacy proof: {reason}")


def _why_not(strategy: NoiseStrategy, sampler: Sampler) -> str:
    match sampler:
        case _ if isinstance(strategy, IdentityStrategy):
            return ""
        case FixedOrderSampler():
            return ""
        case BallsInBinsSampler():
            if isinstance(strategy, TreeAggregation) and strategy.anytime:
                return "its analysis needs a square matrix. Use nu_dpftrl or blt, or sampling='fixed_order'."
            return ""  # the event looks at the signs of all coefficients
        case CyclicPoissonSampler():
            bands = strategy.num_bands
            if bands is None:
                return (
                    "a record's group comes back every few steps, and noise without bands ties all its steps "
                    "together. Use noise_mechanism='banded', or sampling='fixed_order'."
                )
            if bands > sampler.num_groups:
                return (
                    f"{bands} bands tie steps together that are {sampler.num_groups} apart, when a record's group "
                    f"comes back. Use num_bands <= {sampler.num_groups}, or more groups."
                )
            return ""
        case _:
            return (
                "a record may take part in any step, so the noise of correlated steps does not compose, and no "
                "amplification is known. Use sampling='fixed_order' (or 'cyclic_poisson' for banded noise), or 'auto'."
            )


@functools.lru_cache(maxsize=4096)
def strategy_sensitivity(strategy: NoiseStrategy, sampler: Sampler, num_steps: int) -> float:
    """What the noise multiplier of a pair is relative to: the sensitivity of C in the event of `num_steps` steps.

    The largest column norm under cyclic Poisson sampling, where a record meets one column at a time; else that of all
    participations. Unitless; 1 for independent noise.
    """
    if isinstance(strategy, IdentityStrategy):
        return 1.0
    if isinstance(sampler, CyclicPoissonSampler):
        return strategy.sensitivity(num_steps, Participation())
    return strategy.sensitivity(num_steps, sampler.participation(num_steps))


def release(
    strategy: NoiseStrategy, sampler: Sampler, noise_stddev: float, num_steps: Steps, *, planned_steps: int
) -> DpEvent:
    """What the noisy sums of a run release, over all its chains.

    Formal guarantee: every chain has noise of its own, so their events compose (correctness.md, F6: with z shared up
    to a branch, the squared sensitivities add up just the same). The first t steps of an anytime strategy are charged
    as such; of any other, as all `planned_steps`.

    Args:
        strategy: C, under a `sampler` that `check_pair` allows.
        sampler: of the batches.
        noise_stddev: stddev of the draws / bound on one record; unitless, > 0.
        num_steps: optimizer steps, >= 0; a sequence if the run has several chains.
        planned_steps: those the strategy was made for.

    Raises:
        DPBudgetExceeded: for a chain of more steps than planned, if the strategy is not anytime.
        DPConfigError: for a pair without a proof.
    """
    if isinstance(strategy, IdentityStrategy):
        return sampler.event(noise_stddev, num_steps)
    check_pair(strategy, sampler)
    chains = [_of_chain(strategy, sampler, noise_stddev, t, planned_steps) for t in as_chains(num_steps) if t > 0]
    return ComposedDpEvent(chains) if chains else NoOpDpEvent()


def _of_chain(
    strategy: NoiseStrategy, sampler: Sampler, noise_stddev: float, num_steps: int, planned_steps: int
) -> DpEvent:
    if not strategy.anytime:
        if num_steps > planned_steps:
            raise DPBudgetExceeded(
                f"{strategy.name} noise was made for {planned_steps} steps, and {num_steps} were asked for. Plan more "
                "steps, or use a mechanism without a horizon (nu_dpftrl, blt, banded, honaker, anti_pgd)."
            )
        num_steps = planned_steps
    if isinstance(sampler, BallsInBinsSampler):
        return BallsInBinsDpEvent(strategy, noise_stddev, num_steps, sampler.steps_per_epoch)
    stddev = noise_stddev / strategy_sensitivity(strategy, sampler, num_steps)
    return sampler.event(stddev, num_steps) if isinstance(sampler, CyclicPoissonSampler) else GaussianDpEvent(stddev)
