"""Protocols of what the accounting asks of noise: its matrices as numpy arrays, so that it needs no tensor library."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Protocol

import numpy as np


class StrategyMatrices(Hashable, Protocol):
    """The strategy matrix C of correlated noise; n = optimizer steps."""

    @property
    def anytime(self) -> bool:
        """Whether the first t steps of a longer run are the run of t steps."""

    @property
    def name(self) -> str:
        """Name of the strategy, for messages."""

    def strategy_matrix(self, n: int) -> np.ndarray:
        """C for n steps, (n, n) lower-triangular; (nodes, n) for a tree."""

    def toeplitz_coefs(self, n: int) -> np.ndarray | None:
        """First column of C, (n,), if C is Toeplitz; None if it is not."""

    def parameters(self) -> dict[str, Any]:
        """Name and every number that fixes C; JSON-able."""
