"""Scale, then privatize: records are divided by D, clipped, summed and noised in those coordinates.

D is fixed, or made of second moments of averaged gradients: per coordinate, or as the means of rows and columns.

Shape legend: P / Q = rows / columns of a parameter (its first dimension, the rest).
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from hf_dpopt.clipping.scaling import Diagonal, Factored, Scale
from hf_dpopt.common.checks import (
    check_choice,
    check_clipping_norm,
    check_clipping_ratio,
    check_kind,
    check_positive,
    check_range,
)
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.sharding import cut_like, whole_of
from hf_dpopt.common.types import Released
from hf_dpopt.preclip.preconditioner import Preclip, Preconditioning, check_keys, multiply_

Parts = Mapping[str, Diagonal | Factored]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Dividing(Preclip):
    """Base of the preconditioners that divide by a scale: the clip and the step size that go with it.

    Args:
        clipping_norm: bound on the norm of g / D; None for that of the clipping rule.
        learning_rate_ratio: what the release of a divided step is multiplied by.

    Raises:
        DPConfigError: for values out of range.
    """

    clipping_norm: float | None = None
    learning_rate_ratio: float = 1.0

    def __post_init__(self) -> None:
        check_positive(learning_rate_ratio=self.learning_rate_ratio)
        if self.clipping_norm is not None:
            check_clipping_norm("clipping_norm", self.clipping_norm)

    def factor(self, clipping_norm: float) -> float:
        """Factor of a divided release, for the C of the clipping rule."""
        return self.learning_rate_ratio * (self.clipping_norm or clipping_norm) / clipping_norm

    def step(self, parts: Parts, clipping_norm: float) -> ScaledStep:
        """A step that divides; arguments as for `ScaledStep`."""
        return ScaledStep(
            parts,
            clipping_norm=clipping_norm,
            own_clipping_norm=self.clipping_norm,
            learning_rate_ratio=self.learning_rate_ratio,
        )


class ScaledStep:
    """One kind of step: 1 / D, a clip norm of its own, and what is done with the release.

    ``clip(g / D, C')`` is ``C' / C`` times ``clip(C / C' g / D, C)``. So every step is clipped to the C of the
    clipping rule, noise and sensitivity never change, and a clip norm of one's own is a factor before and one after.

    Args:
        parts: 1 / D by parameter; what is left out is not divided.
        clipping_norm: C of the clipping rule.
        own_clipping_norm: C' of this kind of step, in units of g / D.
        learning_rate_ratio: step size relative to the optimizer's.

    Attributes:
        gain: factor of the release.
    """

    def __init__(
        self,
        parts: Parts,
        *,
        clipping_norm: float,
        own_clipping_norm: float | None = None,
        learning_rate_ratio: float = 1.0,
    ):
        check_clipping_ratio(own_clipping_norm or clipping_norm, clipping_norm)
        ratio = 1.0 if own_clipping_norm is None else own_clipping_norm / clipping_norm
        self.scale = Scale(parts, 1 / ratio) if parts or ratio != 1.0 else None
        self.gain = ratio * learning_rate_ratio

    def receive(self, released: Released) -> Released:
        return multiply_(released, self.gain)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ScaleThenPrivatize(Dividing):
    """Division by a fixed D, which is public or was released before the run.

    Formal guarantee: as without D. The clip bounds ``g_b / D``, so the sum of one step moves by at most the clipping
    norm whatever D is, provided that D does not depend on the records but through what was already charged for.

    Args:
        scale: parameter name -> D, in the parameter's shape or as a pair (rows, columns) of D = rows columns^T; finite
            and > 0. Parameters left out are not divided.
        clipping_norm, learning_rate_ratio: those of `Dividing`.

    Raises:
        DPConfigError: at `start`, for a scale that does not fit the parameters.
    """

    scale: Mapping[str, torch.Tensor | tuple[torch.Tensor, torch.Tensor]]
    name: ClassVar[str] = "scale"

    def sensitivity_ratio(self, noise_stddev: float, expected_batch_size: int) -> float:
        return 1.0

    def parameters(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        for name in sorted(self.scale):
            given = self.scale[name]
            for values in given if isinstance(given, tuple) else (given,):
                digest.update(name.encode() + values.detach().cpu().double().numpy().tobytes())
        return {
            "name": self.name,
            "scale_digest": digest.hexdigest(),
            "clipping_norm": self.clipping_norm,
            "learning_rate_ratio": self.learning_rate_ratio,
        }

    def inverse(self, parameters: Mapping[str, torch.Tensor]) -> Parts:
        """Name -> 1 / D, on the devices of the parameters and in their shards."""
        parts: dict[str, Diagonal | Factored] = {}
        for name, given in self.scale.items():
            if name not in parameters:
                raise DPConfigError(f"There is a scale for {name!r}, which is no trained parameter. Leave it out.")
            device = parameters[name].device
            if isinstance(given, torch.Tensor) and given.shape == parameters[name].shape:
                given = cut_like(parameters[name], given.detach())
            if isinstance(given, tuple):
                rows, columns = (1 / x.detach().to(device) for x in given)
                parts[name] = Factored(rows, columns)
            else:
                parts[name] = Diagonal(1 / given.detach().to(device))
        Scale(parts).check(parameters)
        return parts


class FixedScale(Preconditioning):
    """`ScaleThenPrivatize` at work: the same in every step, so there is nothing to keep."""

    _spec: ScaleThenPrivatize

    def __init__(self, spec: ScaleThenPrivatize, parameters: Mapping[str, torch.Tensor], *of_run: Any):
        super().__init__(spec, parameters, *of_run)
        self._step = spec.step(spec.inverse(parameters), self._clipping_norm)

    @property
    def gain(self) -> float | None:
        return self._step.gain

    def scales(self) -> tuple[Scale | None, ...]:
        return (self._step.scale,)

    def receive(self, released: Released) -> Released:
        return self._step.receive(released)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_keys(state, set())


ScaleThenPrivatize.at_work = FixedScale


Rule = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]


def _rmsprop(v: torch.Tensor, x: torch.Tensor, beta: float) -> torch.Tensor:
    return v.mul_(beta).add_(x, alpha=1 - beta)


def _adagrad(v: torch.Tensor, x: torch.Tensor, beta: float) -> torch.Tensor:
    return v.add_(x)


def _yogi(v: torch.Tensor, x: torch.Tensor, beta: float) -> torch.Tensor:
    return v.add_(torch.sign(x - v).mul_(x), alpha=1 - beta)


SMALLEST = 1e-30

RULES: dict[str, Rule] = {"rmsprop": _rmsprop, "adagrad": _adagrad, "yogi": _yogi}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DividingByMoment(Dividing):
    """Base of the preconditioners that divide by ``sqrt(v) + eps``.

    Args:
        second_moment: "rmsprop", "adagrad" or "yogi".
        eps: floor of D, in gradient units; > 0.
        beta: decay of the second moment, in [0, 1).
        factored: D = rows columns^T (see `SecondMoment`), which keeps ghost norms: any model size.
    """

    second_moment: str = "rmsprop"
    eps: float | None = None
    beta: float = 0.9
    factored: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("second_moment", self.second_moment, RULES)
        check_range("beta", self.beta, 0, 1)
        check_positive(eps=self.eps)
        if self.eps is not None and self.eps < SMALLEST:
            raise DPConfigError(
                f"eps={self.eps} is so small that 1 / eps has no place in float32. Use {SMALLEST:g} or more."
            )
        check_kind("factored", self.factored, bool)


class SecondMoment:
    r"""v of ``x = max(g^2 - noise variance, 0)``, and D = sqrt(v) + eps.

    RMSProp: ``v = beta v + (1 - beta) x``. AdaGrad: ``v += x``. Yogi: ``v += (1 - beta) sign(x - v) x``
    (Zaheer et al. 2018); arXiv:2212.00309 prints ``sign(g - v^2)`` there, whose units do not agree.

    Factored, a parameter of two dimensions or more keeps the means r and c of the rows and columns of x under the same
    rule, and ``D = (sqrt(r) + eps) (sqrt(c) + eps)^T / (sqrt(mean r) + eps)``: the approximation of Adafactor
    (arXiv:1804.04235, Algorithm 1), with eps where a full diagonal has it. It is not part of arXiv:2212.00309.

    Args:
        parameters: name -> parameter; for shapes and devices.
        spec: the rule, the decay of the average (without effect for AdaGrad), and whether it is factored.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], spec: DividingByMoment):
        self._rule, self._beta = RULES[spec.second_moment], spec.beta
        self._values: dict[str, list[torch.Tensor]] = {}
        for name, p in parameters.items():
            if spec.factored and p.dim() > 1:  # whole on every rank, where the parameter is in shards
                sides = (p.shape[0], p.shape[1:].numel())
                self._values[name] = [torch.zeros(side, dtype=torch.float32, device=p.device) for side in sides]
            else:
                self._values[name] = [torch.zeros_like(p, dtype=torch.float32, requires_grad=False)]

    def update(self, gradients: Mapping[str, torch.Tensor], noise_variance: float = 0.0) -> None:
        """Take an averaged gradient whose coordinates have noise of that variance, which is subtracted."""
        for name, g in gradients.items():
            x = g.float().square()
            if noise_variance:
                x.sub_(noise_variance).clamp_(min=0.0)
            values = self._values[name]
            if len(values) == 1:
                self._rule(values[0], x, self._beta)
            else:
                x_PQ = x.flatten(1)
                self._rule(values[0], whole_of(x_PQ.mean(dim=1)), self._beta)
                self._rule(values[1], whole_of(x_PQ.mean(dim=0)), self._beta)

    def inverse(self, eps: float) -> dict[str, Diagonal | Factored]:
        """Name -> 1 / D."""
        parts: dict[str, Diagonal | Factored] = {}
        for name, values in self._values.items():
            if len(values) == 1:
                parts[name] = Diagonal(1 / (values[0].sqrt() + eps))
            else:
                rows_P, columns_Q = (v.sqrt() + eps for v in values)
                parts[name] = Factored((values[0].mean().sqrt() + eps) / rows_P, 1 / columns_Q)
        return parts

    def state_dict(self) -> dict[str, Any]:
        return {name: [v.clone() for v in values] for name, values in self._values.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_keys(state, set(self._values))
        for name, values in self._values.items():
            if [v.shape for v in values] != [v.shape for v in state[name]]:
                raise DPConfigError(
                    f"The second moment kept of {name} has other shapes than this one: it was factored and is not "
                    "now, or the other way round. Resume with the options that the run began with."
                )
            for v, kept in zip(values, state[name], strict=True):
                v.copy_(kept)
