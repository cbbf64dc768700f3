"""Base classes of the preconditioners, and the one that does nothing."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from hf_dpopt.clipping.clipped_sum import ClippedSum
from hf_dpopt.clipping.engine import ClippingEngine
from hf_dpopt.clipping.scaling import Scale
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.sharding import local_of
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

    @property
    def local_training(self) -> Mapping[str, Any] | None: ...


class Preconditioning(abc.ABC):
    """A preconditioner at work in one run. All it keeps was released or public, so it may be stored.

    Args:
        spec: its public description.
        parameters, clipping_norm, noise, public: those of `Preclip.start`.
    """

    _spec: Any
    _noise: Any

    def __init__(
        self,
        spec: Preclip,
        parameters: Mapping[str, torch.Tensor],
        clipping_norm: float,
        noise: NoiseLevel | None,
        public: PublicSource | None,
    ):
        self._spec, self._clipping_norm, self._noise, self._public = spec, clipping_norm, noise, public
        self._devices = {name: p.device for name, p in parameters.items()}

    @property
    def gain(self) -> float | None:
        """Factor of the latest release in `receive`; None if that is not one number for all coordinates."""
        return None

    @property
    def awaits_opening(self) -> bool:
        """Whether the opening query of its spec has to be asked before the next step."""
        return False

    def receive_opening(self, released: Released) -> None:
        """Take the answer to the opening query: means over all units."""
        raise AssertionError(f"{type(self).__name__} asks nothing")

    def pass_over_opening(self) -> None:
        """Go on without the answer to the opening query, which was charged and lost."""
        raise AssertionError(f"{type(self).__name__} asks nothing")

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

    def pass_over(self) -> None:
        """Go past a step whose release was lost, after `scales`: it is done, and nothing was received."""
        return None

    @abc.abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """All that the next steps need, for a checkpoint."""

    @abc.abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the state was taken, bit for bit."""


class OpeningQuery(abc.ABC):
    """A query over all units at the initial weights, asked once in every chain of a run, before its first step.

    Attributes:
        noise_multiplier: stddev of its noise / its sensitivity between adjacent datasets; unitless, > 0.
    """

    noise_multiplier: float

    @abc.abstractmethod
    def sensitivity(self, clipping_norm: float) -> float:
        """Largest L2 norm of what one unit adds to the sum; C is the clipping norm of the rule."""

    @abc.abstractmethod
    def empty_sum(self, parameters: Mapping[str, torch.Tensor]) -> ClippedSum:
        """A sum to which an engine adds the units."""


@dataclasses.dataclass(frozen=True)
class ScaleChanges:
    """Changes of the coordinates of the clip, and what becomes of noise that was added before.

    Args:
        lengths: steps of each kind of phase; the kinds take turns. One length where the kind stays and its scale alone
            is made anew.
        factors: what a release is multiplied by in each kind of phase, unitless.
        is_taken_back: whether the weights see the noise in the same coordinates before and after a change, so that
            what one step added is taken back in the next. Not so where a scale that nobody knows yet comes behind the
            noise: a projection, or a division of what was released.
    """

    lengths: tuple[int, ...]
    factors: tuple[float, ...]
    is_taken_back: bool = True

    @property
    def every(self) -> int:
        """Steps after which the coordinates may change."""
        return math.gcd(*self.lengths)

    @property
    def is_seen(self) -> bool:
        """Whether the error of the iterates is another one than with one scale for all steps."""
        return not self.is_taken_back or len(set(self.factors)) > 1

    def factor_of_steps(self, n: int) -> np.ndarray:
        """Factor of the release of each of n steps, (n,)."""
        return np.resize(np.repeat(np.asarray(self.factors, dtype=float), self.lengths), n)


class Preclip(abc.ABC):
    """Public description of a preconditioner: a frozen dataclass, checked at construction.

    `sensitivity_ratio` has no default: a preconditioner that left it out would be accounted for as another one.
    """

    name: ClassVar[str]
    needs_public_records: ClassVar[bool] = False  # it learns from public_dataset
    is_scaling: ClassVar[bool] = True  # records reach the clip in other coordinates than their own
    needs_start: ClassVar[bool] = True  # it learns from the model, so a run has to be told to start it
    at_work: ClassVar[type[Preconditioning]]
    listed: ClassVar[tuple[str, ...]] = ()  # order in which a statement lists the options; () has its own ones first

    @abc.abstractmethod
    def sensitivity_ratio(self, noise_stddev: float, expected_batch_size: int) -> float:
        """Distance by which a unit moves all that a step sums, relative to how far it moves one clipped sum.

        1.0 for one sum of clipped gradients, ``sqrt(num_queries)`` for several, more if anything else is counted.

        Args:
            noise_stddev: stddev of the draws, of which the noise of all steps is made, / bound on what one unit moves.
            expected_batch_size: units.

        Raises:
            DPConfigError: if what is counted beside the gradients would take the whole budget.
        """

    def parameters(self) -> dict[str, Any] | None:
        """Name and options; JSON-able. None for no division at all."""
        return {"name": self.name} | {name: getattr(self, name) for name in option_names(type(self))}

    def start(
        self,
        parameters: Mapping[str, torch.Tensor],
        *,
        clipping_norm: float,
        noise: NoiseLevel | None = None,
        public: PublicSource | None = None,
    ) -> Preconditioning:
        """The preconditioner of one run.

        Args:
            parameters: name -> trained parameter; for shapes and devices.
            clipping_norm: C of the clipping rule, to which every step is calibrated.
            noise: level of the noise in the released mean, for those that ask for it.
            public: gradients of public records, likewise.
        """
        return self.at_work(self, parameters, clipping_norm, noise, public)

    @property
    def num_queries(self) -> int:
        """Clipped sums that a step releases; a step that asks for another number is refused."""
        return 1

    @property
    def opening(self) -> OpeningQuery | None:
        """Query that it is made of, asked before the first step; None for none. It is paid for beside the steps."""
        return None

    def changes(self, clipping_norm: float) -> ScaleChanges | None:
        """Changes of the coordinates of the clip in the course of a run; None for none.

        Args:
            clipping_norm: C of the clipping rule.
        """
        return None

    @property
    def num_public_records(self) -> int | None:
        """Public records of one draw; None if it takes as many as public_batch_size says, or none."""
        return None

    @property
    def keeps_one_noise_level(self) -> bool:
        """Whether the noise that it leaves is of one level in all coordinates, for optimizers that correct for it."""
        return True

    @classmethod
    def defaults(cls, num_steps: int, options: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults that follow from the planned steps, beside the `options` of the user; none by default."""
        return {}

    def check_steps(self, num_steps: int) -> None:
        """Refuse a run in which it would never act; it acts at once, unless it says otherwise."""
        return None

    def check_config(self, config: RunOptions) -> None:
        """Refuse the options of a run that it was not proven for; it goes with all, unless it says otherwise."""
        return None


def option_names(cls: Any) -> list[str]:
    """Names of the options of a preconditioner, in the order in which they are listed."""
    names = [field.name for field in dataclasses.fields(cls)]
    listed = cls.listed or sorted(names, key=lambda name: name not in cls.__annotations__)
    assert sorted(listed) == sorted(names), f"{cls.__name__}.listed leaves options out of ledgers"
    return list(listed)


@dataclasses.dataclass(frozen=True)
class Identity(Preclip):
    """Records reach the clip as they are."""

    name: ClassVar[str] = "none"
    needs_start: ClassVar[bool] = False
    is_scaling: ClassVar[bool] = False

    def sensitivity_ratio(self, noise_stddev: float, expected_batch_size: int) -> float:
        return 1.0

    def parameters(self) -> None:
        return None

    def start(self, parameters: Any = None, **unused: Any) -> _Nothing:
        return _Nothing()


class _Nothing(Preconditioning):
    def __init__(self) -> None:
        """It needs nothing of the run."""

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
        torch._foreach_mul_([local_of(g) for g in gradients.values()], factor)
    return gradients
