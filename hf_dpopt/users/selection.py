"""Random choice of the rows with which a user takes part, fresh for every purpose."""

from __future__ import annotations

import numpy as np

from hf_dpopt.randomness.cipher import derive_key


def choose_rows(rows: np.ndarray, limit: int, key: bytes, *labels: str) -> np.ndarray:
    """Choose at most `limit` of the rows of one user, each set of that size equally likely.

    A function of its arguments alone: other users, ranks and the point of resumption do not matter. No amplification
    rests on it.

    Args:
        rows: rows of the user, at least one.
        limit: largest number of rows, >= 1.
        key: 32 secret bytes.
        *labels: purpose of the draw, such as step and user.

    Returns:
        The chosen rows, in ascending order.
    """
    if len(rows) <= limit:
        return rows
    seed = int.from_bytes(derive_key(key, "rows of a user", *labels), "little")
    chosen = np.random.Generator(np.random.PCG64(seed)).choice(len(rows), limit, replace=False, shuffle=False)
    return rows[np.sort(chosen)]
