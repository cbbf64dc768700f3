"""Low-pass filters of the released gradient (DOPPLER): what changes slowly passes, most of the noise does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import scipy.signal
import torch

from hf_dpopt.common.checks import check_at_most, check_choice, check_count, check_range, check_share
from hf_dpopt.common.errors import DPConfigError, shown
from hf_dpopt.postprocess.adaptive_fir import AdaptiveFIR
from hf_dpopt.postprocess.maps import BufferedFilter, NoiseLevel, arithmetic
from hf_dpopt.postprocess.recursion import Recursion, check_start_up

# Zhang et al. (2024), arXiv:2408.13460: name -> (b, a without its leading 1)
PRESETS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "none": ((1.0,), ()),
    "momentum": ((0.1,), (-0.9,)),
    "first_order_v1": ((1 / 11, 1 / 11), (-9 / 11,)),
    "first_order_v2": ((3 / 11, -1 / 11), (-9 / 11,)),
    "second_order": ((1 / 58, 2 / 58, 1 / 58), (-92 / 58, 38 / 58)),
    "f1": ((0.075, 0.025), (-0.9,)),
    "f2": ((0.025, 0.075), (-0.9,)),
    "f3": ((0.1, 0.1), (-0.8,)),
    "f4": ((0.2, 0.2), (-0.6,)),
    "f5": ((0.025, 0.05, 0.025), (-0.9,)),
    "f6": ((0.025, 0.025), (-1.8, 0.85)),
}
DESIGNS: dict[str, tuple[type, ...]] = {
    "butterworth": (int, float), "chebyshev": (int, float, float), "adaptive": (int, int),
    "adaptive_as_printed": (int, int),
}  # fmt: skip
MAX_ORDER = 20  # beyond, the polynomials of a design are noise in float64
SMALLEST_RIPPLE, LARGEST_RIPPLE = 1e-6, 100.0  # in decibels
MAX_TEXT = 4000  # characters of coefficients
ADAPTIVE = ("adaptive", "adaptive_as_printed")


class LowPassFilter(BufferedFilter):
    r"""A linear recursive filter of every coordinate of the released gradient g_t.

    .. math::
        m_t = -\sum_{\tau=1}^{n_a} a_\tau m_{t-\tau} + \sum_{\tau=0}^{n_b} b_\tau g_{t-\tau}, \qquad \hat m_t = m_t/c_t

    with c_t the same recursion run on ones, so that a constant passes unchanged from the first step on.

    It keeps max(len(a), len(b) - 1) buffers per coordinate. Arithmetic is float32, float64 for float64 gradients; how
    a step is computed and what it costs: `hf_dpopt.postprocess.recursion.Recursion`.

    Args:
        b: weights of the gradients, the newest first.
        a: weights of the earlier outputs, without the leading 1: momentum is ``b=[0.1], a=[-0.9]``.

    Raises:
        DPConfigError: if a pole is not strictly inside the unit circle, if the gain at frequency 0 is not 1
            (``sum(b) - sum(a) = 1`` to 1e-9), or if the division by c_t multiplies the noise of a step by more than
            ten; the message has the number and the fix.

    References:
        Zhang et al. (2024), arXiv:2408.13460, Alg. 1.
    """

    def __init__(self, *, b: Sequence[float], a: Sequence[float] = ()):
        super().__init__()
        self._recursion = Recursion(b, a)
        self.b, self.a = self._recursion.b, self._recursion.a
        check_start_up(self.b, self.a)
        self._ones = [[torch.zeros((), dtype=torch.float64)] for _ in range(self.num_buffers)]

    @property
    def num_buffers(self) -> int:
        """Tensors kept per parameter."""
        return self._recursion.num_buffers

    # --- which filter ------------------------------------------------------------------------------------------------

    @classmethod
    def preset(cls, name: str) -> LowPassFilter:
        """A filter of the paper, by its name in `PRESETS`."""
        check_choice("filter", name, PRESETS)
        b, a = PRESETS[name]
        return cls(b=b, a=a)

    @classmethod
    def butterworth(cls, order: int, cutoff: float) -> LowPassFilter:
        """Maximally flat; gain ``1/sqrt(2)`` at `cutoff`, a fraction of the Nyquist frequency (1/2 per step)."""
        _check_design(order, cutoff)
        return cls._from_polynomials(*scipy.signal.butter(order, cutoff))

    @classmethod
    def chebyshev(cls, order: int, cutoff: float, ripple: float) -> LowPassFilter:
        """Type I: steeper, with `ripple` dB between the largest and the least gain up to `cutoff`.

        Rescaled to gain 1 at frequency 0, where one of even order has its least.
        """
        _check_design(order, cutoff)
        check_range("ripple", ripple, SMALLEST_RIPPLE, LARGEST_RIPPLE)  # decibels; 0.5 is usual
        return cls._from_polynomials(*scipy.signal.cheby1(order, ripple, cutoff))

    @classmethod
    def _from_polynomials(cls, b: np.ndarray, a: np.ndarray) -> LowPassFilter:
        return cls(b=(b * (a.sum() / b.sum())).tolist(), a=a[1:].tolist())

    @staticmethod
    def parse(text: str, noise: NoiseLevel | None = None) -> LowPassFilter | AdaptiveFIR:
        """The filter that a command line names.

        Args:
            text: a name in `PRESETS`, ``butterworth:ORDER:CUTOFF``, ``chebyshev:ORDER:CUTOFF:RIPPLE``,
                ``b=1/11,1/11;a=-9/11`` (numbers or fractions; ``;a=`` may be left out), ``adaptive:TAPS:EVERY``
                (the steps between two estimates may be left out: 10), or ``adaptive_as_printed:TAPS:EVERY``, the
                same without the check of the weights (`AdaptiveFIR`).
            noise: noise level of the released gradient; an adaptive filter needs it.

        Raises:
            DPConfigError: if `text` is none of these.
        """
        text = text.strip()
        name, *values = text.split(":") if len(text) <= MAX_TEXT else [""]
        if text in PRESETS:
            return LowPassFilter.preset(text)
        try:
            if name in ADAPTIVE and len(values) == 1:
                values.append("10")
            if name in DESIGNS:
                numbers = [kind(value) for kind, value in zip(DESIGNS[name], values, strict=True)]
            else:
                b, a = _coefficients(text if name else "")
        except (ValueError, KeyError, ZeroDivisionError, OverflowError):
            raise DPConfigError(
                f"filter={shown(text)} is no filter. Use one of: {', '.join(PRESETS)}; butterworth:ORDER:CUTOFF "
                "(2:0.1; a fraction of the Nyquist frequency) or chebyshev:ORDER:CUTOFF:RIPPLE (2:0.1:0.5; "
                "decibels); adaptive:TAPS:EVERY (8:10), or adaptive_as_printed:TAPS:EVERY, whose weights are not "
                "checked; or your own coefficients, 'b=0.1;a=-0.9', with a without its leading 1."
            ) from None
        if name == "butterworth":
            return LowPassFilter.butterworth(*numbers)
        if name == "chebyshev":
            return LowPassFilter.chebyshev(*numbers)
        if name not in ADAPTIVE:
            return LowPassFilter(b=b, a=a)
        if noise is None:
            raise DPConfigError(
                f"{text!r} needs the noise level of the released gradient: parse(text, noise=...). Without one, use a "
                "filter with fixed coefficients."
            )
        as_printed = name == "adaptive_as_printed"
        return AdaptiveFIR(numbers[0], noise, refresh_every=numbers[1], as_printed=as_printed)

    def parameters(self) -> dict[str, Any]:
        return {"b": list(self.b), "a": list(self.a)}

    # --- a step ------------------------------------------------------------------------------------------------------

    def _filtered(self, grads: list[torch.Tensor]) -> list[torch.Tensor]:
        g = [x.to(arithmetic(x)) for x in grads]
        if not self._buffers:
            self._buffers = [[torch.zeros_like(x) for x in g] for _ in range(self.num_buffers)]
        self._buffers = [[s.to(x.device) for s, x in zip(row, g, strict=True)] for row in self._buffers]
        c_t = float(self._recursion.advance([torch.ones((), dtype=torch.float64)], self._ones)[0])
        m = self._recursion.advance(g, self._buffers)
        if abs(c_t - 1) > 1e-12:  # dividing by what float32 rounds to 1 changes nothing
            torch._foreach_div_(m, c_t)
        return m

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"ones": [float(row[0]) for row in self._ones]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._ones = [[torch.tensor(value, dtype=torch.float64)] for value in state["ones"]]


def _coefficients(text: str) -> tuple[list[float], list[float]]:
    """b and a of ``b=1/11,1/11;a=-9/11``; a ValueError or KeyError if it is nothing like that."""
    parts = dict(part.split("=") for part in text.replace(" ", "").split(";"))
    b, a = parts.pop("b"), parts.pop("a", "")
    if parts:
        raise ValueError(parts)
    return [float(Fraction(x)) for x in b.split(",")], [float(Fraction(x)) for x in a.split(",") if a]


def _check_design(order: int, cutoff: float) -> None:
    check_count("order", order)
    check_at_most("order", order, MAX_ORDER, "float64 does not hold its polynomials. Use 1 or 2.")
    check_share("cutoff", cutoff, "0.1 of the Nyquist frequency, which lets pass what repeats every 20 steps or more")
