"""Filters and gradients over frequency: what passes, what is signal, and what a filter gains.

Frequencies are fractions of the Nyquist frequency (half a cycle per step), 0 to 1; F = their number, T = steps.
"""

from __future__ import annotations

import numpy as np
import scipy.signal
import torch

from hf_dpopt.postprocess.adaptive_fir import AdaptiveFIR
from hf_dpopt.postprocess.low_pass import LowPassFilter
from hf_dpopt.postprocess.recursion import impulse_response


def frequency_response(low_pass: LowPassFilter | AdaptiveFIR, frequencies: np.ndarray) -> np.ndarray:
    """Complex gain, once the first steps are over, at frequencies in any order; of their shape."""
    return scipy.signal.freqz(low_pass.b, [1.0, *low_pass.a], worN=np.pi * np.asarray(frequencies, dtype=float))[1]


def power_spectral_density(recorded: torch.Tensor, segment: int = 256) -> tuple[np.ndarray, np.ndarray]:
    """Power of a coordinate over frequency, by Welch's method, on average over the coordinates.

    The mean is left in: a constant gradient is the signal. White noise of variance v has density v everywhere.

    Args:
        recorded: gradients of consecutive steps, (T, d).
        segment: steps of a segment; frequencies are `segment` // 2 + 1, with T < `segment` fewer.

    Returns:
        Frequencies as fractions of the Nyquist frequency, 0 to 1, and densities, both float64, (F,).
    """
    x = recorded.detach().to("cpu", torch.float64).numpy()
    frequencies, density = scipy.signal.welch(x, fs=2.0, nperseg=min(segment, len(x)), detrend=False, axis=0)
    density[0] *= 2  # one-sided densities hold the power of two signs of the frequency, except at the ends
    if min(segment, len(x)) % 2 == 0:
        density[-1] *= 2
    return frequencies, density.mean(axis=1)


def equation_4(low_pass: LowPassFilter, frequencies: np.ndarray, signal: np.ndarray) -> float:
    r"""Normalised signal-to-noise ratio of arXiv:2408.13460, Eq. 4: ``sum_tau k_tau c_tau / sum_tau k_tau^2``.

    k is the impulse response, and ``c_tau = rho_tau - 1/2`` with rho the autocorrelation of the signal: the paper's
    assumption ``<g_t, g_{t-tau}> >= c_tau |g_t|^2 + c_{-tau} |g_{t-tau}|^2`` with ``c_{-tau} = 1/2``, for gradients of
    one norm. No filter has 1/2, and a filter more only if ``sum_tau k_tau rho_tau > (1 + sum_tau k_tau^2) / 2``.

    Args:
        low_pass: a filter with gain 1 at frequency 0.
        frequencies: increasing, fractions of the Nyquist frequency, (F,).
        signal: density of the gradient without noise, (F,).
    """
    response = impulse_response(low_pass.b, low_pass.a, 10_000)
    passed = frequency_response(low_pass, frequencies).real
    kept = np.trapezoid(passed * signal, frequencies) / np.trapezoid(signal, frequencies)  # sum_tau k_tau rho_tau
    return float((kept - response.sum() / 2) / (response @ response))


def power_ratio(
    low_pass: LowPassFilter | AdaptiveFIR, frequencies: np.ndarray, signal: np.ndarray, noise: np.ndarray | float
) -> float:
    r"""Factor by which the filter raises the ratio of signal power to noise power; 1 for the filter ``none``.

    ``(int |H|^2 S / int |H|^2 N) / (int S / int N)`` over frequency, H the frequency response; ours, not the paper's
    `equation_4`: it does not count what the filter removes from the signal.

    Args:
        low_pass: a filter.
        frequencies: increasing, fractions of the Nyquist frequency, (F,).
        signal: density of the gradient without noise, (F,).
        noise: density of the noise, (F,), or its variance if it is independent over the steps.
    """
    power = abs(frequency_response(low_pass, frequencies)) ** 2
    noise = np.broadcast_to(noise, power.shape)
    after = np.trapezoid(power * signal, frequencies) / np.trapezoid(power * noise, frequencies)
    return float(after / (np.trapezoid(signal, frequencies) / np.trapezoid(noise, frequencies)))
