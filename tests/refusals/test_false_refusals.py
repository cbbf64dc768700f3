"""The self-check refuses no sound run: two pretrained models, ten kinds of real text each, through the real trainer."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import transformers as tf

from tests.helpers import tiny

pytestmark = pytest.mark.slow

NUM, LONGEST = 48, 48  # records, tokens of each
# file -> field of its lines that is the text; a name is one of JSON
KINDS: dict[str, tuple[int | str, int]] = {
    "glue-sst2/train.tsv": (0, 1), "glue-cola/train.tsv": (3, 0), "glue-mrpc/train.tsv": (3, 1),
    "glue-qnli/dev.tsv": (1, 1), "glue-rte/train.tsv": (1, 1), "ag-news/test.tsv": (0, 0),
    "e2e-nlg/trainset.csv.gz": (0, 1), "imdb/test.jsonl.gz": ("text", 0), "stackexchange/posts.jsonl.gz": ("text", 0),
    "ubuntu-irc/messages.jsonl.gz": ("text", 0),
}  # fmt: skip


def _texts(path: Path, field: int | str, header: int) -> Iterator[str]:
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:  # type: ignore[operator]
        for i, line in enumerate(lines):
            if i >= header:
                yield json.loads(line)[field] if isinstance(field, str) else line.rstrip("\n").split("\t")[field]


@pytest.fixture(params=KINDS)
def texts(request: Any, shared_data: Path) -> list[str]:
    field, header = KINDS[request.param]
    return [text for text, _ in zip(_texts(shared_data / request.param, field, header), range(NUM), strict=False)]


def _trains_a_step(folder: Path, model: Any, rows: list[dict[str, Any]], collate: Any, **options: Any) -> None:
    made = tiny.trainer(
        folder / "out", model=model, train_dataset=rows, data_collator=collate, max_steps=1, expected_batch_size=4,
        skip_self_check=False, rows_are_records=True, **options,
    )  # fmt: skip
    assert made.train().global_step == 1


@pytest.mark.parametrize("lora", [True, False], ids=["LoRA", "all weights"])
def test_minilm(lora, minilm_path, texts, tmp_path):
    tokenizer = tf.AutoTokenizer.from_pretrained(minilm_path)
    model: Any = tf.AutoModelForSequenceClassification.from_pretrained(minilm_path, num_labels=2)
    if lora:
        model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear", task_type="SEQ_CLS"))
    rows = [{**tokenizer(text, truncation=True, max_length=LONGEST), "labels": i % 2} for i, text in enumerate(texts)]
    _trains_a_step(tmp_path, model, rows, tf.DataCollatorWithPadding(tokenizer), bf16=True)
