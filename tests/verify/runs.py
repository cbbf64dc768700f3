"""Tiny runs of different mechanisms, whose public files stay in `tests/verify/reports` for `hf-dpopt verify`.

`python -m tests.verify` writes those that are not there. The records are made up.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import peft
import torch

from hf_dpopt.convex.features import clip_features
from hf_dpopt.convex.head_plan import HeadConfig, make_head_plan
from hf_dpopt.convex.head_training import HeadRun
from tests.helpers import tiny

REPORTS = Path(__file__).with_name("reports")
SHAPE = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "max_position_embeddings": 16}

OPTIONS: dict[str, dict[str, Any]] = {
    "independent": {"target_epsilon": 8.0, "noise_multiplier": None},
    "nu_dpftrl": {
        "noise_mechanism": "nu_dpftrl", "noise_kwargs": {"num_buffers": None, "nu": 0.1}, "max_steps": 10,
        "adjacency": "zero_out", "noise_multiplier": 2.0,
    },
    "blt_in_bins": {
        "noise_mechanism": "blt", "noise_kwargs": {"num_buffers": 2}, "sampling": "balls_in_bins", "max_steps": 8,
        "noise_multiplier": 1.5,
    },
    "bins": {"sampling": "balls_in_bins", "max_steps": 8, "noise_multiplier": 1.0},
    "banded": {"noise_mechanism": "banded", "noise_kwargs": {"num_bands": 2}, "max_steps": 8},
    "tree": {
        "noise_mechanism": "honaker", "noise_kwargs": {}, "adjacency": "replace_one", "max_steps": 9,
        "noise_restart_every": 6, "noise_multiplier": 3.0,
    },
    "dp2": {"preconditioner": "dp2_rmsprop", "preconditioner_kwargs": {"delay": 2}},
    "one_query": {"preconditioner": "one_query", "preconditioner_kwargs": {"query_noise": 2.0}},
    "quantile": {"preconditioner": "quantile", "preconditioner_kwargs": {"count_noise": 0.1}},
    "users": {"privacy_unit": "user", "user_id_column": "author", "records_per_user": 2, "expected_batch_size": 4},
    "records_of_users": {
        "privacy_unit": "user", "user_id_column": "author", "records_per_user": 2, "expected_batch_size": 4,
        "sampling": "capped_poisson",
    },
    "lora": {},
    "resumed": {"max_steps": 6, "save_strategy": "steps", "save_steps": 2},
}  # fmt: skip


def make(name: str, folder: Path) -> None:
    """A run of that name, in ``folder/out``."""
    if name == "head":
        return _head(folder)
    options = dict(OPTIONS[name])
    if "save_strategy" not in options:
        options.setdefault("max_steps", 4)
    model = tiny.model(dropout=0.0, **SHAPE)
    if name == "lora":
        torch.manual_seed(1)
        model = peft.get_peft_model(
            model, peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"])
        )
    rows = [row | {"author": f"user {i % 11}"} for i, row in enumerate(tiny.records())]

    def trainer() -> Any:
        return tiny.trainer(
            folder / "out", model=model, train_dataset=rows, private_state_dir=str(folder / "private"), optim="sgd",
            **options,
        )  # fmt: skip

    made = trainer()
    made.train()
    if name == "resumed":  # from an older checkpoint: a second chain, and both are charged
        made = trainer()
        made.train(resume_from_checkpoint=str(folder / "out/checkpoint-2"))
    made.save_model()


def _head(folder: Path) -> None:
    torch.manual_seed(0)
    features, labels = torch.randn(400, 6), torch.randint(0, 3, (400,))
    config = HeadConfig(
        head_radius=1.0, feature_norm=2.0, expected_batch_size=40, num_steps=6000, noise_multiplier=2.0,
        target_delta=1e-3,
    )  # fmt: skip
    plan = make_head_plan(config, num_examples=len(features))
    run = HeadRun(plan, output_dir=folder / "out", private_state_dir=folder / "private")
    run.train(clip_features(features, 2.0, plan.config.bias_feature), labels, 3)
    run.finish(3)


RUNS: tuple[str, ...] = (*OPTIONS, "head")
RELEASED = ("adapter_model.safetensors", "adapter_config.json")  # small enough to be kept


def keep(out: Path, target: Path) -> None:
    """Copy what `verify` reads."""
    shutil.copytree(out / "privacy", target / "privacy", ignore=shutil.ignore_patterns("*.lock"))
    for file in RELEASED:
        if (out / file).is_file():
            shutil.copyfile(out / file, target / file)
