"""The optimizer behind the tunings."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.optimize import minimize


def descend(
    loss: Callable[[np.ndarray], tuple[float, np.ndarray]],
    start: np.ndarray,
    *,
    bounds: tuple[float, float | None] | None = None,
    **options: float,
) -> np.ndarray:
    """Where L-BFGS ends; `loss` returns value and gradient, `bounds` hold for every variable."""
    options = {"maxiter": 3000, "maxfun": 6000, "ftol": 1e-13, "gtol": 1e-9, **options}
    every = None if bounds is None else [bounds] * len(start)
    return minimize(loss, start, jac=True, method="L-BFGS-B", bounds=every, options=options).x
