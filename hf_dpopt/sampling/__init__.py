"""How logical batches are formed. A new sampler is one file and one line here."""

from __future__ import annotations

from hf_dpopt.sampling.balls_in_bins import BallsInBinsSampler
from hf_dpopt.sampling.base import Sampler
from hf_dpopt.sampling.capped_poisson import CappedPoissonSampler
from hf_dpopt.sampling.cyclic_poisson import CyclicPoissonSampler
from hf_dpopt.sampling.fixed_order import FixedOrderSampler
from hf_dpopt.sampling.poisson import PoissonSampler
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
