"""Runs of both kinds of head: by projected SGD, and by AdaGrad in a public subspace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hf_dpopt.convex import (
    HeadConfig,
    HeadRun,
    SubspaceHeadConfig,
    clip_features,
    make_head_plan,
    make_subspace_plan,
    recorded_head_plan,
)

N, M, H, K = 300, 20, 6, 3  # records, public records, features, labels


def plain(**changes: Any) -> HeadConfig:
    values = dict(head_radius=1.5, feature_norm=2.0, expected_batch_size=60, num_steps=40, noise_multiplier=1.0)
    return HeadConfig(**{**values, "target_delta": 1e-5, **changes})


def in_subspace(**changes: Any) -> SubspaceHeadConfig:
    values = dict(head_radius=1.5, feature_norm=2.0, expected_batch_size=N, num_steps=12, noise_multiplier=4.0)
    values |= dict(rank=4, refresh_every=5, eps=1e-3, target_delta=1e-5)
    return SubspaceHeadConfig(**{**values, **changes})


def data(num: int = N, seed: int = 0, width: int = H) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(num, width, generator=rng) * 3, torch.randint(K, (num,), generator=rng)


def clipped(asked: HeadConfig, num: int = N, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    raw, labels = data(num, seed)
    return clip_features(raw, asked.feature_norm, asked.bias_feature), labels


def begin(folder: Path, asked: HeadConfig) -> HeadRun:
    make = make_subspace_plan if isinstance(asked, SubspaceHeadConfig) else make_head_plan
    plan = make(asked, num_examples=N, recorded=recorded_head_plan(folder / "out", folder / "private"))
    return HeadRun(plan, output_dir=folder / "out", private_state_dir=folder / "private")


def run(
    folder: Path, asked: HeadConfig, *, private: Any = None, public: Any = None, finish: bool = True
) -> tuple[HeadRun, torch.Tensor]:
    more = {"public": public or clipped(asked, M, seed=7)} if isinstance(asked, SubspaceHeadConfig) else {}
    made = begin(folder, asked)
    weights = made.train(*(private or clipped(asked)), K, **more)
    if finish:
        made.finish(K)
    return made, weights
