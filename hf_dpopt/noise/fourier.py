"""The Fourier factorisation of prefix sums ("FFT"): a closed form in place of an optimised matrix.

Prefix sums of n steps are the first n outputs of a circular convolution of length 2 n with n ones and n zeros. The
discrete Fourier transform F (unitary) makes it diagonal, ``F* S F``; the mechanism takes ``S^(1/2) F`` as encoder and
``F* S^(1/2)`` as decoder, and releases the real part of the first n outputs.

Both are complex, and no step can be released before all are known. What is *added to the gradients* is nonetheless
Gaussian noise of n steps, and its covariance has one lower-triangular root: with that as B the noise has the law of
the paper's, and is made step by step. With K the symmetric Toeplitz matrix of the inverse transform of ``|S|``,

    K[t, s] = 1/2 + (1 / 2n) sum_{k odd < 2n} cos(pi k (t - s) / n) / sin(pi k / 2n),

the encoder has ``C^T C = K`` (of real gradients), and the paper's noise has the covariance K in the prefix sums.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import ClassVar, Literal, get_args

import numpy as np
from scipy.linalg import solve_triangular, toeplitz

from hf_dpopt.common.checks import check_choice
from hf_dpopt.noise.registry import Setting, register
from hf_dpopt.noise.strategy import NoiseStrategy, lower_root

Decoder = Literal["optimal", "fourier"]
MAX_STEPS = 4096  # beyond them the matrices, which are dense, do not fit beside a model


@dataclasses.dataclass(frozen=True)
class FourierStrategy(NoiseStrategy):
    """Fourier factorisation of prefix sums; for a run whose number of steps is known.

    Formal guarantee: C and B are square and lower-triangular with ``B C = I``, so the run is one Gaussian mechanism
    with the sensitivity of C, whatever is chosen adaptively on the way (arXiv:2202.08312, Theorem 2.1).

    With "fourier" the noise has the law of the paper's, ``A B (A B)^T = K`` for prefix sums A; its sensitivity is that
    of ``C^T C = A^T K^-1 A``, which is the exact one, and at most that of K, which the paper charges. With "optimal"
    ``C^T C = K`` and ``B = C^-1``: the paper's encoder with its best linear decoder. For one participation the paper's
    mechanism has the error ``K[0, 0] = ln(n) / pi + 0.981`` (long runs) in every prefix sum, sensitivity included.

    Departures from the code published with the paper: it takes the sensitivity of ``S F``, not of ``S^(1/2) F``, which
    is ``sqrt(n)`` for one participation; here C is what its comments say, with ``sqrt(ln(n) / pi + 0.981)``. For
    several participations the bound is the sum of the sizes of ``C^T C`` over the worst pattern; that code takes the
    largest singular value of the same columns, for one order in all epochs.

    Args:
        decoder: "optimal" or "fourier".

    References:
        Choquette-Choo et al. (2023), arXiv:2211.06530, Section 4; a baseline of arXiv:2310.06771.
    """

    decoder: Decoder = "optimal"
    name: ClassVar[str] = "fft"
    default_backend: ClassVar[str] = "regenerate"

    def __post_init__(self) -> None:
        check_choice("decoder", self.decoder, get_args(Decoder))

    def strategy_matrix(self, n: int) -> np.ndarray:
        return _matrices(n, self.decoder)[0]

    def noising_matrix(self, n: int) -> np.ndarray:
        return _matrices(n, self.decoder)[1]


@functools.lru_cache(maxsize=4)
def _matrices(n: int, decoder: Decoder) -> tuple[np.ndarray, np.ndarray]:
    """C and B, each (n, n), read-only."""
    prefixes = toeplitz(fourier_covariances(n))
    if decoder == "optimal":
        strategy = lower_root(prefixes)
        noising = solve_triangular(strategy, np.eye(n), lower=True)
    else:
        steps = np.diff(prefixes, axis=0, prepend=0.0)  # differences of rows, then of columns
        noising = np.linalg.cholesky(np.diff(steps, axis=1, prepend=0.0))
        strategy = solve_triangular(noising, np.eye(n), lower=True)
    for matrix in (strategy, noising):
        matrix.setflags(write=False)
    return strategy, noising


def fourier_covariances(n: int) -> np.ndarray:
    """First column of K, (n,)."""
    window = np.concatenate([np.ones(n), np.zeros(n)])
    return np.fft.irfft(np.abs(np.fft.rfft(window)), 2 * n)[:n]


@register(
    "fft", sampler="fixed_order", summary="Fourier factorisation of prefix sums, a baseline", max_steps=MAX_STEPS
)
def tune_fft(setting: Setting, decoder: Decoder = "optimal") -> NoiseStrategy:
    """Nothing to tune.

    Args:
        setting: the run.
        decoder: "optimal", or "fourier" for the noise of the paper.
    """
    return FourierStrategy(decoder)
