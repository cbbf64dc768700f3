"""Noise strategies: how the noise of one step takes back that of earlier ones, and what that costs.

To add one: write a file with a frozen dataclass that satisfies `NoiseStrategy`, and name it here.
"""

from hf_dpopt.noise.strategies.banded import BandedInverse, BandedToeplitz, ColumnNormalized
from hf_dpopt.noise.strategies.base import NoiseStrategy, ToeplitzStrategy
from hf_dpopt.noise.strategies.blt import BufferedLinearToeplitz
from hf_dpopt.noise.strategies.dense import DenseStrategy
from hf_dpopt.noise.strategies.participation import Participation
from hf_dpopt.noise.strategies.restarted import Restarted, Stamped
from hf_dpopt.noise.strategies.toeplitz import (
    AntiPGD,
    DampedAntiPGD,
    IdentityStrategy,
    LambdaCGD,
    NuDPFTRL,
    OptimalCC,
)
from hf_dpopt.noise.strategies.tree import TreeAggregation
from hf_dpopt.noise.strategies.workloads import Workload, linear_cooldown, momentum_workload, prefix_sum_workload

__all__ = [
    "AntiPGD",
    "BandedInverse",
    "BandedToeplitz",
    "BufferedLinearToeplitz",
    "ColumnNormalized",
    "DampedAntiPGD",
    "DenseStrategy",
    "IdentityStrategy",
    "LambdaCGD",
    "NoiseStrategy",
    "NuDPFTRL",
    "OptimalCC",
    "Participation",
    "Restarted",
    "Stamped",
    "ToeplitzStrategy",
    "TreeAggregation",
    "Workload",
    "linear_cooldown",
    "momentum_workload",
    "prefix_sum_workload",
]
