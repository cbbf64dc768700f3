"""AdaDPS: the preconditioner of public gradients, applied before the clip."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from hf_dpopt.clipping.scaling import Scale
from hf_dpopt.common.checks import check_count, check_real
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.types import Released
from hf_dpopt.preclip.preconditioner import Preconditioning, PublicSource, ScaleChanges, check_keys
from hf_dpopt.preclip.scale import DividingByMoment, ScaledStep, SecondMoment


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublicPreconditioner(DividingByMoment):
    r"""``D = sqrt(v) + eps`` with v the second moment of gradients of public records.

    Formal guarantee: as without it, for D depends on public records and on the released weights alone.

    Args:
        refresh_every: steps between two public batches; >= 1.
        clipping_norm, learning_rate_ratio: those of `Dividing`.
        second_moment, eps, beta, factored: those of `DividingByMoment`.

    References:
        Li et al. (2022), arXiv:2202.05963, Algorithm 1.
    """

    refresh_every: int = 1
    eps: float = 1e-5
    name: ClassVar[str] = "adadps"
    listed: ClassVar[tuple[str, ...]] = (
        "refresh_every", "second_moment", "eps", "beta", "clipping_norm", "learning_rate_ratio", "factored",
    )  # fmt: skip
    needs_public_records: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("refresh_every", self.refresh_every)
        check_real("eps", self.eps, "a finite number > 0, in gradient units")
        super().__post_init__()

    def sensitivity_ratio(self, noise_stddev: float, expected_batch_size: int) -> float:
        return 1.0

    def changes(self, clipping_norm: float) -> ScaleChanges:
        return ScaleChanges((self.refresh_every,), (self.factor(clipping_norm),))


class PublicPreconditioning(Preconditioning):
    """`PublicPreconditioner` at work."""

    _spec: PublicPreconditioner
    _public: PublicSource

    def __init__(self, spec: PublicPreconditioner, parameters: Mapping[str, torch.Tensor], *of_run: Any):
        super().__init__(spec, parameters, *of_run)
        if self._public is None:
            raise DPConfigError(
                "preconditioner='adadps' takes its scale from public records. Pass public_dataset to the trainer (or "
                "public=PublicGradients(..) to start); without public records use 'dp2_rmsprop'."
            )
        self._moment = SecondMoment(parameters, spec)
        self._t = 0  # steps done
        self._refreshed_at = -1
        self._step: ScaledStep | None = None

    @property
    def gain(self) -> float | None:
        return (self._step or self._make_step()).gain

    def _make_step(self) -> ScaledStep:
        return self._spec.step(self._moment.inverse(self._spec.eps), self._clipping_norm)

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


PublicPreconditioner.at_work = PublicPreconditioning
