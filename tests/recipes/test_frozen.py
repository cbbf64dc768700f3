"""`glue.py --freeze encoder --pooling ..`: a head on features that were computed once is the head on the inputs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from recipes import classifiers, glue
from tests.recipes import test_glue
from tests.recipes.test_glue import arguments

pytestmark = pytest.mark.slow

model_dir, write_files = test_glue.model_dir, test_glue.write_files
HEAD = {"freeze": "encoder", "pooling": "mean", "learning_rate": "0.1", "advisor": "none", "seed": "3"}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True)
    return {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    "flags", [{"noise_multiplier": "0", "target_epsilon": None}, {"non_private": "true"}], ids=str
)
def test_the_head_is_that_of_a_run_over_the_inputs(model_dir: str, monkeypatch: pytest.MonkeyPatch, flags) -> None:
    """Without noise, so that both runs draw the same batches and nothing hides a difference."""
    fixed = {} if "non_private" in flags else {"unsafe_fixed_noise_key": "ab" * 32}
    if "non_private" in flags:
        flags = {**flags, "target_epsilon": None, "target_delta": None, "expected_batch_size": None, "advisor": None}
    once = arguments(model_dir, **{**HEAD, **fixed, **flags}, output_dir="once")
    assert glue.run(once) == 0
    monkeypatch.setattr(glue, "feature_splits", lambda model, splits, *args, **options: splits)
    monkeypatch.setattr(
        glue, "default_data_collator", glue.DataCollatorWithPadding(AutoTokenizer.from_pretrained(model_dir))
    )
    assert glue.run(arguments(model_dir, **{**HEAD, **fixed, **flags}, output_dir="inputs")) == 0
    ours, theirs = weights(Path("once")), weights(Path("inputs"))
    assert not torch.equal(ours["classifier.weight"], torch.zeros_like(ours["classifier.weight"]))
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-6)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, ...]]:
    """How often the encoder saw each row of tokens: of records, and of those that are made up to check it."""
    seen: Counter[tuple[int, ...]] = Counter()
    plain = classifiers.PooledForSequenceClassification.features

    def counted(self, input_ids=None, attention_mask=None, **inputs):
        seen.update(map(tuple, input_ids.tolist()))
        return plain(self, input_ids, attention_mask, **inputs)

    monkeypatch.setattr(classifiers.PooledForSequenceClassification, "features", counted)
    return seen


def rows_of(model_dir: str, *names: str) -> Counter[tuple[int, ...]]:
    """Tokens of the records in files of the working folder."""
    texts = [line.split("\t")[name == "test"] for name in names
             for line in Path(f"{name}.tsv").read_text().splitlines()[1:]]  # fmt: skip
    return Counter(map(tuple, AutoTokenizer.from_pretrained(model_dir)(texts)["input_ids"]))


@pytest.mark.usefixtures("files")
def test_the_encoder_runs_once_over_each_record(model_dir: str, encoded: Counter[tuple[int, ...]]) -> None:
    assert glue.run(arguments(model_dir, **HEAD, max_steps="9", do_train="true", do_eval="true", do_predict="true",
                              test_file="test.tsv")) == 0  # fmt: skip
    records = rows_of(model_dir, "train", "dev", "test")
    assert {row: encoded[row] for row in records} == records
    assert len(Path("out/predict_results_test.txt").read_text().splitlines()) == 6


@pytest.mark.usefixtures("files")
def test_what_is_saved_takes_texts_and_answers_as_it_was_evaluated(model_dir: str) -> None:
    flags = {**HEAD, "pooling": None, "pooling_layers": None}
    assert glue.run([*arguments(model_dir, **flags, max_steps="30"), "--pooling", "cls", "mean"]) == 0
    model = AutoModelForSequenceClassification.from_pretrained("out", trust_remote_code=True).eval()
    tokenizer = AutoTokenizer.from_pretrained("out")
    rows = [line.split("\t") for line in Path("dev.tsv").read_text().splitlines()[1:]]
    with torch.no_grad():
        logits = model(**tokenizer([text for text, _ in rows], padding=True, return_tensors="pt")).logits
    said = [model.config.id2label[i] for i in logits.argmax(1).tolist()]
    accuracy = np.mean([found == label for found, (_, label) in zip(said, rows, strict=True)])
    assert json.loads(Path("out/all_results.json").read_text())["eval_accuracy"] == pytest.approx(accuracy)
    assert not list(Path("out").rglob("features-*")), "features of private records are not published"


@pytest.mark.usefixtures("files")
def test_a_run_is_resumed_on_the_same_features(
    model_dir: str, tmp_path: Path, encoded: Counter[tuple[int, ...]]
) -> None:
    flags = {
        **HEAD, "save_steps": "2", "save_strategy": "steps", "private_state_dir": str(tmp_path / "keys"),
        "target_epsilon": None, "noise_multiplier": "1.0",
    }  # fmt: skip
    assert glue.run(arguments(model_dir, **{**flags, "max_steps": "2"})) == 0
    before = weights(Path("out"))["classifier.weight"].clone()
    encoded.clear()
    assert (
        glue.run(arguments(model_dir, **{**flags, "max_steps": "4"}, resume_from_checkpoint="out/checkpoint-2")) == 0
    )
    again = {row: encoded[row] for row in rows_of(model_dir, "train", "dev") if row in encoded}
    assert again == rows_of(model_dir, "dev"), "those of the training records were kept"
    assert len(list((tmp_path / "keys").glob("work/*/features-*.pt"))) == 1
    assert not torch.equal(weights(Path("out"))["classifier.weight"], before), "it went on"


@pytest.mark.parametrize("more", [HEAD, {"ignore_mismatched_sizes": "true"}], ids=["head", "whole model"])
def test_regression_on_pairs_is_trained_over_its_inputs(model_dir: str, files: Path, more: dict[str, str]) -> None:
    rows = [{"sentence1": text, "sentence2": "a film", "score": i / 8} for i, text in enumerate(test_glue.TEXTS)]
    (files / "train.json").write_text(json.dumps([{**row, "sentence1": f"truly {row['sentence1']}"} for row in rows]))
    (files / "dev.jsonl").write_text("\n".join(json.dumps(row) for row in rows[:12]))
    flags = {"task_name": "stsb", "train_file": "train.json", "validation_file": "dev.jsonl"}
    assert glue.run(arguments(model_dir, **more, **flags)) == 0
    results = json.loads((files / "out" / "all_results.json").read_text())
    assert {"eval_pearson", "eval_spearmanr", "eval_combined_score"} <= set(results)
