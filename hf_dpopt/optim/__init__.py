"""torch optimizers that know the level of the noise in their gradients.

They see released values alone, so nothing here costs privacy. A new one is one file in this folder, which adds
itself to `OPTIMIZERS`; command lines (`--optim`), documentation and the contract tests read it.
"""

from __future__ import annotations

import torch

from hf_dpopt.common.extras import import_modules
from hf_dpopt.optim.adam import DPAdamBC, DPAdamW
from hf_dpopt.optim.noise_aware import NoiseAwareOptimizer
from hf_dpopt.optim.square_roots import DPAdaGrad, DPRMSProp
from hf_dpopt.postprocess import Filter

OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "dp_adamw": DPAdamW,
    "dp_adam_bc": DPAdamBC,
    "dp_rmsprop": DPRMSProp,
    "dp_adagrad": DPAdaGrad,
}

__all__ = [
    "OPTIMIZERS",
    "DPAdaGrad",
    "DPAdamBC",
    "DPAdamW",
    "DPRMSProp",
    "Filter",
    "NoiseAwareOptimizer",
]

import_modules(__name__, __path__)  # those that add themselves
