"""`recipes/glue.py` as a user meets it: flags, one-line errors with exit status 2, and what a run leaves behind."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, DatasetDict
from transformers import EvalPrediction, RobertaConfig, RobertaForSequenceClassification

from hf_dpopt import DPConfigError
from recipes import glue, sources
from recipes.glue import metrics_of, parse
from recipes.glue_model import label_order
from recipes.models import set_dropout
from tests.recipes.conftest import save_roberta
from tests.recipes.texts import words

TEXTS = [f"{good} film number {i}" for i, good in enumerate(["a fine", "no good"] * 20)]
LABELS = [str(1 - i % 2) for i in range(40)]


MODEL, run = "model_dir", glue.run  # for test_refusals


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A two-layer RoBERTa with dropout, finetuned on the labels of SST-2 in reversed order, as it claims."""
    names = {"id2label": {0: "POSITIVE", 1: "NEGATIVE"}, "label2id": {"POSITIVE": 0, "NEGATIVE": 1}}
    folder = tmp_path_factory.mktemp("model")
    return save_roberta(folder, RobertaForSequenceClassification, TEXTS * 3, num_hidden_layers=2, **names)


def write_files(folder: Path) -> None:
    """Training, validation and test records, and bad ones."""
    rows = [f"{text}\t{label}" for text, label in zip(TEXTS, LABELS, strict=True)]
    for name, part in (("train", [f"truly {row}" for row in rows]), ("dev", rows[:10])):  # held out
        (folder / f"{name}.tsv").write_text("sentence\tlabel\n" + "\n".join(part) + "\n")
    (folder / "test.tsv").write_text("index\tsentence\n" + "".join(f"{i}\t{t}\n" for i, t in enumerate(TEXTS[:5])))
    (folder / "empty.tsv").write_text("sentence\tlabel\n")
    (folder / "odd.tsv").write_text("sentence\tlabel\nx\t7\n")


TINY = {"max_steps": "2", "expected_batch_size": "8", "use_cpu": "true", "disable_tqdm": "true",
        "report_to": "none", "target_delta": "1e-3", "max_seq_length": "32", "output_dir": "out"}  # fmt: skip


def arguments(model: str, **changes: str | None) -> list[str]:
    return words({"model_name_or_path": model, "train_file": "train.tsv", "validation_file": "dev.tsv",
                  "target_epsilon": "8", **TINY, **changes})  # fmt: skip


# --- flags -----------------------------------------------------------------------------------------------------------


def test_run_glue_defaults_hold_with_data_of_ones_own(model_dir: str) -> None:
    _, data_args, training_args = parse(
        ["--model_name_or_path", model_dir, "--task_name", "SST-2", "--target_epsilon", "3"]
    )
    assert data_args.task_name == "sst2" and data_args.max_seq_length == 128
    assert (training_args.learning_rate, training_args.num_train_epochs) == (5e-5, 3)
    assert training_args.do_train and training_args.do_eval


def test_non_private_reaches_the_same_batch_by_accumulation() -> None:
    training_args = parse(["--non_private", "--expected_batch_size", "512"])[2]
    assert training_args.gradient_accumulation_steps * training_args.per_device_train_batch_size == 512


# --- bad input -------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, str | None], str]] = {
    "users and a cut": ({"privacy_unit": "user", "user_id_column": "author", "max_train_samples": "5", "do_train": "true"}, "^error: max_train_samples=5: if one user were removed"),
    "unknown task": ({"task_name": "sst3"}, "task_name='sst3' is unknown. Use one of: cola, mnli"),
    "no validation file": ({"validation_file": None, "do_eval": "true"}, "do_eval .* Add --validation_file"),
    "eval strategy alone": ({"validation_file": None, "eval_strategy": "epoch", "do_train": "true"}, "Add --validation_file"),
    "no train file": ({"train_file": None}, "Add --train_file"),
    "no test file": ({"do_predict": "true"}, "Add --test_file"),
    "no model": ({"model_name_or_path": None}, "Add --model_name_or_path"),
    "no data": ({"train_file": None, "validation_file": None}, "Add --task_name <GLUE task>"),
    "files and hub": ({"dataset_name": "imdb"}, "Both dataset_name and files are given. Keep one"),
    "model folder": ({"model_name_or_path": "./nowhere"}, "'./nowhere' is not a folder. Name a model's folder"),
    "missing file": ({"train_file": "nowhere.tsv"}, "nowhere.tsv does not exist. Check the path"),
    "empty": ({"train_file": "empty.tsv"}, "empty.tsv holds no rows. Name a file"),
    "missing column": ({"text_column": "nope"}, "no column 'nope' .* It has: 'sentence', 'label'"),
    "unknown label": ({"validation_file": "odd.tsv"}, "odd.tsv, line 2: label '7' is not one of '0', '1'. Correct the row"),
    "label list": ({"label_list": "one"}, "Write e.g. negative,positive"),
    "samples": ({"max_train_samples": "0"}, "max_train_samples=0 is not a positive count. Use 1 or more"),
    "rank": ({"lora_r": "-1"}, "lora_r=-1 is negative. Use 4 to 64"),
    "layers without a rank": (
        {"lora_target_modules": "query"},
        "lora_target_modules=.*: LoRA is off, so all weights would be trained. Add --lora_r 8, or leave",
    ),
    "scale without a rank": ({"lora_alpha": "16"}, "lora_alpha=16: LoRA is off"),
    "dropout": ({"dropout": "1.5"}, "dropout=1.5 is not a rate. Use 0 to 1"),
    "frozen adapters": ({"lora_r": "2", "freeze": "encoder"}, "Leave --freeze encoder or --lora_r out"),
    "public is private": ({"public_file": "train.tsv"}, "a file of the private run, too"),
    "public is private in other words": ({"public_file": "./train.tsv"}, "a file of the private run, too"),
    "public with nothing private": (
        {"public_file": "dev.tsv", "train_file": None, "validation_file": None, "model_name_or_path": None},
        "goes with data of your own",
    ),
    "warm start with adapters that do not fit": (
        {"warm_start_epsilon": "1", "lora_r": "2", "lora_target_modules": "nothing"},
        "Name layers with --lora_target_modules",
    ),
    "public stage alone": ({"preconditioner": "adadps"}, "preconditioner='adadps': learns .* Add --public_file"),
    "public mirror alone": ({"public_mirror_descent": "cosine"}, "'cosine': learns .* Add --public_file"),
    "labels of the embedded job": (
        {"label_list": "a,b", **dict.fromkeys(("train_file", "validation_file", "model_name_or_path"))},
        "label_list: for data of your own",
    ),
    "public passes": ({"public_file": "p.tsv", "public_epochs": "0"}, "nothing would learn from public_file"),
    "public rate alone": ({"public_learning_rate": "0.1"}, "Add --public_file"),
    "public without a private run": (
        {"public_file": "a.tsv", "non_private": "true", "target_epsilon": None},
        "before a private run",
    ),
    "two starts": ({"public_file": "a.tsv", "warm_start_epsilon": "1"}, "not by both"),
    "warm start without privacy": (
        {"warm_start_epsilon": "1", "non_private": "true", "target_epsilon": None},
        "for private runs",
    ),
    "exact values of a private evaluation set": (
        {"eval_data_privacy": "private", "eval_target_epsilon": "2", "non_private": "true", "target_epsilon": None},
        "releases noisy metrics alone",
    ),
    "warm start beyond the budget": ({"warm_start_epsilon": "8"}, "no part of target_epsilon"),
    "layers alone": ({"pooling_layers": "1"}, "Add --pooling mean"),
    "layers": ({"pooling": "mean", "pooling_layers": "99"}, "layers go from 0"),
    "lora layers": ({"lora_r": "2", "lora_target_modules": "nothing"}, "Name layers with --lora_target_modules"),
    "epsilon": ({"target_epsilon": "0"}, "target_epsilon=0 is outside 0.0001 to 1e[+]06"),
    "no privacy": ({"target_epsilon": None}, "Neither target_epsilon nor noise_multiplier .* Add --target_epsilon 8"),
    "batch": ({"expected_batch_size": "41"}, "expected_batch_size=41: .* larger than the dataset.* Use a smaller batch"),
    "fp16": ({"fp16": "true"}, "fp16=True: .* Use --bf16"),
    "not a number": ({"target_epsilon": "eight"}, "invalid float value: 'eight'"),
    "flag of plan": ({"epsilon": "3"}, "--epsilon is not a flag. Did you mean --target_epsilon"),
    "a package that is not there": ({"report_to": "swanlab"}, "requires swanlab to be installed. Run `pip install swanlab`"),
    "longer flag": ({"lora_rank": "8"}, "--lora_rank is not a flag. Did you mean --lora_r[?]"),
    "unknown flag": ({"train_fiel": "x"}, "--train_fiel is not a flag. Did you mean --train_file"),
    "a flag like no other": ({"zzzz": "x"}, "--zzzz is not a flag. --help lists all"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("lora_r", ["2", None], ids=["adapters", "full"])
def test_a_head_that_was_trained_first_is_known_to_the_run(
    model_dir: str, files: Path, lora_r: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert glue.run(arguments(model_dir, start="pooled", lora_r=lora_r, skip_self_check="true")) == 0
    plan = json.loads((files / "out/privacy/report.json").read_text())["plan"]
    assert len(plan["earlier_runs"]) == 1
    head = json.loads((files / "out/warm_start/privacy/report.json").read_text())["plan"]
    assert "advised" not in head and plan["epsilon"] <= 8
    assert "trained first with epsilon 2 of the budget" in caplog.text and "would train" not in caplog.text


def test_the_traceback_is_there_for_those_who_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DPOPT_DEBUG", "1")
    with pytest.raises(DPConfigError, match="Add --model_name_or_path"):
        glue.run(["--task_name", "sst2"])


def test_without_the_hub_there_is_one_line(capsys: pytest.CaptureFixture[str], files: Path) -> None:
    """HF_HUB_OFFLINE=1 in these tests; the command is the one of the README."""
    command = "--model_name_or_path roberta-base --task_name sst2 --target_epsilon 8 --lora_r 8 --start pooled"
    assert glue.run(command.split()) == 2
    error = capsys.readouterr().err
    assert "The hub cannot be reached" in error and "--train_file train.tsv" in error and "Traceback" not in error
    assert not (files / "runs").exists()


def test_a_list_with_a_space_is_told_from_a_flag(capsys: pytest.CaptureFixture[str], files: Path) -> None:
    assert glue.run("--train_file train.tsv --label_list negative, positive".split()) == 2
    assert "'positive' belongs to no flag. Write names with commas and no spaces" in capsys.readouterr().err


# --- model -----------------------------------------------------------------------------------------------------------


def test_label_order_of_a_finetuned_model_is_kept() -> None:
    assert label_order({"POSITIVE": 0, "NEGATIVE": 1}, ["negative", "positive"]) == [1, 0]
    assert label_order({"LABEL_0": 0, "LABEL_1": 1}, ["negative", "positive"]) == [0, 1]
    assert label_order({"a": 0, "b": 1}, ["a", "b", "c"]) == [0, 1, 2]


def test_dropout_is_switched_off_and_said(caplog: pytest.LogCaptureFixture) -> None:
    config = RobertaConfig(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.2, classifier_dropout=None)
    with caplog.at_level(logging.INFO, logger="recipes"):
        set_dropout(config, 0.0)
    assert (config.hidden_dropout_prob, config.attention_probs_dropout_prob, config.classifier_dropout) == (0, 0, None)
    assert "--dropout -1 keeps the model's own" in caplog.text


# --- metrics -----------------------------------------------------------------------------------------------------------

PREDICTED, TRUE = np.array([1, 1, 1, 0, 0, 0, 0, 1]), np.array([1, 1, 0, 0, 0, 0, 1, 1])
ACCURACY, F1 = {"accuracy": 0.75}, {"f1": 0.75}  # 3 of 4 that are 1 are found, and 3 of 4 that were found are 1


def score(task: str | None, predicted: np.ndarray, true: np.ndarray, *, is_regression: bool = False) -> dict:
    logits = predicted[:, None] if is_regression else np.eye(2)[predicted]
    given = EvalPrediction(predictions=(logits, "hidden states"), label_ids=true)
    return metrics_of(task, is_regression=is_regression)(given)


@pytest.mark.parametrize(
    "task, expected",
    [
        ("cola", {"matthews_correlation": 0.5}),
        ("mrpc", ACCURACY | F1 | {"combined_score": 0.75}),
        ("qqp", ACCURACY | F1 | {"combined_score": 0.75}),
        *((task, ACCURACY) for task in ("sst2", "mnli", "qnli", "rte", "wnli", None)),
    ],
)
def test_each_task_has_glues_metric(task: str | None, expected: dict) -> None:
    assert score(task, PREDICTED, TRUE) == pytest.approx(expected)


def test_scores_have_correlations_or_a_squared_error() -> None:
    predicted, true = np.array([1.0, 3.0, 2.0]), np.array([1.0, 1.5, 4.0])
    found = score("stsb", predicted, true, is_regression=True)
    expected = {"pearson": np.corrcoef(predicted, true)[0, 1], "spearmanr": 0.5}
    assert found == pytest.approx(expected | {"combined_score": np.mean(list(expected.values()))})
    assert score(None, predicted, true, is_regression=True) == pytest.approx({"mse": (1.5**2 + 2**2) / 3})


def test_constant_predictions_have_a_score_of_zero() -> None:
    zeros = np.zeros(4, dtype=int)
    assert score("cola", zeros, np.array([0, 1, 0, 1])) == {"matthews_correlation": 0.0}
    assert score("mrpc", zeros, zeros) == {"accuracy": 1.0, "f1": 0.0, "combined_score": 0.5}


# --- whole runs ------------------------------------------------------------------------------------------------------

UNPRIVATIZED = (
    "loss",
    "train_loss",
    "total_flos",
    "train_runtime",
    "train_samples_per_second",
    "train_steps_per_second",
)


def test_train_evaluate_predict(model_dir: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = arguments(model_dir, task_name="sst2", test_file="test.tsv", do_train="true", do_eval="true",
                      do_predict="true", lora_r="2", eval_data_privacy="public")  # fmt: skip
    assert glue.run(flags) == 0
    shown = capsys.readouterr().out
    out = files / "out"
    results = json.loads((out / "all_results.json").read_text())
    assert 0 <= results["eval_accuracy"] <= 1 and results["eval_samples"] == 10 and results["train_samples"] == 40
    assert 0 < results["epsilon"] <= 8
    for name in ("all_results.json", "train_results.json"):
        assert not set(json.loads((out / name).read_text())) & set(UNPRIVATIZED)
    assert "majority class  50.0% accuracy" in shown and f"epsilon {results['epsilon']:.3f} at delta 0.001" in shown
    lines = (out / "predict_results_test.txt").read_text().splitlines()
    assert lines[0] == "index\tprediction" and len(lines) == 6
    assert {line.split("\t")[1] for line in lines[1:]} <= {"positive", "negative"}
    assert (out / "README.md").exists() and (out / "privacy" / "statement.md").exists()
    assert (out / "adapter_model.safetensors").exists()
    report = (out / "privacy" / "report.json").read_text()
    assert "the labels are declared" in report


def test_a_head_for_other_labels_is_one_clear_line(
    model_dir: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A classifier of two labels on three."""
    labels = ["neutral", "positive", "negative"]
    rows = [{"sentence": text, "label": labels[i % 3]} for i, text in enumerate(TEXTS)]
    (files / "train.json").write_text(json.dumps(rows))
    (files / "dev.json").write_text(json.dumps(rows[:6]))
    assert glue.run(arguments(model_dir, train_file="train.json", validation_file="dev.json")) == 2
    shown = capsys.readouterr().err
    assert "another number of labels" in shown and "--ignore_mismatched_sizes true" in shown
    assert "Traceback" not in shown and not (files / "out").exists()


@pytest.mark.slow
def test_a_private_evaluation_has_a_share_for_both_sets_of_mnli(
    model_dir: str, files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def split(prefix: str, size: int) -> Dataset:
        rows = {"premise": [f"{prefix} {text}" for text in TEXTS[:size]], "hypothesis": TEXTS[:size]}
        return Dataset.from_dict({**rows, "label": [i % 3 for i in range(size)]})

    made = DatasetDict(
        train=split("truly", 30), validation_matched=split("so", 9), validation_mismatched=split("no", 6)
    )
    monkeypatch.setattr(sources, "load_dataset", lambda *args, **kwargs: made)
    flags = arguments(
        model_dir, task_name="mnli", train_file=None, validation_file=None, ignore_mismatched_sizes="true",
        eval_data_privacy="private", eval_target_epsilon="2",
    )  # fmt: skip
    assert glue.run(flags) == 0, capsys.readouterr().err
    results = json.loads((files / "out" / "all_results.json").read_text())
    assert {"eval_accuracy", "eval_accuracy_mm"} <= set(results)
    charged = [json.loads(line) for line in (files / "out/privacy/ledger.jsonl").read_text().splitlines()]
    assert sum(one["kind"] == "evaluation" for one in charged) == 2
    assert 1 < results["eval_epsilon"] <= 2


# --- public records, and what comes before the private run -------------------------------------------------------------------------------


def test_a_preconditioner_learns_from_the_public_file(model_dir: str, files: Path) -> None:
    (files / "public.tsv").write_text("sentence\tlabel\n" + "a fine film\t1\nno good film\t0\n" * 20)
    flags = {"public_file": "public.tsv", "public_epochs": "0", "preconditioner": "subspace",
             "preconditioner_kwargs": '{"rank": 4}', "max_steps": "2"}  # fmt: skip
    assert glue.run(arguments(model_dir, **flags)) == 0
    statement = (files / "out" / "privacy" / "statement.md").read_text()
    assert "subspace" in statement and "declared public" not in statement, "there was no ordinary training"


@pytest.mark.slow
def test_public_records_are_learnt_first_and_the_statement_says_so(model_dir: str, files: Path) -> None:
    (files / "public.tsv").write_text("sentence\tlabel\n" + "a fine film\t1\nno good film\t0\n" * 20)
    flags = {"public_file": "public.tsv", "public_epochs": "2", "learning_rate": "1e-12", "dropout": "0"}
    assert glue.run(arguments(model_dir, **flags)) == 0
    before = RobertaForSequenceClassification.from_pretrained(model_dir).state_dict()
    after = RobertaForSequenceClassification.from_pretrained(files / "out").state_dict()
    assert max(float((after[name] - before[name]).abs().max()) for name in before) > 1e-5, "the private rate is 1e-12"
    statement = (files / "out" / "privacy" / "statement.md").read_text()
    assert "trained on 40 records of a file that was declared public" in statement
    assert "| 40, 8, 0.2 |" in statement, "public records are no part of n"
