"""Tiny models for the recipes, and a working folder with the files of a recipe."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    RobertaConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from recipes.embedded.build import make_gpt2_tokenizer, make_tokenizer
from recipes.table_schema import Schema
from tests.recipes.texts import DOCUMENTS, PAIRS, POSITIONS

SYNTHETIC = {  # flags of a tiny run of recipes/synthetic.py
    "target_epsilon": "8", "target_delta": "1e-3", "max_steps": "1", "expected_batch_size": "20", "use_peft": "true",
    "lora_r": "2", "lora_target_modules": "all-linear", "report_to": "none", "save_strategy": "no",
    "output_dir": "out", "private_state_dir": "keys", "use_cpu": "true", "eval_data_privacy": "public",
}  # fmt: skip
CITIES = ["Bonn", "Köln, Porz", "Ulm"]
SCHEMA: dict[str, dict[str, Any]] = {
    "age": {"type": "integer", "min": 20, "max": 29},
    "weight": {"type": "number", "min": 50, "max": 80, "optional": True},
    "city": {"type": "category", "values": CITIES},
    "sick": {"type": "category", "values": ["no", "yes"]},
}


def schema_of(described: dict[str, Any]) -> Schema:
    """A schema that was written and read."""
    Path("s.json").write_text(json.dumps(described))
    return Schema.of_file("s.json")


def as_words(flags: Mapping[str, str | None]) -> list[str]:
    """Flags as a command line has them; one that is None is left out."""
    return [word for name, value in flags.items() if value is not None for word in (f"--{name}", value)]


def refusal(status: int, capsys: pytest.CaptureFixture[str]) -> str:
    """The last line of a run of recipes/synthetic.py that was refused before anything was charged."""
    last = capsys.readouterr().err.rstrip().splitlines()[-1]  # progress of loading comes before it
    assert status == 2 and last.startswith("error: ")
    assert not list(Path().rglob("ledger*")) and not Path("people.json").exists() and not list(Path().glob("keys/*/*"))
    return last


def save_gpt2(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> str:
    """Save a GPT-2 with a tokenizer of the texts."""
    tokenizer = make_gpt2_tokenizer([text for pair in PAIRS for text in pair] + DOCUMENTS)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config: dict[str, Any] = dict(
        vocab_size=len(tokenizer), n_positions=POSITIONS, n_embd=16, n_layer=2, n_head=2, bos_token_id=0,
        eos_token_id=0, pad_token_id=None,
    )  # fmt: skip
    GPT2LMHeadModel(GPT2Config(**config | changes)).to(dtype).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def gpt2_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """In half precision, as some models are stored; with weights so large that its texts differ."""
    return save_gpt2(tmp_path_factory.mktemp("gpt2"), torch.float16, initializer_range=0.3)


@pytest.fixture(scope="session")
def t5_dir(gpt2_dir: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("t5") / "model")
    tokenizer = AutoTokenizer.from_pretrained(gpt2_dir)
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=len(tokenizer), d_model=64, d_ff=256, d_kv=64, num_heads=1, num_layers=1, num_decoder_layers=1,
        feed_forward_proj="gated-gelu", dropout_rate=0.0, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id, decoder_start_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    T5ForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_roberta(folder: Path, kind: type[PreTrainedModel], texts: Sequence[str], **changes: Any) -> str:
    """Save a RoBERTa of one layer with a tokenizer of these texts."""
    tokenizer = make_tokenizer(list(texts))
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config: dict[str, Any] = dict(
        vocab_size=1024, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=42, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    kind(RobertaConfig(**config | changes)).save_pretrained(folder)
    return str(folder)


def enter(module: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a folder with the files of a module's recipe the working folder; its keys are kept there, too."""
    module.write_files(folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_DPOPT_PRIVATE_DIR", str(folder / "private"))
    return folder


@pytest.fixture
def files(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of the module's tests."""
    return enter(request.module, tmp_path, monkeypatch)
