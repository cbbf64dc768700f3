"""A linear head on frozen features, of which only the final weights leave: privacy loss that stops growing.

Altschuler and Talwar (2022), arXiv:2205.13710. Nothing in here touches the epsilon of a finetuning run.
"""

from __future__ import annotations

from hf_dpopt.convex.features import attach_head, clip_features, compute_features, find_head, head_takes_bias
from hf_dpopt.convex.head_arguments import HeadTrainingArguments, check_convex_arguments
from hf_dpopt.convex.head_plan import MAX_NOISE_RADII, HeadConfig, HeadPlan, make_head_plan
from hf_dpopt.convex.head_training import HeadRun, recorded_head_plan
from hf_dpopt.convex.subspace_plan import SubspaceHeadConfig, SubspaceHeadPlan, make_subspace_plan

__all__ = [
    "MAX_NOISE_RADII",
    "HeadConfig",
    "HeadPlan",
    "HeadRun",
    "HeadTrainingArguments",
    "SubspaceHeadConfig",
    "SubspaceHeadPlan",
    "attach_head",
    "check_convex_arguments",
    "clip_features",
    "compute_features",
    "find_head",
    "head_takes_bias",
    "make_head_plan",
    "make_subspace_plan",
    "recorded_head_plan",
]
