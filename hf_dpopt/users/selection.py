"""Which of a user's rows take part: fresh coins of the user's own, each time."""

from __future__ import annotations

import numpy as np

from hf_dpopt.randomness.cipher import derive_key


def choose_rows(rows: np.ndarray, limit: int, key: bytes, *labels: str) -> np.ndarray:
    """At most `limit` of the rows of one user, each set of that size equally likely.

    A function of its arguments alone: other users, ranks and the point where a run was resumed do not matter. No
    amplification rests on it.

    Args:
        rows: of the user, at least one.
        limit: >= 1.
        key: 32 secret bytes.
        *labels: what the draw is for: step and user.

    Returns:
        In ascending order.
    """
    if len(rows) <= limit:
        return rows
    seed = int.from_bytes(derive_key(key, "rows of a user", *labels), "little")
    chosen = np.random.Generator(np.random.PCG64(seed)).choice(len(rows), limit, replace=False, shuffle=False)
    return rows[np.sort(chosen)]
