"""Noise on the clipped sums. Between a sum and its noise nothing runs; after it, anything may.

A mechanism is one file: strategy, tuner, stream and cost, registered under a name. To add one, write that file (see
`hf_dpopt.noise.strategy`) into this folder; configurations, command lines and the contract suite read the registry
`MECHANISMS`.
"""

from __future__ import annotations

from hf_dpopt.common.extras import import_modules
from hf_dpopt.noise.banded import BandedToeplitz, choose_num_bands, optimize_banded
from hf_dpopt.noise.banded_inverse import BandedInverse
from hf_dpopt.noise.blt import BufferedLinearToeplitz, fit_blt, optimize_blt
from hf_dpopt.noise.fourier import FourierStrategy
from hf_dpopt.noise.gaussian import IdentityStrategy, IndependentStream
from hf_dpopt.noise.mechanism import NoiseMechanism, independent_noise
from hf_dpopt.noise.nu_dpftrl import NuDPFTRL, optimize_nu
from hf_dpopt.noise.registry import MECHANISMS, Mechanism, Setting, make_strategy, register
from hf_dpopt.noise.restarts import Restarted
from hf_dpopt.noise.sensitivity import Participation
from hf_dpopt.noise.strategy import NoiseStrategy, ToeplitzStrategy, from_parameters, is_whole
from hf_dpopt.noise.streams import CorrelatedStream, NoiseStream, StreamCost
from hf_dpopt.noise.workloads import Workload, linear_cooldown, momentum_workload
from hf_dpopt.randomness.source import NoiseSource

__all__ = [
    "BandedInverse",
    "BandedToeplitz",
    "BufferedLinearToeplitz",
    "CorrelatedStream",
    "FourierStrategy",
    "IdentityStrategy",
    "IndependentStream",
    "MECHANISMS",
    "Mechanism",
    "NoiseMechanism",
    "NoiseSource",
    "NoiseStrategy",
    "NoiseStream",
    "NuDPFTRL",
    "Participation",
    "Restarted",
    "Setting",
    "StreamCost",
    "ToeplitzStrategy",
    "Workload",
    "choose_num_bands",
    "fit_blt",
    "from_parameters",
    "independent_noise",
    "is_whole",
    "linear_cooldown",
    "make_strategy",
    "momentum_workload",
    "optimize_banded",
    "optimize_blt",
    "optimize_nu",
    "register",
]

import_modules(__name__, __path__)  # also those that nothing above needs
