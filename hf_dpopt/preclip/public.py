"""AdaDPS: the preconditioner of public gradients, applied before the clip."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from hf_dpopt.clipping.scaling import Scale
from hf_dpopt.common.checks import check_clipping_norm, check_count, check_positive, check_real
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.types import Released
from hf_dpopt.postprocess import NoiseLevel
from hf_dpopt.preclip.base import Preclip, Preconditioning, PublicSource, ScaleChanges, check_keys
from hf_dpopt.preclip.scale import ScaledStep
from hf_dpopt.preclip.second_moments import SecondMoment, check_moment


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublicPreconditioner(Preclip):
    r"""``D = sqrt(v) + eps`` with v the second moment of gradients of public records.

    Formal guarantee: as without it, for D depends on public records and on the released weights alone.

    Args:
        refresh_every: steps between two public batches; >= 1.
        second_moment: "rmsprop", "adagrad" or "yogi".
        eps: floor of D, in gradient units; > 0.
        beta: decay of the second moment, in [0, 1).
        clipping_norm: bound on the norm of g / D; None for that of the clipping rule.
        learning_rate_ratio: step size relative to the optimizer's.
        factored: D = rows columns^T (see `SecondMoment`): any model size.

    References:
        Li et al. (2022), arXiv:2202.05963, Algorithm 1.
    """

    refresh_every: int = 1
    second_moment: str = "rmsprop"
    eps: float = 1e-5
    beta: float = 0.9
    clipping_norm: float | None = None
    learning_rate_ratio: float = 1.0
    factored: bool = False
    name: ClassVar[str] = "adadps"
    needs_public_records: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("refresh_every", self.refresh_every)
        check_real("eps", self.eps, "a finite number > 0, in gradient units")
        check_moment(self.second_moment, self.beta, self.eps, self.factored)
        check_positive(learning_rate_ratio=self.learning_rate_ratio)
        if self.clipping_norm is not None:
            check_clipping_norm("clipping_norm", self.clipping_norm)

    def sensitivity_ratio(self, noise_stddev: float, expected_batch_size: int) -> float:
        return 1.0

    def changes(self, clipping_norm: float) -> ScaleChanges:
        factor = self.learning_rate_ratio * (self.clipping_norm or clipping_norm) / clipping_norm
        return ScaleChanges((self.refresh_every,), (factor,))

    def parameters(self) -> dict[str, Any]:
        return {"name": self.name, **dataclasses.asdict(self)}

    def start(
        self,
        parameters: Mapping[str, torch.Tensor],
        *,
        clipping_norm: float,
        noise: NoiseLevel | None = None,
        public: PublicSource | None = None,
    ) -> PublicPreconditioning:
        """See `Preclip.start`; needs `public`."""
        if public is None:
            raise DPConfigError(
                "preconditioner='adadps' takes its scale from public records. Pass public_dataset to the trainer (or "
                "public=PublicGradients(..) to start); without public records use 'dp2_rmsprop'."
            )
        return PublicPreconditioning(self, parameters, clipping_norm, public)


class PublicPreconditioning(Preconditioning):
    """`PublicPreconditioner` at work."""

    def __init__(
        self,
        spec: PublicPreconditioner,
        parameters: Mapping[str, torch.Tensor],
        clipping_norm: float,
        public: PublicSource,
    ):
        self._spec, self._clipping_norm, self._public = spec, clipping_norm, public
        self._moment = SecondMoment(parameters, spec.second_moment, spec.beta, spec.factored)
        self._t = 0  # steps done
        self._refreshed_at = -1
        self._step: ScaledStep | None = None

    @property
    def gain(self) -> float | None:
        return (self._step or self._make_step()).gain

    def _make_step(self) -> ScaledStep:
        return ScaledStep(
            self._moment.inverse(self._spec.eps),
            clipping_norm=self._clipping_norm,
            own_clipping_norm=self._spec.clipping_norm,
            learning_rate_ratio=self._spec.learning_rate_ratio,
        )

    def scales(self) -> tuple[Scale | None, ...]:
        if self._t % self._spec.refresh_every == 0 and self._refreshed_at != self._t:
            self._moment.update(self._public.mean())
            self._refreshed_at, self._step = self._t, None
        self._step = self._step or self._make_step()
        return (self._step.scale,)

    def receive(self, released: Released) -> Released:
        assert self._step is not None, "scales() comes first"
        self._t += 1
        return self._step.receive(released)

    def pass_over(self) -> None:
        self._t += 1

    def state_dict(self) -> dict[str, Any]:
        return {
            "t": self._t,
            "refreshed_at": self._refreshed_at,
            "moment": self._moment.state_dict(),
            "public": self._public.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_keys(state, {"t", "refreshed_at", "moment", "public"})
        self._moment.load_state_dict(state["moment"])
        self._public.load_state_dict(state["public"])
        self._t, self._refreshed_at, self._step = state["t"], state["refreshed_at"], None
