"""A tokenizer and a small RoBERTa from public text, without a network: `python recipes/embedded/build.py <folder>`.

The tokenizer is trained on the public part of the corpus. The model is a stock `RobertaForSequenceClassification` with
random weights: all that it will know about the task comes from private training.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import RobertaConfig, RobertaForSequenceClassification, RobertaTokenizer

if __name__ == "__main__":  # run as a script: the repository root is not on the path then
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.embedded.corpus import LABELS, Corpus, read_corpus

SPECIAL_TOKENS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]  # RoBERTa's ids 0 to 4
VOCAB_SIZE = 2048
MAX_TOKENS = 40
INIT_SEED = 0


def build(folder: str | Path, corpus: Corpus) -> Path:
    """Writes tokenizer and model, for `from_pretrained`; a folder that is there already is taken as it is."""
    folder = Path(folder)
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target and renamed when complete: a build that is interrupted leaves no half model behind.
    unfinished = Path(tempfile.mkdtemp(prefix=".building-", dir=folder.parent))
    try:
        make_tokenizer(corpus.public_text).save_pretrained(unfinished)
        make_model().save_pretrained(unfinished)
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
    bpe = ByteLevelBPETokenizer(add_prefix_space=True)
    bpe.train_from_iterator(text, vocab_size=VOCAB_SIZE, special_tokens=SPECIAL_TOKENS, show_progress=False)
    trained = json.loads(bpe.to_str())["model"]
    merges = [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in trained["merges"]]
    return RobertaTokenizer(vocab=trained["vocab"], merges=merges, add_prefix_space=True, model_max_length=MAX_TOKENS)


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


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(f"usage: python {sys.argv[0]} <folder to write>")
    print(build(sys.argv[1], read_corpus()))


if __name__ == "__main__":
    main()
