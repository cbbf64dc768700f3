"""The strategies that every test over strategies goes through."""

from __future__ import annotations

import numpy as np

from hf_dpopt.noise import (
    BandedInverse,
    BandedToeplitz,
    BufferedLinearToeplitz,
    FourierStrategy,
    IdentityStrategy,
    NoiseStrategy,
    NuDPFTRL,
    Restarted,
)
from hf_dpopt.noise.dense import DenseStrategy
from hf_dpopt.noise.tree import TreeAggregation

BANDS = BandedToeplitz((1.1, 0.5, -0.3, 0.1))
BLT = BufferedLinearToeplitz((0.97, 0.7), (0.9, 0.4))


def strategies(n: int) -> dict[str, NoiseStrategy]:
    """One or more of every kind, for runs of up to n steps."""
    below = np.tril(np.random.default_rng(3).uniform(-1, 1, (n, n)), -1)
    return {
        "identity": IdentityStrategy(),
        "nu": NuDPFTRL(0.05),
        "optimal-cc": NuDPFTRL(0.0),
        "anti-pgd": BandedInverse((1.0, -1.0)),
        "damped": BandedInverse((1.0, -0.9)),
        "bands": BANDS,
        "one-band": BandedToeplitz((2.0,)),
        "rising-bands": BandedToeplitz((1, 0.5, 0.9)),
        "falling-bands": BandedToeplitz((1, 0.5, 0.2)),
        "inverse-bands": BandedInverse.of_nu(4, 0.02),
        "blt": BLT,
        "dense": DenseStrategy(below + 2 * np.eye(n)),
        "restarted-nu": Restarted(NuDPFTRL(0.1), 9),
        "restarted-blt": Restarted(BLT, 7),
        "restarted-bands": Restarted(BANDS, 5),
        "restarted-twice": Restarted(Restarted(BANDS, 2), 4),
        "fft": FourierStrategy(),
        "fft-fourier": FourierStrategy("fourier"),
        "tree": TreeAggregation("vanilla"),
        "honaker": TreeAggregation("honaker"),
        "restarted-tree": TreeAggregation("honaker", restart_every=5),
        "restarted-as-it-is": TreeAggregation("vanilla", restart_every=6, tree_completion=False),
    }
