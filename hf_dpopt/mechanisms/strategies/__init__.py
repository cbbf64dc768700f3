"""Noise strategies: how the noise of one step takes back that of earlier ones, and what that costs.

To add one: write a file with a frozen dataclass that satisfies `NoiseStrategy`, and name it here.
"""

from hf_dpopt.mechanisms.strategies.banded import BandedInverse, BandedToeplitz, ColumnNormalized
from hf_dpopt.mechanisms.strategies.base import NoiseStrategy, ToeplitzStrategy
from hf_dpopt.mechanisms.strategies.blt import BufferedLinearToeplitz
from hf_dpopt.mechanisms.strategies.dense import DenseStrategy
from hf_dpopt.mechanisms.strategies.participation import Participation
from hf_dpopt.mechanisms.strategies.restarted import Restarted, Stamped
from hf_dpopt.mechanisms.strategies.toeplitz import (
    AntiPGD,
    DampedAntiPGD,
    IdentityStrategy,
    LambdaCGD,
    NuDPFTRL,
    OptimalCC,
)
from hf_dpopt.mechanisms.strategies.tree import TreeAggregation
from hf_dpopt.mechanisms.strategies.workloads import Workload, linear_cooldown, momentum_workload, prefix_sum_workload

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
