"""Strategies that start anew: no noise is shared across a restart."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar

import numpy as np
from scipy.linalg import block_diag

from hf_dpopt.common.checks import check_count
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise.participation import Participation
from hf_dpopt.noise.strategy import NoiseStrategy
from hf_dpopt.noise.tree import TreeAggregation


class _Blocks(NoiseStrategy):
    """A block-diagonal matrix of copies of one strategy."""

    base: NoiseStrategy

    @abc.abstractmethod
    def _lengths(self, n: int) -> list[int]:
        """Steps of every copy in a run of n steps."""

    def strategy_matrix(self, n: int) -> np.ndarray:
        return block_diag(*[self.base.strategy_matrix(length) for length in self._lengths(n)])

    def noising_matrix(self, n: int) -> np.ndarray:
        return block_diag(*[self.base.noising_matrix(length) for length in self._lengths(n)])

    def sensitivity(self, n: int, participation: Participation) -> float:
        """The worst split of the participations over the copies; exact if a copy is no longer than the separation."""
        best = np.zeros(participation.max_participations + 1)  # squares, by participations used so far
        for length in self._lengths(n):
            worst = self._squares(length, participation)
            best = np.array(
                [max(best[j - k] + worst[k] for k in range(min(j, len(worst) - 1) + 1)) for j in range(len(best))]
            )
        return float(np.sqrt(best[-1]))

    def _squares(self, length: int, participation: Participation) -> list[float]:
        """Squared sensitivity of a copy to 0, 1, .. participations."""
        several = range(1, participation.fits(length) + 1)
        return [0.0] + [
            self.base.sensitivity(length, dataclasses.replace(participation, max_participations=k)) ** 2
            for k in several
        ]


@dataclasses.dataclass(frozen=True)
class Stamped(_Blocks):
    """`repeats` copies of a strategy, one after the other: no noise is shared across the restarts.

    Args:
        base: any strategy.
        repeats: number of copies; a copy lasts ``ceil(n / repeats)`` steps.
    """

    base: NoiseStrategy
    repeats: int
    name: ClassVar[str] = "stamped"
    anytime: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_count("repeats", self.repeats)
        object.__setattr__(self, "repeats", int(self.repeats))

    def _lengths(self, n: int) -> list[int]:
        length = -(-n // self.repeats)
        return [min(length, n - first) for first in range(0, n, length)]

    def parameters(self) -> dict[str, Any]:
        return {"name": self.name, "base": self.base.parameters(), "repeats": self.repeats}


@dataclasses.dataclass(frozen=True)
class Restarted(_Blocks):
    """A copy of a strategy for every `every` steps: warm restarts, for any number of steps if the base is for any.

    Args:
        base: any strategy but a tree, which restarts by itself (``TreeAggregation(restart_every=..)``).
        every: steps of a copy, >= 1.

    Raises:
        DPConfigError: for a tree.
    """

    base: NoiseStrategy
    every: int
    name: ClassVar[str] = "restarted"

    def __post_init__(self) -> None:
        check_count("every", self.every)
        object.__setattr__(self, "every", int(self.every))
        if isinstance(self.base, TreeAggregation):
            raise DPConfigError("A tree restarts by itself: use TreeAggregation(restart_every=..).")

    @property
    def anytime(self) -> bool:  # type: ignore[override]
        return self.base.anytime

    @property
    def num_bands(self) -> int | None:
        return self.base.num_bands

    def _lengths(self, n: int) -> list[int]:
        return [min(self.every, n - first) for first in range(0, n, self.every)]

    def row_norm(self, t: int, num_steps: int | None = None) -> float:
        return self.base.row_norm(t % self.every, None if num_steps is None else min(num_steps, self.every))

    def noising_rows(self, first: int, end: int, num_steps: int | None = None) -> np.ndarray:
        length = None if num_steps is None else min(num_steps, self.every)
        blocks = []
        for start in range(first - first % self.every, end, self.every):
            here = max(first, start) - start, min(end - start, self.every)
            blocks.append(self.base.noising_rows(*here, length))
        return block_diag(*blocks)

    def parameters(self) -> dict[str, Any]:
        return {"name": self.name, "base": self.base.parameters(), "every": self.every}
