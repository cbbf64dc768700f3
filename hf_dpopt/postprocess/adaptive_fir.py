"""A low-pass filter whose coefficients follow from the released gradients themselves (DOPPLER, section 5.3)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from hf_dpopt.common.checks import check_at_most, check_count
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.postprocess.maps import BufferedFilter, NoiseLevel, arithmetic, on_host
from hf_dpopt.postprocess.recursion import start_up_gain

NOISE_SLACK = 1e-9  # by which an adaptive filter may raise the noise of a step: rounding

MAX_TAPS = 256


class AdaptiveFIR(BufferedFilter):
    r"""A weighted mean of the last released gradients; the weights are estimated every `refresh_every` steps.

    .. math::
        c_\tau = \mathrm{mean}_t\left[\langle g_t, g_{t-\tau}\rangle - d\,k_t(\tau)
                 - \tfrac12 \max(\|g_{t-\tau}\|^2 - d\,k_{t-\tau}(0), 0)\right], \qquad b_\tau = c_\tau / \sum_i c_i

    over the steps since the last estimate, with d coordinates and k_t(tau) the covariance of the noise of step t with
    that of tau steps before.

    New weights are taken only if the c add up to more than 0, and `LowPassFilter` could start with these weights and
    raise independent noise in no step; else the last ones stay. It begins as ``none``.

    Departures from the paper: (1) its noise is independent, so k(tau) = 0 for tau >= 1. (2) Its c_0 keeps the noise
    of ``<g_t, g_t>``, so that larger noise brings the filter nearer to ``none``; here it is subtracted as at the
    other lags. (3) It has no such check, and takes every
    weight. (4) Its common denominator cancels in b and is left out. ``as_printed=True`` undoes the first three; then
    only weights that do not exist, where the c add up to 0 or are not finite, are left out.

    Formal guarantee: weights and state are made of released gradients and of the public noise level, and may be
    stored and published.

    Args:
        taps: gradients that are kept and weighted, the present one included; >= 2.
        noise: noise level of the released gradient; asked once per step, and replaceable until the first.
        refresh_every: steps between two estimates; the first is made when `taps` steps can be compared.
        as_printed: the paper's estimate, nothing subtracted at any lag, and no check of the weights: they may be
            negative, and may raise the noise of a step or turn the gradient around.

    Raises:
        DPConfigError: for counts that are none.

    References:
        Zhang et al. (2024), arXiv:2408.13460, section 5.3.
    """

    a: tuple[float, ...] = ()

    @property
    def needs_noise_level(self) -> bool:
        return True

    def __init__(
        self,
        taps: int,
        noise: NoiseLevel,
        *,
        refresh_every: int = 10,
        as_printed: bool = False,
    ):
        check_count("taps", taps, "an integer >= 2: the gradients that are averaged")
        check_count("refresh_every", refresh_every)
        check_at_most("taps", taps, MAX_TAPS, "each keeps a copy of the gradient, and 8 is usual. Use fewer.")
        if taps < 2:
            raise DPConfigError(
                f"taps={taps} leaves the gradient as it is. Use 2 or more, 8 for instance, or no filter."
            )
        super().__init__()  # of its buffers, the newest is the first
        self.taps, self.noise, self.refresh_every = taps, noise, refresh_every
        self.as_printed = bool(as_printed)
        self.b: tuple[float, ...] = (1.0,) + (0.0,) * (taps - 1)
        self._signal = torch.zeros(0, dtype=torch.float64)  # max(|g|^2 - d k(0), 0) of the kept ones
        self._sums = torch.zeros(taps, dtype=torch.float64)
        self._counts = [0] * taps

    def parameters(self) -> dict[str, Any]:
        return {"taps": self.taps, "refresh_every": self.refresh_every, "as_printed": self.as_printed}

    def set_noise(self, level: NoiseLevel) -> None:
        self.noise = level

    def _filtered(self, grads: list[torch.Tensor]) -> list[torch.Tensor]:
        if not grads:
            return []
        g = [x.to(arithmetic(x)) for x in grads]
        self._keep(g)
        self._compare(g)
        if self.num_steps % self.refresh_every == 0:
            self._refresh()
        m = list(torch._foreach_mul(g, self.b[0]))
        for weight, old in zip(self.b[1:], self._buffers[1:], strict=False):  # those not yet there have no weight
            if weight:
                torch._foreach_add_(m, old, alpha=weight)
        return m

    def _keep(self, g: list[torch.Tensor]) -> None:
        """Put a copy of g first; the oldest of all leaves its place in memory for it."""
        kept = [[old.to(x.device) for old, x in zip(row, g, strict=True)] for row in self._buffers]
        if len(kept) == self.taps:
            newest = kept.pop()
            torch._foreach_copy_(newest, g)
        else:
            newest = [x.clone() for x in g]
        self._buffers = [newest, *kept]

    def _compare(self, g: list[torch.Tensor]) -> None:
        """Add this step to the means; all numbers stay on the device."""
        device, d = g[0].device, sum(x.numel() for x in g)
        variance = self.noise.variance()
        products = [_dot(g, g, device), *(_dot(g, old, device) for old in self._buffers[1:])]
        signal = (products[0] - d * variance).clamp(min=0)
        self._signal = torch.cat([signal.reshape(1), self._signal.to(device)[: len(products) - 1]])
        covariances = [0.0] * len(products)
        if not self.as_printed:
            covariances = [variance, *(self.noise.covariance(lag) for lag in range(1, len(products)))]
        noise = d * torch.tensor(covariances, dtype=torch.float64, device=device)
        self._sums = self._sums.to(device)
        self._sums[: len(products)] += torch.stack(products) - noise - self._signal / 2
        self._counts = [count + (lag < len(products)) for lag, count in enumerate(self._counts)]

    def _refresh(self) -> None:
        if not all(self._counts):
            return
        c = [total / count for total, count in zip(self._sums.tolist(), self._counts, strict=True)]
        total = math.fsum(c)
        if math.isfinite(total) and (total > 0 or (self.as_printed and total < 0)):
            b = tuple(x / total for x in c)
            if self.as_printed or start_up_gain(b) <= 1 + NOISE_SLACK:
                self.b = b
        self._sums, self._counts = torch.zeros_like(self._sums), [0] * self.taps

    def state_dict(self) -> dict[str, Any]:
        means = {"signal": on_host(self._signal), "sums": on_host(self._sums), "counts": list(self._counts)}
        return super().state_dict() | {"b": list(self.b), **means}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.b, self._counts = tuple(state["b"]), list(state["counts"])
        self._signal, self._sums = on_host(state["signal"]), on_host(state["sums"])


def _dot(x: list[torch.Tensor], y: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Inner product over all tensors, float64, on `device`."""
    parts = [torch.dot(v.flatten(), w.flatten().to(v.device, v.dtype)) for v, w in zip(x, y, strict=True)]
    return torch.stack([part.to(device, torch.float64) for part in parts]).sum()
