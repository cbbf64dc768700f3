"""DP^2 in finetuning, against DP-SGD and DP-AdamW: rates of 10,000 phrases, 120 steps of 64, a delay of 10.

    python -m recipes.paper.dp2.lora --model MODEL_FOLDER --data FOLDER --output_dir docs/reproductions

Runs are kept in ``dp2_lora.jsonl``. FOLDER holds train.tsv and dev.tsv (sentence, label).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from recipes.paper.finetuning import OPTIONS, table
from recipes.paper.runs import experiment

COMMON = {
    "max_train_samples": 10_000, "expected_batch_size": 64, "per_device_train_batch_size": 64, "max_steps": 120,
    "lora_target_modules": ["query", "value"], "clipping_norm": 1.0, "noise_rng": "fast", "skip_self_check": True,
}  # fmt: skip


def candidates(optimizer: str, rates: Sequence[float], **settings: Any) -> list[dict[str, Any]]:
    return [{"optim": optimizer, "learning_rate": rate, **settings} for rate in rates]


def dp2(**options: float) -> dict[str, Any]:
    return {"preconditioner": "dp2_rmsprop", "preconditioner_kwargs": {"delay": 10, **options}}


METHODS = {
    "DP-SGD": candidates("sgd", (0.1, 0.3, 1.0, 3.0)),
    "DP-AdamW": candidates("adamw_torch", (1e-3, 3e-3, 1e-2, 3e-2)),
    "DP2-RMSProp": [
        one for ratio in (0.03, 0.1, 0.3, 1.0) for one in candidates("sgd", [1.0], **dp2(learning_rate_ratio=ratio))
    ],
    "DP2-RMSProp, AdamW on top": candidates("adamw_torch", (1e-3, 3e-3, 1e-2), **dp2()),
}


def compute(given: argparse.Namespace) -> dict[str, Any]:
    return {"table": table(given, "dp2_lora.jsonl", METHODS, COMMON)}


main = experiment("dp2_lora", compute, **OPTIONS)

if __name__ == "__main__":
    main()
