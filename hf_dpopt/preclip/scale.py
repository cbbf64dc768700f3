"""Scale, then privatize: records are divided by D, clipped, summed and noised in those coordinates."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from hf_dpopt.clipping.scaling import Diagonal, Factored, Scale
from hf_dpopt.common.checks import check_clipping_norm, check_clipping_ratio, check_positive
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.sharding import cut_like
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
