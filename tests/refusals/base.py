"""What every refusal starts from: a tiny model, its records, and what its ledger has charged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as tf
from torch import nn

from hf_dpopt.run.ledger import LEDGER, Ledger

NUM_RECORDS, NUM_TOKENS, VOCABULARY = 24, 6, 40
BERT = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 16, "max_position_embeddings": 16,
}  # fmt: skip
LIKE_LLAMA = {**BERT, "num_key_value_heads": 2}


def bert() -> nn.Module:
    return tf.BertForSequenceClassification(tf.BertConfig(**BERT))


def records(num_records: int = NUM_RECORDS) -> list[dict[str, Any]]:
    return [
        {
            "input_ids": torch.randint(1, VOCABULARY, (NUM_TOKENS,)).tolist(),
            "attention_mask": [1] * NUM_TOKENS,
            "labels": i % 2,
        }
        for i in range(num_records)
    ]


def num_charged(output_dir: Path) -> int:
    path = output_dir / LEDGER
    return Ledger.read(path).num_charged if path.exists() else 0
