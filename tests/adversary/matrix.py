"""Adversaries in every combination of two ways in: datasets, collators, heads, engines, units and odd records.

    python -m tests.adversary.matrix    covers every pair of values; writes docs/adversary_matrix.json

Each cell trains one step through the real trainer with and without one record, in float64 (bfloat16 where the factor
says so), and holds the distance of the clipped sums to the clipping norm.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DPOPT_PRIVATE_DIR", tempfile.mkdtemp(prefix="hf_dpopt_matrix_"))

import datasets
import peft
import torch
import transformers as tf

from tests.adversary import harness
from tests.helpers import tiny

NUM, ODD, VOCABULARY = 200, 150, tiny.VOCABULARY  # records; the odd one lies where no sample before training looks
REPORT = Path(__file__).resolve().parents[2] / "docs" / "adversary_matrix.json"
SLACK = {"float64": 1e-5, "bfloat16": 2e-2}


def _head(kind: type, **changes: Any) -> Callable[[], torch.nn.Module]:
    return lambda: tiny.made(kind, **{"pad_token_id": 1, **changes})


_LONG = {"max_position_embeddings": 130}
# head -> (the model, what labels are, the layers that LoRA takes)
HEADS: dict[str, tuple[Callable[[], torch.nn.Module], str, list[str]]] = {
    "classes": (_head(tf.BertForSequenceClassification, **_LONG), "class", ["query", "value"]),
    "regression": (_head(tf.RobertaForSequenceClassification, **_LONG, num_labels=1), "number", ["query"]),
    "tokens": (_head(tf.BertForTokenClassification, **_LONG), "tags", ["query"]),
    "causal": (_head(tf.GPT2LMHeadModel, n_positions=130), "text", ["c_attn"]),
    "last token": (_head(tf.GPT2ForSequenceClassification, n_positions=130), "class", ["c_attn"]),
    "sequences": (
        _head(tf.T5ForConditionalGeneration, decoder_start_token_id=1, eos_token_id=0), "text", ["q", "v"],
    ),
}  # fmt: skip


def rows(labels: str) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for i in range(NUM):
        length = int(torch.randint(3, 12, (), generator=generator))
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
        label = {"class": i % 2, "number": 40.5 + i, "tags": [j % 2 for j in range(length)], "text": ids}[labels]
        made.append({"input_ids": ids, "attention_mask": [1] * length, "labels": label, "author": i // 2})
    return made


def changed(row: dict[str, Any], odd: str) -> dict[str, Any]:
    """The record that is removed."""
    ids, per_token = row["input_ids"], isinstance(row["labels"], list)
    if odd in ("long", "long beside masked"):
        ids = ids * 10
    elif odd == "empty":
        ids = []
    elif odd == "outside":
        ids = [VOCABULARY + 3, *ids[1:]]
    elif odd == "too long":
        ids = (ids * 50)[:140]
    labels = (
        ([j % 2 for j in range(len(ids))] if row["labels"] != row["input_ids"] else ids)
        if per_token
        else row["labels"]
    )
    if odd == "whole number" and isinstance(labels, float):
        labels = 41
    return {**row, "input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels}


class Cut(harness.Lazy):
    """Reads several records at once, and makes several rows of each."""

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [part for i in indices for part in _cut(self.rows[i])]


def _cut(row: dict[str, Any], size: int = 6) -> list[dict[str, Any]]:
    length = len(row["input_ids"])
    return [
        {k: v[i : i + size] if isinstance(v, list) else v for k, v in row.items()}
        for i in range(0, max(length, 1), size)
    ]


DATASETS: dict[str, Callable[[list[dict[str, Any]]], Any]] = {
    "list": lambda made: made,
    "stored": datasets.Dataset.from_list,
    "lazy": harness.Lazy,
    "several rows": Cut,
    "transform": lambda made: datasets.Dataset.from_list(made).with_transform(lambda batch: batch),
}


def stock(labels: str, side: str, **of_labels: Any) -> Any:
    """The collator that transformers' scripts take for such labels; `of_labels` are options of their padding."""
    if labels in ("tags", "text"):
        return tf.DataCollatorForTokenClassification(harness.words(side), **of_labels)
    return tf.DataCollatorWithPadding(harness.words(side))


def _plain(collate: Any) -> Callable[[list[dict[str, Any]]], Any]:
    return lambda some: dict(collate(some))


COLLATORS: dict[str, Callable[[str], Any]] = {
    "stock": lambda labels: stock(labels, "right"),
    "stock, left": lambda labels: stock(labels, "left"),
    "stock, targets padded by a token": lambda labels: stock(labels, "right", label_pad_token_id=2),
    "own": lambda labels: _plain(stock(labels, "right")),
    "own, left": lambda labels: _plain(stock(labels, "left")),
}
FACTORS: dict[str, list[str]] = {
    "dataset": list(DATASETS),
    "collator": list(COLLATORS),
    "head": list(HEADS),
    "finetuning": ["full", "lora"],
    "engine": ["book_keeping", "two_pass", "checkpointing"],
    "unit": ["example", "user"],
    "clipping": ["flat", "per_layer", "automatic"],
    "precision": ["float64", "bfloat16"],
    "odd": ["long", "empty", "outside", "too long", "whole number", "long beside masked"],
}


def covering(factors: dict[str, list[str]], seed: int = 0) -> list[dict[str, str]]:
    """Cells that together hold every pair of values of two factors; greedy."""
    rng, names = random.Random(seed), list(factors)
    missing = {((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in factors[a] for y in factors[b]}
    cells = []
    while missing:
        tries = []
        for _ in range(40):
            pair = rng.choice(sorted(missing))
            cell = {name: rng.choice(values) for name, values in factors.items()} | dict(pair)
            tries.append((len(missing & set(itertools.combinations(cell.items(), 2))), rng.random(), cell))
        best = max(tries, key=lambda t: t[:2])[2]
        missing -= set(itertools.combinations(best.items(), 2))
        cells.append(best)
    return cells


def trainer(cell: dict[str, str], output_dir: Path, dataset: Any) -> Any:
    make_model, labels, targets = HEADS[cell["head"]]
    model = make_model()
    if cell["finetuning"] == "lora":
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, r=2))
    changes: dict[str, Any] = dict(
        model=model, data_collator=COLLATORS[cell["collator"]](labels), clipping=cell["clipping"],
        clipping_engine="book_keeping" if cell["engine"] == "book_keeping" else "two_pass",
        gradient_checkpointing=cell["engine"] == "checkpointing", remove_unused_columns=False,
    )  # fmt: skip
    if cell["precision"] == "bfloat16":
        changes["bf16"] = True
    if cell["unit"] == "user":
        changes |= dict(privacy_unit="user", user_id_column="author", records_per_user=2)
    elif cell["dataset"] in ("list", "lazy", "several rows"):
        dataset = _without_author(dataset)
    else:
        dataset = dataset.remove_columns("author")
    return harness.trainer(output_dir, dataset, **changes)


def _without_author(dataset: Any) -> Any:
    strip = [{k: v for k, v in row.items() if k != "author"} for row in getattr(dataset, "rows", dataset)]
    return strip if isinstance(dataset, list) else type(dataset)(strip)


def run(cell: dict[str, str], folder: Path) -> dict[str, Any]:
    """How far the odd record moves the sum, or the refusal."""
    made = rows(HEADS[cell["head"]][1])
    made[ODD] = changed(made[ODD], cell["odd"])
    if cell["head"] == "regression" and cell["dataset"] in ("stored", "transform"):
        made[ODD]["labels"] = float(made[ODD]["labels"])  # a stored column has one type
    unit = ODD // 2 if cell["unit"] == "user" else ODD
    if cell["odd"] == "long beside masked":  # the others have nothing to attend to but padding
        made = [row if i == ODD else {**row, "attention_mask": [0] * len(row["input_ids"])} if i % 5 else row
                for i, row in enumerate(made)]  # fmt: skip
    begin, found = time.perf_counter(), dict(cell)
    try:
        drawn = sorted({1, 7, unit, 30, 35})
        found["ratio"] = harness.influence(
            lambda out, data: trainer(cell, out, data), DATASETS[cell["dataset"]](made), unit, folder, drawn=drawn
        )
        found["verdict"] = "kept" if found["ratio"] <= 1 + SLACK[cell["precision"]] else "BROKEN"
    except harness.REFUSALS as error:
        harness.assert_nothing_charged(folder)
        found |= {"verdict": "refused", "reason": str(error).split(". ")[0][:160]}
    except Exception as error:  # a row of the report, not the end of the run
        found |= {"verdict": "ERROR", "reason": f"{type(error).__name__}: {error}"[:200]}
    return found | {"seconds": round(time.perf_counter() - begin, 1)}


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.adversary.matrix", description=__doc__)
    parser.add_argument("--output", type=Path, default=REPORT)
    args = parser.parse_args()
    cells = covering(FACTORS)
    results = []
    for i, cell in enumerate(cells):
        with tempfile.TemporaryDirectory() as folder:
            results.append(run(cell, Path(folder)))
        print(i + 1, "of", len(cells), json.dumps(results[-1]), flush=True)
    verdicts = {v: sum(r["verdict"] == v for r in results) for v in ("kept", "refused", "BROKEN", "ERROR")}
    largest = max((r["ratio"] for r in results if "ratio" in r and r["precision"] == "float64"), default=0.0)
    report = {
        "command": "python -m tests.adversary.matrix",
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"torch": torch.__version__, "transformers": tf.__version__, "peft": peft.__version__},
        "verdicts": verdicts,
        "largest_ratio_in_float64": largest,
        "cells": results,
    }
    args.output.write_text(json.dumps(report, indent=0) + "\n")
    print(json.dumps(verdicts), largest)


if __name__ == "__main__":
    main()
