"""One linear recursion for many tensors: its coefficients are checked here, and its steps are computed.

t = step, 1-based; g_t = input; N = max(len(a), len(b) - 1), the buffers per coordinate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import scipy.signal
import torch

from hf_dpopt.common.errors import DPConfigError

Tensors = list[torch.Tensor]

GAIN_TOLERANCE = 1e-9
MAX_POLE = 1 - 1e-6  # a memory of a million steps; beyond it, a pole cannot be told from one on the circle
MAX_ROUNDING = 1e-7  # of the gain at frequency 0, in float64
MAX_START_UP_GAIN = 10.0
MAX_START_UP_STEPS = 10**6
MAX_SHIFT_SENSITIVITY = 16  # relative change of the gain at frequency 0 over that of the coefficients a


class Recursion:
    r"""``m_t = - sum_{i>=1} a_i m_{t-i} + sum_{i>=0} b_i g_{t-i}`` in every coordinate; the caller keeps the state.

    Transposed direct form II: N buffers per coordinate, ``m = x_1 + b_0 g``, ``x_i = x_{i+1} + p_i g - q_i m``. In
    ``delta`` form, ``x_i = x_i + x_{i+1} + p_i g - q_i m``, the coefficients p, q are those of the polynomials in
    z - 1. Rounding the a of a narrow filter to float32 moves 1 + sum(a), and with it the gain; in differences that
    sum is itself the last q. Float32 holds a narrow filter to about 1e-6 that way.

    Args:
        b: weights of the inputs, the newest first.
        a: weights of the earlier outputs, without the leading 1.

    Raises:
        DPConfigError: if a pole is not strictly inside the unit circle, or if the gain at frequency 0 is not 1
            (``sum(b) - sum(a) = 1`` to 1e-9).

    References:
        Middleton and Goodwin (1986), IEEE Trans. Automatic Control 31(11), 1015-1021 (delta operator).
    """

    def __init__(self, b: Sequence[float], a: Sequence[float] = ()):
        self.b, self.a = _without_zeros(b) or (0.0,), _without_zeros(a)
        _check(self.b, self.a)
        n = self.num_buffers = max(len(self.a), len(self.b) - 1)
        numerator, denominator = [*self.b, *[0.0] * (n + 1 - len(self.b))], [1.0, *self.a, *[0.0] * (n - len(self.a))]
        self.form, self._p, self._q = "shift", numerator[1:], denominator[1:]
        z = np.poly1d([1.0, 1.0])
        p, q = (np.poly1d(polynomial)(z).coeffs.tolist() for polynomial in (numerator, denominator))
        size = sum(map(abs, self.a))
        if size > MAX_SHIFT_SENSITIVITY * (1 + sum(self.a)) and size > sum(map(abs, q[1:])):
            p = [*[0.0] * (n + 1 - len(p)), *p]
            self.form, self._p, self._q = "delta", [*p[1:-1], q[-1]], q[1:]  # gain 1, exactly

    def advance(self, g: Tensors, x: list[Tensors]) -> Tensors:
        """The outputs of a step; replaces the buffers by the next ones.

        Passes over memory (a read or a write of one value per coordinate): 3 for the output, then 6 for every buffer
        but the last, which takes 5, or 2 if its p is 0; in ``delta`` form 9, and 6 for the last.

        Args:
            g: inputs. Left as they are; without buffers they are the outputs.
            x: (buffer, tensor), zeros at first, of the shapes and dtypes of the inputs; changed in place or replaced.
        """
        if not x:
            return g
        last = len(x) - 1
        if self.form == "delta":
            m = list(torch._foreach_add(x[0], g, alpha=self.b[0]))
            for i in range(len(x)):
                if i < last:
                    torch._foreach_add_(x[i], x[i + 1])
                _add_(x[i], g, self._p[i])
                _add_(x[i], m, -self._q[i])
            return m
        m = x[0]  # whose place in memory goes to the caller
        _add_(m, g, self.b[0])
        for i in range(last):
            x[i] = x[i + 1]
            _add_(x[i], g, self._p[i])
            _add_(x[i], m, -self._q[i])
        if self._p[last] == 0:
            x[last] = list(torch._foreach_mul(m, -self._q[last]))
        else:
            x[last] = list(torch._foreach_mul(g, self._p[last]))
            _add_(x[last], m, -self._q[last])
        return m


def start_up_gain(b: Sequence[float], a: Sequence[float] = ()) -> float:
    """Largest stddev of ``m_t / c_t`` in any step, for inputs of stddev 1 independent over the steps.

    c_t = the recursion run on ones. It is ``max_t sqrt(sum_{i<t} h_i^2) / sum_{i<t} h_i``, h the impulse response;
    at least 1, for the first output is g_1, and inf if some c_t is not positive.
    """
    radius = max(abs(np.roots([1.0, *a])), default=0.0)
    memory = len(a) * math.log(1e-12) / math.log(radius) if radius > 1e-12 else 0
    h = impulse_response(b, a, min(MAX_START_UP_STEPS, len(b) + len(a) + math.ceil(memory)))
    c = np.cumsum(h)
    return float(np.max(np.sqrt(np.cumsum(h**2)) / c)) if c.min() > 0 else math.inf


def check_start_up(b: Sequence[float], a: Sequence[float]) -> None:
    """Refuse a filter whose first outputs cannot be divided by c_t."""
    gain = start_up_gain(b, a)
    if gain > MAX_START_UP_GAIN:
        what = "is not positive in every step"
        if math.isfinite(gain):
            what = f"comes so near 0 that the noise is multiplied by {gain:.3g}"
        raise DPConfigError(
            f"The step response of this filter, by which its first outputs are divided, {what}. Use a b[0] > 0 "
            f"(it is {b[0]:.3g}) and fewer negative coefficients b."
        )


def impulse_response(b: Sequence[float], a: Sequence[float], num_steps: int) -> np.ndarray:
    """Weights of the input of 0, 1 ... steps ago in the output, float64, (num_steps,)."""
    impulse = np.zeros(num_steps)
    impulse[:1] = 1.0
    return scipy.signal.lfilter(b, [1.0, *a], impulse)


def _check(b: tuple[float, ...], a: tuple[float, ...]) -> None:
    at_zero = 1 + sum(a)
    if at_zero != 0 and 2.0**-53 * (1 + sum(map(abs, a))) > MAX_ROUNDING * abs(at_zero):
        raise DPConfigError(
            f"This filter is too narrow for its order: 1 + sum(a) = {at_zero:.3g} is lost in rounding. Take a lower "
            "order or a higher cutoff."
        )
    pole = max(np.roots([1.0, *a]), key=abs, default=0.0)
    if abs(pole) >= MAX_POLE:
        raise DPConfigError(
            f"This filter is not stable: a pole at {pole:.6g}, of modulus {abs(pole):.6g}, is not strictly inside the "
            f"unit circle. a={list(a)} is read without its leading 1: momentum is b=0.1, a=-0.9."
        )
    if abs(sum(b) - sum(a) - 1) > GAIN_TOLERANCE:
        gain = sum(b) / at_zero
        fix = f"Divide b by {gain:.12g}." if gain else "The coefficients b must not add up to 0."
        raise DPConfigError(
            f"This filter has gain {gain:.12g} at frequency 0, and a constant gradient must pass with gain 1. {fix}"
        )


def _add_(x: Tensors, y: Tensors, alpha: float) -> None:
    if alpha:
        torch._foreach_add_(x, y, alpha=alpha)


def _without_zeros(coefficients: Sequence[float]) -> tuple[float, ...]:
    """Coefficients without the zeros at the end."""
    values = [float(x) for x in coefficients]
    if not all(map(math.isfinite, values)):
        raise DPConfigError(f"{values} are no coefficients: all must be finite numbers.")
    while values and values[-1] == 0:
        values.pop()
    return tuple(values)
