"""Base classes of the preconditioners, and the one that does nothing."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import torch

from hf_dpopt.clipping.engine import ClippingEngine
from hf_dpopt.clipping.scaling import Scale
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.types import Gradients, Released
from hf_dpopt.postprocess import NoiseLevel


class PublicSource(Protocol):
    """Gradients of public records at the current weights."""

    def mean(self) -> Gradients:
        """Parameter name -> gradient of the mean loss of the next public batch; the same bits on every rank."""

    def state_dict(self) -> dict[str, Any]:
        """Place in the public records."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""


class RunOptions(Protocol):
    """The options of a run that a preconditioner may have to refuse; a `PrivacyConfig` has them."""

    @property
    def noise_mechanism(self) -> str: ...

    @property
    def clipping(self) -> str: ...

    @property
    def adjacency(self) -> str: ...


class Preconditioning(abc.ABC):
    """A preconditioner at work in one run. All it keeps was released or public, so it may be stored."""

    @property
    def gain(self) -> float | None:
        """Factor of the latest release in `receive`; None if that is not one number for all coordinates."""
        return None

    def engine(self, engine: ClippingEngine) -> ClippingEngine:
        """The clipping engine of the run: the given one, or one that clips in the coordinates of a subspace."""
        return engine

    @abc.abstractmethod
    def scales(self) -> tuple[Scale | None, ...]:
        """Scales of the records of the next step before the clip, one for each query of the step."""

    @abc.abstractmethod
    def receive(self, released: Released) -> Released:
        """Give what the optimizer is to see of a step.

        Args:
            released: mean of the step, the queries side by side: `hf_dpopt.preclip.queries.split` tells them apart.
        """

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """All that the next steps need, for a checkpoint."""

    @abc.abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the state was taken, bit for bit."""


class Preclip(abc.ABC):
    """Public description of a preconditioner: a frozen dataclass, checked at construction.

    `sensitivity_ratio` has no default: a preconditioner that left it out would be accounted for as another one.
    """

    name: ClassVar[str]
    needs_public_records: ClassVar[bool] = False  # it learns from public_dataset

    @abc.abstractmethod
    def sensitivity_ratio(self, noise_multiplier: float, expected_batch_size: int) -> float:
        """Distance by which a unit moves all that a step sums, relative to how far it moves one clipped sum.

        1.0 for one sum of clipped gradients, ``sqrt(num_queries)`` for several, more if anything else is counted.

        Args:
            noise_multiplier: stddev of the noise / bound on one unit.
            expected_batch_size: units.

        Raises:
            DPConfigError: if what is counted beside the gradients would take the whole budget.
        """

    @abc.abstractmethod
    def parameters(self) -> dict[str, Any] | None:
        """Name and options; JSON-able. None for no division at all."""

    @abc.abstractmethod
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

    @property
    def num_queries(self) -> int:
        """Clipped sums that a step releases; a step that asks for another number is refused."""
        return 1

    @property
    def changes_every(self) -> int | None:
        """Steps after which the coordinates may change, where correlated noise has to start anew; None for never."""
        return None

    @property
    def num_public_records(self) -> int | None:
        """Public records of one draw; None if it takes as many as public_batch_size says, or none."""
        return None

    @property
    def keeps_one_noise_level(self) -> bool:
        """Whether the noise that it leaves is of one level in all coordinates, for optimizers that correct for it."""
        return True

    @property
    def is_scaling(self) -> bool:
        """Whether records reach the clip in other coordinates than their own."""
        return True

    @property
    def needs_start(self) -> bool:
        """Whether a run has to be told to start it: it learns from the model, and keeps state from step to step."""
        return True

    def check_steps(self, num_steps: int) -> None:
        """Refuse a run in which it would never act; it acts at once, unless it says otherwise."""
        return None

    def check_config(self, config: RunOptions) -> None:
        """Refuse the options of a run that it was not proven for; it goes with all, unless it says otherwise."""
        return None


@dataclasses.dataclass(frozen=True)
class Identity(Preclip):
    """Records reach the clip as they are."""

    name: ClassVar[str] = "none"

    @property
    def needs_start(self) -> bool:
        return False

    @property
    def is_scaling(self) -> bool:
        return False

    def sensitivity_ratio(self, noise_multiplier: float, expected_batch_size: int) -> float:
        return 1.0

    def parameters(self) -> None:
        return None

    def start(self, parameters: Any = None, **unused: Any) -> _Nothing:
        return _Nothing()


class _Nothing(Preconditioning):
    @property
    def gain(self) -> float:
        return 1.0

    def scales(self) -> tuple[Scale | None, ...]:
        return (None,)

    def receive(self, released: Released) -> Released:
        return released

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_keys(state, set())


def check_keys(state: Mapping[str, Any], expected: set[str]) -> None:
    """Refuse the state of another preconditioner."""
    if set(state) != expected:
        raise DPConfigError(
            f"This state of a preconditioner has the entries {sorted(state)}, and {sorted(expected)} are expected: it "
            "belongs to another one. Resume with the options that the run began with."
        )


def multiply_(gradients: Released, factor: float) -> Released:
    """All tensors by one number, in place."""
    if factor != 1.0:
        torch._foreach_mul_(list(gradients.values()), factor)
    return gradients
