"""`recipes/linear_probe.py` as a user meets it: a model that pipelines take, one statement, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import RobertaForSequenceClassification, pipeline

from recipes import linear_probe
from tests.recipes.conftest import save_roberta
from tests.recipes.texts import words

pytestmark = pytest.mark.slow

TEXTS = [f"{good} film number {i}" for i, good in enumerate(["a fine", "no good"] * 60)]
LABELS = [str(1 - i % 2) for i in range(120)]


MODEL, run = "probed_dir", linear_probe.run  # for test_refusals


@pytest.fixture(scope="session")
def probed_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The first token hardly sees the others where weights are small."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "initializer_range": 0.5}
    return save_roberta(folder, RobertaForSequenceClassification, TEXTS * 3, **sizes)


def write_files(folder: Path) -> None:
    rows = [f"{text}\t{label}" for text, label in zip(TEXTS, LABELS, strict=True)]
    for name, part in (("train", rows), ("dev", rows[:20])):
        (folder / f"{name}.tsv").write_text("sentence\tlabel\n" + "\n".join(part) + "\n")


def arguments(model: str, **changes: str | None) -> list[str]:
    return words({
        "model_name_or_path": model, "train_file": "train.tsv", "validation_file": "dev.tsv", "target_epsilon": "8",
        "target_delta": "1e-3", "head_radius": "2", "feature_norm": "2", "max_steps": "200", "label_list": "bad,good",
        "expected_batch_size": "40", "use_cpu": "true", "disable_tqdm": "true", "report_to": "none",
        "output_dir": "out", **changes,
    })  # fmt: skip


LITTLE = {"target_epsilon": None, "noise_multiplier": "0.1"}  # instead of a budget: nothing has to be calibrated


def test_the_head_is_part_of_a_model_that_pipelines_take(
    files: Path, probed_dir: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"max_steps": "3000", "head_radius": "5", "feature_norm": "6", **LITTLE}
    assert linear_probe.run(arguments(probed_dir, **given)) == 0
    out, err = capsys.readouterr()
    assert "Noise alone" not in err
    assert "Final weights only: epsilon" in out and "majority class" in out
    classify = pipeline("text-classification", model=str(files / "out"), device="cpu")
    found = [answer["label"] for answer in classify(TEXTS[:20])]
    accuracy = sum(label == ("good" if i % 2 == 0 else "bad") for i, label in enumerate(found)) / 20
    assert accuracy > 0.8 and f"accuracy {accuracy:.4f}" in out
    first = (files / "out" / "privacy" / "statement.md").read_text().splitlines()[0]
    assert first.startswith("# Final weights only: epsilon ")
    assert first in (files / "out" / "README.md").read_text()


SUBSPACE = {"preconditioner": "subspace"}
REFUSED: dict[str, tuple[dict[str, str | None], str]] = {
    "two budgets": ({"noise_multiplier": "0.01"}, "exactly one"),
    "optim": ({"optim": "adamw_torch"}, "Use --optim sgd"),
    "lora_r": ({"lora_r": "4"}, "not convex in an adapter"),
    "private evaluation": ({"eval_data_privacy": "private", "do_eval": "true"}, "prints exact metrics"),
    "do_predict": ({"do_predict": "true"}, "in a pipeline"),
    "resume": ({"resume_from_checkpoint": "out"}, "goes on when it is started again"),
    "non_private": ({"non_private": "true"}, "--noise_multiplier 0"),
    "do_train": ({"do_train": "false"}, "glue.py --do_eval"),
    "push_to_hub": ({"push_to_hub": "true"}, "push that"),
    "label smoothing": ({"label_smoothing_factor": "0.1"}, "Leave it out"),
    "batch": ({"expected_batch_size": "121"}, "more than the 120 records"),
    "subspace of nothing": (SUBSPACE, "Add --public_file"),
    "subspace of the records": (SUBSPACE | {"public_file": "train.tsv"}, "is a file of the private run, too"),
    "subspace, epochs": (SUBSPACE | {"public_file": "other.tsv", "public_epochs": "2"}, "by glue.py"),
    "public file alone": ({"public_file": "other.tsv", "preconditioner": "none"}, "for glue.py alone"),
}


@pytest.mark.parametrize("adagrad", ["released", "clean"])
def test_a_head_is_trained_in_the_subspace_of_a_public_file(
    adagrad: str, files: Path, probed_dir: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Full batches; the directions are those of 40 records of another file, which are not trained on."""
    rows = [f"{'a fine' if i % 2 else 'no good'} book number {i}\t{i % 2}" for i in range(40)]
    (files / "public.tsv").write_text("sentence\tlabel\n" + "\n".join(rows) + "\n")
    options = json.dumps({"rank": 4, "adagrad": adagrad})
    given = {"preconditioner_kwargs": options, "public_file": "public.tsv", "max_steps": "30", "feature_norm": "6",
             "head_radius": "5", "expected_batch_size": None}  # fmt: skip
    assert linear_probe.run(arguments(probed_dir, **SUBSPACE, **given)) == 0
    out, err = capsys.readouterr()
    assert "no last-iterate bound; composition of 30 releases" in out and "Noise alone" not in err
    first = (files / "out" / "privacy" / "statement.md").read_text().splitlines()[0]
    assert first.startswith("# Composition of 30 releases, no last-iterate bound: epsilon 8")
    ledger = [json.loads(line) for line in (files / "out/privacy/ledger.jsonl").read_text().splitlines()]
    assert [record["kind"] for record in ledger] == ["header", "plan", "chain", "step"]
    plan = ledger[1]["plan"]
    assert (plan["num_examples"], plan["expected_batch_size"], plan["num_public_records"]) == (120, 120, 40)
    assert plan["adagrad"] == adagrad
    assert len(list((files / "private").rglob("features-*.pt"))) == 1  # those of private records alone
    classify = pipeline("text-classification", model=str(files / "out"), device="cpu")
    found = [answer["label"] for answer in classify(TEXTS[:20])]
    assert sum(label == ("good" if i % 2 == 0 else "bad") for i, label in enumerate(found)) > 15
