"""Strategies tuned for a run: least error of the iterates per unit of privacy.

Every function minimises ``sensitivity * rms error`` for given steps n, participation and workload; none looks at data.
What an ``optimize_`` function finds is kept on disk, see `cache`.
"""

from __future__ import annotations

from hf_dpopt.noise.tuning.banded import choose_num_bands, optimize_banded
from hf_dpopt.noise.tuning.blt import fit_blt, optimize_blt
from hf_dpopt.noise.tuning.dense import optimize_dense
from hf_dpopt.noise.tuning.nu import optimize_damped, optimize_nu

__all__ = [
    "choose_num_bands",
    "fit_blt",
    "optimize_banded",
    "optimize_blt",
    "optimize_damped",
    "optimize_dense",
    "optimize_nu",
]
