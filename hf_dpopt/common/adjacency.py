"""Adjacency: which datasets count as neighbours, and what that does to a sum of bounded vectors."""

from __future__ import annotations

from typing import Literal

Adjacency = Literal["add_or_remove_one", "zero_out", "replace_one"]

SENSITIVITY_FACTOR: dict[str, float] = {"add_or_remove_one": 1.0, "zero_out": 1.0, "replace_one": 2.0}
"""L2 change of a sum of vectors of norm <= 1 between adjacent datasets."""
