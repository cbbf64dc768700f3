"""Training in the subspace of public gradients: clipped and noised there, or projected after the noise."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from hf_dpopt.clipping.engine import ClippingEngine
from hf_dpopt.clipping.scaling import Scale
from hf_dpopt.common.checks import check_choice, check_count, check_real
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.types import Released
from hf_dpopt.postprocess.subspace_adagrad import ProjectedGradient, SubspaceAdaGrad
from hf_dpopt.preclip import PRECLIPS
from hf_dpopt.preclip.preconditioner import Preclip, Preconditioning, ScaleChanges
from hf_dpopt.preclip.projected import ProjectingEngine
from hf_dpopt.public.public_gradients import PublicGradients
from hf_dpopt.public.subspace import RefreshedSubspace


@dataclasses.dataclass(frozen=True, kw_only=True)
class PublicSubspaceProjection(Preclip):
    r"""``V V^T`` with V the top singular vectors of public gradients, and AdaGrad with a full matrix in between.

    Formal guarantee: as without it, for V depends on public records and released weights alone. Before the clip, a
    record is its k coordinates ``V^T g_b``: those are clipped, summed and noised, in k dimensions instead of all.

    Args:
        rank: k; >= 1. V takes k copies of the trained parameters.
        num_public: public records of a refresh, >= k; None for twice the rank.
        refresh_every: steps between two of them.
        project: "before_clip" (more signal per unit of sensitivity) or "after_noise" (the papers' order).
        adagrad: "none" for the projection alone, or "released" for `SubspaceAdaGrad`.
        eps: number added to AdaGrad's root; gradient units.

    Raises:
        DPConfigError: for values out of range, and ``adagrad="goe"``, which keeps un-noised state.

    References:
        Kairouz et al. (2021), arXiv:2008.06570; Zhou, Wu and Banerjee (2021), arXiv:2007.03813.
    """

    rank: int = 16
    num_public: int | None = None
    refresh_every: int = 20
    project: str = "before_clip"
    adagrad: str = "none"
    eps: float = 1e-8
    name: ClassVar[str] = "subspace"
    needs_public_records: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("rank", self.rank)
        check_count("refresh_every", self.refresh_every)
        if self.num_public is not None:
            check_count("num_public", self.num_public)
            if self.num_public < self.rank:
                raise DPConfigError(
                    f"rank={self.rank} is more than num_public={self.num_public}: m gradients span m directions at "
                    "most. Use num_public >= rank (two to five times the rank is usual), or a smaller rank."
                )
        check_choice("project", self.project, ("before_clip", "after_noise"))
        if self.adagrad not in ("none", "released"):
            raise DPConfigError(
                f"adagrad={self.adagrad!r} cannot be used here. Use 'none' or 'released'; 'goe' is made of un-noised "
                "gradients and costs budget of its own: hf_dpopt.experimental.goe.GoePreconditioner, in your own loop."
            )
        check_real("eps", self.eps, "a number >= 0")

    @property
    def num_public_records(self) -> int:
        """Public records of a refresh."""
        return self.num_public or 2 * self.rank

    @property
    def keeps_one_noise_level(self) -> bool:
        return False

    def changes(self, clipping_norm: float) -> ScaleChanges | None:
        if self.project == "after_noise":  # the noise is in the coordinates of the parameters
            return None
        return ScaleChanges((self.refresh_every,), (1.0,), is_taken_back=False)

    def sensitivity_ratio(self, noise_stddev: float, expected_batch_size: int) -> float:
        return 1.0


class SubspaceProjection(Preconditioning):
    """`PublicSubspaceProjection` at work. The noise lies in the subspace: no one gain, for coordinates differ."""

    _spec: PublicSubspaceProjection

    def __init__(self, spec: PublicSubspaceProjection, *of_run: Any):
        super().__init__(spec, *of_run)
        if not isinstance(self._public, PublicGradients):
            raise DPConfigError(
                "preconditioner='subspace' takes its directions from public records. Pass public_dataset to the "
                "trainer, or public=PublicGradients(..) to start."
            )
        subspace = RefreshedSubspace(
            self._public, rank=spec.rank, num_public=spec.num_public_records, refresh_every=spec.refresh_every
        )
        self._projected = ProjectedGradient(subspace)
        if spec.adagrad == "released":
            self._projected = SubspaceAdaGrad(subspace, self._noise, eps=spec.eps)

    def engine(self, engine: ClippingEngine) -> ClippingEngine:
        if self._spec.project == "after_noise":
            return engine
        return ProjectingEngine(engine.model, engine.clipping, self._projected.subspace)

    def scales(self) -> tuple[Scale | None, ...]:
        return (None,)

    def receive(self, released: Released) -> Released:
        return self._projected(released)

    def state_dict(self) -> dict[str, Any]:
        return self._projected.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._projected.load_state_dict(state)


PublicSubspaceProjection.at_work = SubspaceProjection


PRECLIPS[PublicSubspaceProjection.name] = (PublicSubspaceProjection, {})
