"""Self-check before the first step: is the clipped sum of this model, in this environment, that of a naive loop?

Runs in training mode, on made-up records of the shape the collator produces. Catches layers that the capture does not
cover, losses and models in which records influence each other or share random numbers, layouts that are not
batch-first, padding that leaks, upstream changes.
"""

from __future__ import annotations

from hf_dpopt.huggingface.self_check.checks import SelfCheck, self_check
from hf_dpopt.huggingface.self_check.influence import check_influence
from hf_dpopt.huggingface.self_check.longest import longest_record
from hf_dpopt.huggingface.self_check.made_up import Look, synthetic_batch

__all__ = ["Look", "SelfCheck", "check_influence", "longest_record", "self_check", "synthetic_batch"]
