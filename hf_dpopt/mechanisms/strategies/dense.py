"""Any lower-triangular C, and strategies that start anew after a number of steps."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any, ClassVar

import numpy as np
from scipy.linalg import block_diag, solve_triangular

from hf_dpopt.config import check_count
from hf_dpopt.errors import DPConfigError
from hf_dpopt.mechanisms.strategies import sensitivity
from hf_dpopt.mechanisms.strategies.base import NoiseStrategy
from hf_dpopt.mechanisms.strategies.participation import Participation


class DenseStrategy(NoiseStrategy):
    """A given matrix; for research, and for runs of up to about 2,000 steps.

    Args:
        matrix: C, (n, n), lower-triangular with a positive diagonal; copied.

    Raises:
        DPConfigError: if it is not of that form.

    References:
        Denisov et al. (2022), arXiv:2202.08312; Choquette-Choo et al. (2023), arXiv:2306.08153.
    """

    name: ClassVar[str] = "dense"
    anytime: ClassVar[bool] = False

    def __init__(self, matrix: np.ndarray):
        matrix = np.array(matrix, dtype=float) + 0.0  # -0.0 and 0.0 are one strategy
        is_square = matrix.ndim == 2 and matrix.shape[0] == matrix.shape[1] > 0
        if not is_square or not np.isfinite(matrix).all() or np.triu(matrix, 1).any() or (np.diag(matrix) <= 0).any():
            raise DPConfigError(
                "a strategy matrix is square and lower-triangular, finite, with a positive diagonal; one of shape "
                f"{matrix.shape}, is not. Rotate others first: C' with C'^T C' = C^T C has the same privacy."
            )
        matrix.setflags(write=False)
        self._matrix = matrix
        lower = np.nonzero(np.abs(np.tril(matrix, -1)).max(axis=1, initial=0.0))[0]
        self._bands = 1 + max((int(i - np.nonzero(matrix[i])[0][0]) for i in lower), default=0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DenseStrategy) and self.digest() == other.digest()

    def __hash__(self) -> int:
        return hash(self.digest())

    @property
    def num_bands(self) -> int | None:
        return self._bands

    @property
    def num_steps(self) -> int:
        """The only number of steps it is for, or fewer."""
        return len(self._matrix)

    def strategy_matrix(self, n: int) -> np.ndarray:
        if n > self.num_steps:
            raise DPConfigError(f"this strategy is for {self.num_steps} steps, not {n}. Make one for {n} steps.")
        return self._matrix[:n, :n]

    def noising_matrix(self, n: int) -> np.ndarray:
        return solve_triangular(self.strategy_matrix(n), np.eye(n), lower=True)

    def sensitivity(self, n: int, participation: Participation) -> float:
        matrix = self.strategy_matrix(n)
        if participation.fits(n) == 1 or (self._bands <= participation.min_sep and participation.kind == "min_sep"):
            return sensitivity.banded_sensitivity(np.linalg.norm(matrix, axis=0), participation)
        return sensitivity.gram_sensitivity(matrix.T @ matrix, participation)

    def parameters(self) -> dict[str, Any]:
        entries = hashlib.sha256(self._matrix.tobytes()).hexdigest()
        return {"name": self.name, "num_steps": self.num_steps, "sha256": entries}


@dataclasses.dataclass(frozen=True)
class Stamped(NoiseStrategy):
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

    def strategy_matrix(self, n: int) -> np.ndarray:
        return block_diag(*[self.base.strategy_matrix(length) for length in self._lengths(n)])

    def noising_matrix(self, n: int) -> np.ndarray:
        return block_diag(*[self.base.noising_matrix(length) for length in self._lengths(n)])

    def sensitivity(self, n: int, participation: Participation) -> float:
        """The worst split of the participations over the copies; exact if a copy is no longer than the separation."""
        best = np.zeros(participation.max_participations + 1)  # squares, by participations used so far
        for length in self._lengths(n):
            worst = [0.0] + [
                self.base.sensitivity(length, dataclasses.replace(participation, max_participations=k)) ** 2
                for k in range(1, participation.fits(length) + 1)
            ]
            best = np.array(
                [max(best[j - k] + worst[k] for k in range(min(j, len(worst) - 1) + 1)) for j in range(len(best))]
            )
        return float(np.sqrt(best[-1]))

    def parameters(self) -> dict[str, Any]:
        return {"name": self.name, "base": self.base.parameters(), "repeats": self.repeats}
