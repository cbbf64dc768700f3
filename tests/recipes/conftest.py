"""A model for the recipes of language models."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from recipes.embedded.build import make_gpt2_tokenizer
from tests.recipes.texts import DOCUMENTS, PAIRS, POSITIONS


@pytest.fixture(scope="session")
def gpt2_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A two-layer GPT-2 in half precision, as some models are stored."""
    folder = tmp_path_factory.mktemp("gpt2")
    tokenizer = make_gpt2_tokenizer([text for pair in PAIRS for text in pair] + DOCUMENTS)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=POSITIONS, n_embd=16, n_layer=2, n_head=2, initializer_range=0.3,  # texts differ
        bos_token_id=0, eos_token_id=0, pad_token_id=None,
    )  # fmt: skip
    GPT2LMHeadModel(config).half().save_pretrained(folder)
    return str(folder)
