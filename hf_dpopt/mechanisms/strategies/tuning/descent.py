"""The optimizer behind the tunings."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.optimize import minimize


def descend(
    loss: Callable[[np.ndarray], tuple[float, np.ndarray]],
    start: np.ndarray,
    *,
    bound: float | None = None,
    **options: float,
) -> np.ndarray:
    """Where L-BFGS ends; `loss` returns value and gradient."""
    options = {"maxiter": 3000, "maxfun": 6000, "ftol": 1e-13, "gtol": 1e-9, **options}
    bounds = None if bound is None else [(-bound, bound)] * len(start)
    return minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options).x
