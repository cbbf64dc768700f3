"""What every preconditioner offers, and the one that does nothing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch

from hf_dpopt.clipping.engine import ClippingEngine
from hf_dpopt.clipping.scaling import Scale
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.postprocess import Gradients, NoiseLevel


class PublicSource(Protocol):
    """Gradients of public records at the current weights."""

    def mean(self) -> Gradients:
        """Parameter name -> gradient of the mean loss of the next public batch; the same bits on every rank."""

    def state_dict(self) -> dict[str, Any]:
        """Where it is in the public records."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from there."""


class Preconditioning(Protocol):
    """A preconditioner at work in one run. All it keeps was released or public, so it may be stored."""

    @property
    def gain(self) -> float | None:
        """What `receive` multiplies the latest release by; None if that is not one number for all coordinates."""

    def engine(self, engine: ClippingEngine) -> ClippingEngine:
        """The clipping engine of the run: the given one, or one that clips in the coordinates of a subspace."""

    def scales(self) -> tuple[Scale | None, ...]:
        """What the records of the next step are multiplied by before the clip, for each query of the step."""

    def receive(self, released: Sequence[Gradients]) -> Gradients:
        """Takes the released means of the step, one for each query, and gives what the optimizer is to see."""

    def state_dict(self) -> dict[str, Any]:
        """All that the next steps need, for a checkpoint."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where the state was taken, bit for bit."""


class Preclip(Protocol):
    """Public description of a preconditioner: a frozen dataclass, checked at construction."""

    name: ClassVar[str]

    @property
    def num_queries(self) -> int:
        """Clipped sums that a step releases; one record moves all of them together by ``sqrt(num_queries) C``."""

    @property
    def changes_every(self) -> int | None:
        """Steps after which the coordinates may change, where correlated noise has to start anew; None for never."""

    def parameters(self) -> dict[str, Any] | None:
        """Name and options; JSON-able. None for no division at all."""

    def check_steps(self, num_steps: int) -> None:
        """Refuses a run in which it would never act."""

    def start(
        self,
        parameters: Mapping[str, torch.Tensor],
        *,
        clipping_norm: float,
        noise: NoiseLevel,
        public: PublicSource | None = None,
    ) -> Preconditioning:
        """The preconditioner of one run.

        Args:
            parameters: name -> trained parameter; for shapes and devices.
            clipping_norm: C of the clipping rule, to which every step is calibrated.
            noise: level of the noise in the released mean.
            public: gradients of public records, where they are needed.
        """


def sensitivity_ratio(spec: Preclip, noise_multiplier: float, expected_batch_size: int) -> float:
    """How far a unit moves all that a step sums, relative to how far it moves one clipped sum.

    Args:
        spec: with a method of that name, if it sums more than clipped gradients.
        noise_multiplier: stddev of the noise / bound on one unit.
        expected_batch_size: units.
    """
    own = getattr(spec, "sensitivity_ratio", None)
    return math.sqrt(spec.num_queries) if own is None else own(noise_multiplier, expected_batch_size)


class ActsAtOnce:
    """What has a part in every step, of runs of any length."""

    def check_steps(self, num_steps: int) -> None:
        pass


@dataclasses.dataclass(frozen=True)
class Identity(ActsAtOnce):
    """Records reach the clip as they are."""

    name: ClassVar[str] = "none"
    num_queries: ClassVar[int] = 1
    changes_every: ClassVar[int | None] = None

    def parameters(self) -> None:
        return None

    def start(self, parameters: Any = None, **unused: Any) -> _Nothing:
        return _Nothing()


class InPlace:
    """What clips with the engine that is there."""

    def engine(self, engine: ClippingEngine) -> ClippingEngine:
        return engine


class _Nothing(InPlace):
    gain = 1.0

    def scales(self) -> tuple[Scale | None, ...]:
        return (None,)

    def receive(self, released: Sequence[Gradients]) -> Gradients:
        return released[0]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_keys(state, set())


def check_keys(state: Mapping[str, Any], expected: set[str]) -> None:
    """Refuses the state of another preconditioner."""
    if set(state) != expected:
        raise DPConfigError(
            f"This state of a preconditioner has the entries {sorted(state)}, and {sorted(expected)} are expected: it "
            "belongs to another one. Resume with the options that the run began with."
        )


def multiply_(gradients: Gradients, factor: float) -> Gradients:
    """All tensors by one number, in place."""
    if factor != 1.0:
        torch._foreach_mul_(list(gradients.values()), factor)
    return gradients
