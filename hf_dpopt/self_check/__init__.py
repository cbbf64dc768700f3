"""Self-check before the first step: is the clipped sum of this model, in this environment, that of a naive loop?

Runs in training mode, on made-up records of the shape the collator produces. Catches layers that the capture does not
cover, losses and models in which records influence each other or share random numbers, layouts that are not
batch-first, padding that leaks, upstream changes.
"""

from __future__ import annotations

from hf_dpopt.self_check.comparisons import check_influence
from hf_dpopt.self_check.made_up import Columns, Look
from hf_dpopt.self_check.made_up_checks import longest_record, self_check

__all__ = [
    "Columns",
    "Look",
    "check_influence",
    "longest_record",
    "self_check",
]
