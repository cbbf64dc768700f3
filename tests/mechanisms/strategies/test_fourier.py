"""The Fourier factorisation of prefix sums against complex matrices, closed forms and the other mechanisms."""

from __future__ import annotations

import numpy as np
import pytest

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise import FourierStrategy, Participation, Setting, make_strategy
from hf_dpopt.noise.fourier import fourier_covariances
from tests.reference.strategies import fourier_error, max_loss

DECODERS = ("optimal", "fourier")


def complex_factors(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Decoder (n, 2n) and encoder (2n, n) as the paper has them, entry by entry."""
    size = 2 * n
    place = np.arange(size)
    transform = np.exp(-2j * np.pi * np.outer(place, place) / size) / np.sqrt(size)
    spectrum = np.array([sum(np.exp(-2j * np.pi * k * t / size) for t in range(n)) for k in range(size)])
    root = np.sqrt(spectrum)
    return (transform.conj().T * root)[:n], (root[:, None] * transform)[:, :n]


def prefix_noise(n: int) -> np.ndarray:
    """Covariance of the real part of the decoder times complex draws, real and imaginary parts of variance 1."""
    decoder, _ = complex_factors(n)
    return decoder.real @ decoder.real.T + decoder.imag @ decoder.imag.T


@pytest.mark.parametrize("n", [1, 2, 7, 16])
def test_the_factors_are_a_factorisation_and_the_covariances_their_products(n):
    decoder, encoder = complex_factors(n)
    np.testing.assert_allclose(decoder @ encoder, np.tril(np.ones((n, n))), atol=1e-12)
    covariances = fourier_covariances(n)[np.abs(np.subtract.outer(np.arange(n), np.arange(n)))]
    np.testing.assert_allclose((encoder.conj().T @ encoder).real, covariances, atol=1e-12)
    np.testing.assert_allclose(prefix_noise(n), covariances, atol=1e-12)
    odd = np.arange(1, 2 * n, 2)
    lags = [0.5 + (np.cos(np.pi * odd * lag / n) / np.sin(np.pi * odd / (2 * n))).sum() / (2 * n) for lag in range(n)]
    np.testing.assert_allclose(fourier_covariances(n), lags, atol=1e-12)


@pytest.mark.parametrize("n", [1, 2, 7, 16])
def test_the_noise_of_the_fourier_decoder_has_the_law_of_the_paper(n):
    summed = np.cumsum(FourierStrategy("fourier").noising_matrix(n), axis=0)
    np.testing.assert_allclose(summed @ summed.T, prefix_noise(n), atol=1e-10)


@pytest.mark.parametrize("n", [1, 2, 7, 16])
def test_the_optimal_decoder_keeps_the_encoder(n):
    """The same columns, as far as privacy sees them, and the pseudo-inverse of the encoder, to which noise is real."""
    _, encoder = complex_factors(n)
    strategy = FourierStrategy("optimal")
    matrix = strategy.strategy_matrix(n)
    np.testing.assert_allclose(matrix.T @ matrix, (encoder.conj().T @ encoder).real, atol=1e-12)
    real = np.concatenate([encoder.real, encoder.imag])  # a complex draw is two real ones
    best = np.tril(np.ones((n, n))) @ np.linalg.pinv(real)
    np.testing.assert_allclose(strategy.per_query_error(n), np.square(best).sum(axis=1), rtol=1e-9)


@pytest.mark.parametrize("n", [1, 2, 16, 100])
def test_one_participation_has_the_closed_form_of_the_paper(n):
    """Mathias' bound on factorisations of prefix sums is the error of this one, which no decoder of it exceeds."""
    by_paper = np.linalg.norm(complex_factors(n)[1], axis=0).max() * np.sqrt(np.diag(prefix_noise(n)))
    np.testing.assert_allclose(by_paper, fourier_error(n), rtol=1e-9)
    for decoder in DECODERS:
        strategy = FourierStrategy(decoder)
        assert strategy.sensitivity(n, Participation()) <= np.sqrt(fourier_error(n)) * (1 + 1e-9)
        assert max_loss(strategy, n, Participation()) <= fourier_error(n) * (1 + 1e-9)
    assert FourierStrategy("optimal").mean_loss(n, Participation()) <= FourierStrategy("fourier").mean_loss(
        n, Participation()
    ) * (1 + 1e-9)


def test_options():
    setting = Setting(num_steps=8, participation=Participation())
    assert make_strategy("fft", setting) == FourierStrategy("optimal")
    assert make_strategy("fft", setting, {"decoder": "fourier"}) == FourierStrategy("fourier")
    with pytest.raises(DPConfigError, match="'optimal', 'fourier'"):
        make_strategy("fft", setting, {"decoder": "best"})
    with pytest.raises(DPConfigError, match="'fft' cannot be tuned for so many"):
        make_strategy("fft", Setting(num_steps=10_000, participation=Participation()))
