"""What every refusal starts from: a tiny model, its records, and what its ledger has charged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as tf
from torch import nn

from hf_dpopt.run.ledger import LEDGER, Ledger
from tests.helpers import tiny

NUM_RECORDS, NUM_TOKENS = 24, 6


def small(kind: type, **changes: Any) -> nn.Module:
    """A tiny model with few positions."""
    return tiny.made(kind, **{"max_position_embeddings": 16, **changes})


def bert() -> nn.Module:
    return small(tf.BertForSequenceClassification)


def records(num_records: int = NUM_RECORDS) -> list[dict[str, Any]]:
    return [
        {
            "input_ids": torch.randint(1, tiny.VOCABULARY, (NUM_TOKENS,)).tolist(),
            "attention_mask": [1] * NUM_TOKENS,
            "labels": i % 2,
        }
        for i in range(num_records)
    ]


def num_charged(output_dir: Path) -> int:
    path = output_dir / LEDGER
    return Ledger.read(path).num_charged if path.exists() else 0
