"""Samplers: the laws by which logical batches are formed. A new one is one file and one line here.

Which noise goes with which sampler, every sampler says itself (`Sampler.refuses`); side by side:

============  =============================  =====================================================================
noise         sampler                        event
============  =============================  =====================================================================
independent   Poisson, truncated, fixed      the sampler's own, per step
any           fixed order                    one Gaussian of noise stddev / sensitivity (arXiv:2211.06530)
<= p bands    cyclic Poisson, p groups       ceil(T / p) Poisson-sampled Gaussians (arXiv:2306.08153, Theorem 4)
C >= 0        balls in bins                  the mixture over the bins (arXiv:2410.06266)
============  =============================  =====================================================================

A pair that is not here has no proof and is refused.
"""

from __future__ import annotations

from hf_dpopt.sampling.balls_in_bins import BallsInBinsSampler
from hf_dpopt.sampling.capped_poisson import CappedPoissonSampler
from hf_dpopt.sampling.cyclic_poisson import CyclicPoissonSampler
from hf_dpopt.sampling.fixed_order import FixedOrderSampler
from hf_dpopt.sampling.poisson import PoissonSampler
from hf_dpopt.sampling.sampler import Sampler
from hf_dpopt.sampling.truncated_poisson import TruncatedPoissonSampler

SAMPLERS: dict[str, type[Sampler]] = {
    "poisson": PoissonSampler,
    "truncated_poisson": TruncatedPoissonSampler,
    "fixed_order": FixedOrderSampler,
    "capped_poisson": CappedPoissonSampler,
    "cyclic_poisson": CyclicPoissonSampler,
    "balls_in_bins": BallsInBinsSampler,
}

__all__ = [
    "SAMPLERS",
    "BallsInBinsSampler",
    "CappedPoissonSampler",
    "CyclicPoissonSampler",
    "FixedOrderSampler",
    "PoissonSampler",
    "Sampler",
    "TruncatedPoissonSampler",
]
