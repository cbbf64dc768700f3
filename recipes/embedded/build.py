"""Small models from public text, without a network.

The tokenizers are trained on the public part of the corpus. The RoBERTa is a stock `RobertaForSequenceClassification`
with random weights: all that it will know about the task comes from private training. The GPT-2 is a stock
`GPT2LMHeadModel` that was trained on the public text for some seconds, so that there is something to finetune.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import ByteLevelBPETokenizer
from tqdm.auto import tqdm
from transformers import (
    DataCollatorForSeq2Seq,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Tokenizer,
    RobertaConfig,
    RobertaForSequenceClassification,
    RobertaTokenizer,
)

from recipes.embedded.corpus import LABELS, Corpus

SPECIAL_TOKENS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]  # RoBERTa's ids 0 to 4
VOCAB_SIZE = 2048
MAX_TOKENS = 40
INIT_SEED = 0
END = "<|endoftext|>"  # GPT-2's only special token: end, start and padding
GPT2_TOKENS = 64
PUBLIC_STEPS, PUBLIC_BATCH = 250, 64


def build(folder: str | Path, corpus: Corpus) -> Path:
    """Writes tokenizer and RoBERTa, for `from_pretrained`; a folder that is there already is taken as it is."""

    def write(unfinished: Path) -> None:
        make_tokenizer(corpus.public_text).save_pretrained(unfinished)
        make_model().save_pretrained(unfinished)

    return write_once(Path(folder), write)


def build_gpt2(folder: str | Path, corpus: Corpus, *, num_steps: int = PUBLIC_STEPS) -> Path:
    """The same with a GPT-2 that was trained on the public text for `num_steps` steps."""

    def write(unfinished: Path) -> None:
        tokenizer = make_gpt2_tokenizer(corpus.public_text)
        tokenizer.save_pretrained(unfinished)
        make_gpt2(tokenizer, corpus.public_text, num_steps=num_steps).save_pretrained(unfinished)

    return write_once(Path(folder), write)


def write_once(folder: Path, write: Callable[[Path], None]) -> Path:
    """Make a folder by `write`, unless it is there."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target and renamed when complete: a build that is interrupted leaves no half model behind.
    unfinished = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent))
    try:
        write(unfinished)
        try:
            os.rename(unfinished, folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster, with the same result
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def make_tokenizer(text: list[str]) -> RobertaTokenizer:
    """RoBERTa's byte-level BPE, trained on `text`."""
    trained = _train_bpe(text, SPECIAL_TOKENS, add_prefix_space=True)
    return RobertaTokenizer(**trained, add_prefix_space=True, model_max_length=MAX_TOKENS)


def make_gpt2_tokenizer(text: list[str]) -> GPT2Tokenizer:
    """GPT-2's byte-level BPE, trained on `text`."""
    trained = _train_bpe(text, [END], add_prefix_space=False)
    return GPT2Tokenizer(
        **trained, unk_token=END, bos_token=END, eos_token=END, pad_token=END,
        model_max_length=GPT2_TOKENS,
    )  # fmt: skip


def _train_bpe(text: list[str], special_tokens: list[str], *, add_prefix_space: bool) -> dict[str, Any]:
    bpe = ByteLevelBPETokenizer(add_prefix_space=add_prefix_space)
    bpe.train_from_iterator(text, vocab_size=VOCAB_SIZE, special_tokens=special_tokens, show_progress=False)
    trained = json.loads(bpe.to_str())["model"]
    merges = [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in trained["merges"]]
    return {"vocab": trained["vocab"], "merges": merges}


def make_model() -> RobertaForSequenceClassification:
    """A narrow RoBERTa, the same for everybody.

    Noise is spread over all parameters, so a small model learns more under it. `initializer_range` is near
    1 / sqrt(hidden_size), which keeps the scale of what attention adds; at the usual 0.02 so narrow a model hardly
    sees its input at first, and gradients would say nothing but which class is frequent.
    """
    config = RobertaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=256,
        max_position_embeddings=MAX_TOKENS + 2,  # RoBERTa counts positions from 2
        type_vocab_size=1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.1,
        id2label=dict(enumerate(LABELS)),
        label2id={label: i for i, label in enumerate(LABELS)},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(INIT_SEED)
        return RobertaForSequenceClassification(config)


def make_gpt2(tokenizer: GPT2Tokenizer, text: list[str], *, num_steps: int) -> GPT2LMHeadModel:
    """A narrow GPT-2 after `num_steps` steps of ordinary training on `text`, which is public."""
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=GPT2_TOKENS, n_embd=128, n_layer=2, n_head=2, n_inner=256,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    texts = tokenizer(text, truncation=True, max_length=GPT2_TOKENS - 1, add_special_tokens=False)["input_ids"]
    records = [{"input_ids": (ids := [*row, tokenizer.eos_token_id]), "labels": ids} for row in texts]
    collate = DataCollatorForSeq2Seq(tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(INIT_SEED)
        model = GPT2LMHeadModel(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=max(num_steps, 1))
        for _ in tqdm(range(num_steps), desc="public steps", disable=None):
            batch = collate([records[i] for i in torch.randint(len(records), (PUBLIC_BATCH,)).tolist()])
            model(**batch).loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return model.eval()
