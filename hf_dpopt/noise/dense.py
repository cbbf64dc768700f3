"""Any lower-triangular C."""

from __future__ import annotations

import hashlib
from typing import Any, ClassVar

import numpy as np
from scipy.linalg import solve_triangular

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise import sensitivity
from hf_dpopt.noise.participation import Participation
from hf_dpopt.noise.strategy import NoiseStrategy


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
