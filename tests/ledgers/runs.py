"""Tiny runs, stopped halfway, whose files stay in this folder: one of each format that a release writes.

`python -m tests.ledgers` writes those of the release it is run with, and never over those of another one. The records
are made up, so the keys that lie here protect nobody; a private run's never belong in a repository.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from hf_dpopt import DPTrainer
from tests import tiny

HERE = Path(__file__).parent
STOPPED, PLANNED = 2, 4

RUNS: dict[str, dict[str, Any]] = {
    "gaussian": {"target_epsilon": 8.0, "noise_multiplier": None},
    "banded": {
        "target_epsilon": 8.0, "noise_multiplier": None, "noise_mechanism": "banded", "noise_kwargs": {"num_bands": 2},
    },
    "users": {
        "privacy_unit": "user", "user_id_column": "author", "records_per_user": 2, "expected_batch_size": 4,
    },
    "preconditioner": {
        "preconditioner": "dp2_rmsprop", "preconditioner_kwargs": {"delay": 1}, "filter": "first_order_v1",
    },
    "labels": {"several_labels": True},
}  # fmt: skip


class _Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):  # type: ignore[no-untyped-def]
        control.should_training_stop = state.global_step >= STOPPED
        return control


def _collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    import torch

    batch = tiny.collate([{**row, "label": 0} for row in rows])
    return batch | {"labels": torch.tensor([row["label"] for row in rows])}


def trainer(name: str, folder: Path, *, stops: bool = False) -> DPTrainer:
    """The trainer of a run, in ``folder/out``, with its secrets in ``folder/private``."""
    options = dict(RUNS[name])
    rows = [row | {"author": f"user {i % 11}"} for i, row in enumerate(tiny.records())]
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "max_position_embeddings": 16}
    model = tiny.model(dropout=0.0, **shape)
    if options.pop("several_labels", False):
        rows = [row | {"label": [float(i % 2), 1.0, 0.0]} for i, row in enumerate(rows)]
        model = tiny.model(dropout=0.0, num_labels=3, problem_type="multi_label_classification", **shape)
        options["data_collator"] = _collate
    return tiny.trainer(
        folder / "out", model=model, train_dataset=rows, private_state_dir=str(folder / "private"),
        callbacks=[_Stop()] if stops else [], max_steps=PLANNED, save_strategy="steps", save_steps=1,
        save_total_limit=1, optim="sgd", **options,
    )  # fmt: skip
