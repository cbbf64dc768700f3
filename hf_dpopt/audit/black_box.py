"""Bounds from scores of canaries that somebody put into training data of their own: texts, and losses of the model.

How to go about it: draw texts like the data (or of random tokens), include each with probability 1/2, put those
into the training set, train, and score each text by how much its loss fell: loss of the model before - loss after.
`recipes/canaries.py` does it for the files of the recipes.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from hf_dpopt.audit.bounds import lower_bounds
from hf_dpopt.common.errors import DPConfigError

COLUMNS = ("score", "included")


def bound_scores(path: Path, *, delta: float, significance: float = 0.05) -> dict[str, float]:
    """Lower bounds on epsilon, by method, from a CSV file with the columns `score` and `included`.

    Args:
        path: one row for each canary: its score (larger for one that took part) and 1 if it was included, else 0.
        delta: failure probability of the claim.
        significance: probability with which a bound may be too high.

    Raises:
        DPConfigError: for a file without these columns, or values that are no numbers.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        values = np.array([[float(row[name]) for name in COLUMNS] for row in rows]).reshape(-1, 2)
    except (OSError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
        raise DPConfigError(
            f"{path} holds no scores ({type(error).__name__}: {error}). It is a CSV file with a line "
            "`score,included` and a line for each canary: a number, and 1 or 0."
        ) from error
    if not len(values):
        raise DPConfigError(f"{path} has no canary. Give a line for each: a score, and 1 or 0.")
    return lower_bounds(values[:, 0], values[:, 1], delta=delta, significance=significance)
