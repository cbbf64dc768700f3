"""A small T5 from public text, without a network: tells a sentence from some of its words.

    python recipes/embedded/public_t5.py --text unsup.jsonl.gz --tokenizer ../models/tiny-gpt2 --output t5-public

Source: spans of one to three words of a sentence, in their order; target: the sentence. Whoever finetunes it on tables
and texts finds a model that copies and completes. For measurements where no pretrained T5 can be had; the text is
public.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
from pathlib import Path

import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    PreTrainedTokenizerBase,
    T5Config,
    T5ForConditionalGeneration,
)

if __name__ == "__main__":  # run as a script: the repository root is not on the path then
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipes.tables import TEXT_EXTENSIONS, read_table

SEED = 0
MAX_WORDS = 30
SENTENCE_END = re.compile(r"(?<=[.!?])\s+|<br />")


def sentences(texts: list[str], most: int) -> list[str]:
    """The first sentences of 6 to 30 words."""
    found: list[str] = []
    for text in texts:
        found += [s.strip() for s in SENTENCE_END.split(text) if 6 <= len(s.split()) <= MAX_WORDS]
        if len(found) >= most:
            break
    return found[:most]


def words_of(sentence: str, rng: random.Random) -> str:
    """Spans of one to three words, about half of the sentence, in their order."""
    words, spans, at = sentence.split(), [], 0
    while at < len(words):
        length = rng.randint(1, 3)
        if rng.random() < 0.5:
            spans.append(" ".join(words[at : at + length]))
        at += length
    return ", ".join(spans)


def tokenizer_with_padding(name: str) -> PreTrainedTokenizerBase:
    """A decoder's tokenizer may have one special token only; here the end is learned and padding is not."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.pad_token in (None, tokenizer.eos_token):
        tokenizer.add_special_tokens({"pad_token": "<pad>"})
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerBase, *, width: int, layers: int) -> T5ForConditionalGeneration:
    config = T5Config(
        vocab_size=len(tokenizer), d_model=width, d_ff=4 * width, d_kv=64, num_heads=width // 64, num_layers=layers,
        num_decoder_layers=layers, feed_forward_proj="gated-gelu", dropout_rate=0.0,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def train(
    model: AutoModelForSeq2SeqLM,
    tokenizer: PreTrainedTokenizerBase,
    texts: list[str],
    num_steps: int,
    batch_size: int = 32,
    device: str = "cpu",
) -> None:
    """Ordinary training; prints the loss now and then."""
    rng, collate = random.Random(SEED), DataCollatorForSeq2Seq(tokenizer)
    if device == "cpu":
        model.set_attn_implementation("eager")  # in bf16 the fused one is slower there for short texts
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=max(num_steps, 1))
    for step in range(num_steps):
        chosen = rng.sample(texts, batch_size)
        sides = ([words_of(text, rng) for text in chosen], chosen)
        ids = [[[*row, tokenizer.eos_token_id] for row in tokenizer(side)["input_ids"]] for side in sides]
        batch = collate([{"input_ids": source, "labels": target} for source, target in zip(*ids, strict=True)])
        with torch.autocast(device, torch.bfloat16):
            loss = model(**batch.to(device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == num_steps - 1:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="file with a column `text`; public")
    parser.add_argument("--tokenizer", required=True, help="folder or name")
    parser.add_argument("--output", required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--sentences", type=int, default=40_000)
    options = parser.parse_args()
    if Path(options.output).exists():
        sys.exit(f"{options.output} exists. Name a folder that does not.")
    texts = sentences(list(read_table(options.text, kinds=TEXT_EXTENSIONS).columns["text"]), options.sentences)
    torch.manual_seed(SEED)
    tokenizer = tokenizer_with_padding(options.tokenizer)
    model = make_model(tokenizer, width=options.width, layers=options.layers)
    print(f"{model.num_parameters():,} parameters, {len(texts):,} sentences")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train(model, tokenizer, texts, options.steps, options.batch_size, device)
    model.save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)


if __name__ == "__main__":
    main()
