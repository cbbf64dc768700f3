"""Maps of the released mean gradient: after the noise everything is free, in any order and number.

A new one is one file with a class that extends `Postprocess`. They run inside `private_step`, after `# released from
here`, on released values only; so their state may be stored and published.
"""

from __future__ import annotations

from hf_dpopt.common.types import Gradients, Released
from hf_dpopt.postprocess.maps import Filter, IndependentNoise, NoiseLevel, Postprocess

__all__ = [
    "Filter",
    "Gradients",
    "IndependentNoise",
    "NoiseLevel",
    "Postprocess",
    "Released",
]
