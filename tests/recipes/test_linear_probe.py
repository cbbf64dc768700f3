"""`recipes/linear_probe.py` as a user meets it: a model that pipelines take, one statement, and nothing else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import RobertaConfig, RobertaForSequenceClassification, pipeline

from recipes import linear_probe
from recipes.embedded.build import make_tokenizer

pytestmark = pytest.mark.slow

TEXTS = [f"{good} film number {i}" for i, good in enumerate(["a fine", "no good"] * 60)]
LABELS = [str(1 - i % 2) for i in range(120)]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    make_tokenizer(TEXTS * 3).save_pretrained(folder)
    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=1024, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        initializer_range=0.5,  # else the first token hardly sees the others
        max_position_embeddings=42,
    )  # fmt: skip
    RobertaForSequenceClassification(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rows = [f"{text}\t{label}" for text, label in zip(TEXTS, LABELS, strict=True)]
    for name, part in (("train", rows), ("dev", rows[:20])):
        (tmp_path / f"{name}.tsv").write_text("sentence\tlabel\n" + "\n".join(part) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DPOPT_PRIVATE_DIR", str(tmp_path / "private"))
    return tmp_path


def arguments(model: str, **changes: str) -> list[str]:
    flags = {
        "model_name_or_path": model, "train_file": "train.tsv", "validation_file": "dev.tsv", "target_epsilon": "8",
        "target_delta": "1e-3", "head_radius": "2", "feature_norm": "2", "max_steps": "200", "label_list": "bad,good",
        "expected_batch_size": "40", "use_cpu": "true", "disable_tqdm": "true", "report_to": "none",
        "output_dir": "out", **changes,
    }  # fmt: skip
    return [part for name, value in flags.items() for part in (f"--{name}", value)]


def with_noise(given: list[str], noise_multiplier: str) -> list[str]:
    """Instead of a budget: nothing has to be calibrated."""
    at = given.index("--target_epsilon")
    return [*given[:at], "--noise_multiplier", noise_multiplier, *given[at + 2 :]]


def test_the_head_is_part_of_a_model_that_pipelines_take(
    files: Path, model_dir: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert linear_probe.run(arguments(model_dir, noise_multiplier="0.01", target_epsilon="8")) == 2  # one of both
    assert "exactly one" in capsys.readouterr().err and not (files / "out").exists()
    given = arguments(model_dir, max_steps="3000", head_radius="5", feature_norm="6")
    assert linear_probe.run(with_noise(given, "0.1")) == 0
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


def test_nothing_else_is_written(files: Path, model_dir: str) -> None:
    """In a process with a home and a temporary folder of its own: model, tokenizer, card, ledger, statement."""
    before = {path for path in files.rglob("*") if path.is_file()}
    home, temporary = files / "home", files / "tmp"
    home.mkdir(), temporary.mkdir()
    environment = {
        **os.environ, "HOME": str(home), "TMPDIR": str(temporary), "HF_HOME": str(home / "hf"), "PYTHONPATH": str(
            Path(linear_probe.__file__).parents[1]
        ), "HF_DPOPT_CACHE_DIR": str(home / "cache"),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "recipes.linear_probe", *arguments(model_dir)],
        env=environment, cwd=files, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    made = {path.relative_to(files) for path in files.rglob("*") if path.is_file() and path not in before}
    out = sorted(str(path) for path in made if path.parts[0] == "out")
    assert out == [
        "out/README.md", "out/config.json", "out/model.safetensors", "out/privacy/head.json",
        "out/privacy/ledger.jsonl", "out/privacy/ledger.jsonl.lock", "out/privacy/statement.md", "out/tokenizer.json",
        "out/tokenizer_config.json",
    ]  # fmt: skip
    features, *log = sorted(path.name for path in made if path.parts[0] == "private")
    assert features.startswith("features-") and log == ["lock", "log.jsonl"], "no key or state"
    rest = {path for path in made if path.parts[0] not in ("out", "private")}
    assert all(path.parts[0] == "home" for path in rest), rest  # caches of libraries
    shown = done.stdout + done.stderr
    assert "loss" not in shown.lower()
    assert "Noise alone would carry the 66 weights" in shown  # with 120 records
    ledger = [json.loads(line) for line in (files / "out/privacy/ledger.jsonl").read_text().splitlines()]
    assert [record["kind"] for record in ledger] == ["header", "plan", "chain", "step"]


def test_a_killed_run_is_started_again_and_ends(files: Path, model_dir: str) -> None:
    root = str(Path(linear_probe.__file__).parents[1])
    given = with_noise(arguments(model_dir, max_steps="300000"), "3")
    command = [sys.executable, "-m", "recipes.linear_probe", *given]
    process = subprocess.Popen(
        command,
        cwd=files,
        env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    ledger = files / "out" / "privacy" / "ledger.jsonl"
    while not (ledger.is_file() and '"step"' in ledger.read_text()):
        assert process.poll() is None
        time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert sorted(p.name for p in (files / "out").iterdir()) == ["privacy"]
    assert not (ledger.parent / "statement.md").exists()
    assert linear_probe.run(with_noise(arguments(model_dir), "3")) == 2  # other steps: another mechanism
    assert [p.suffix for p in (files / "private").rglob("*.key")] == [".key"], "what was begun can still go on"


@pytest.mark.parametrize(
    "changes, mend",
    [
        ({"optim": "adamw_torch"}, "Use --optim sgd"),
        ({"optim_args": "momentum=0.9"}, "momentum"),
        ({"filter": "momentum"}, "mixes gradients"),
        ({"noise_mechanism": "blt"}, "correlated noise"),
        ({"lora_r": "4"}, "not convex in an adapter"),
        ({"save_steps": "5", "save_strategy": "steps"}, "Use --save_strategy no"),
        ({"eval_strategy": "steps"}, "Use --eval_strategy no"),
        ({"learning_rate": "1.1"}, "Use at most 1,"),
        ({"eval_data_privacy": "private", "do_eval": "true"}, "prints exact metrics"),
        ({"do_predict": "true"}, "in a pipeline"),
        ({"resume_from_checkpoint": "out"}, "goes on when it is started again"),
        ({"non_private": "true"}, "--noise_multiplier 0"),
        ({"do_train": "false"}, "glue.py --do_eval"),
        ({"push_to_hub": "true"}, "push that"),
        ({"label_smoothing_factor": "0.1"}, "Leave it out"),
        ({"expected_batch_size": "121"}, "more than the 120 records"),
        ({"head_radius": "-1"}, "head_radius=-1"),
    ],
)
def test_refusals_are_one_line_and_write_nothing(
    files: Path, model_dir: str, capsys: pytest.CaptureFixture[str], changes: dict[str, str], mend: str
) -> None:
    assert linear_probe.run(arguments(model_dir, **changes)) == 2
    err = capsys.readouterr().err
    assert mend in err.splitlines()[-1] and err.startswith("error: ") == ("records" not in mend)  # data were read
    assert not (files / "out").exists() and not (files / "private").exists()


def test_a_head_is_trained_in_the_subspace_of_a_public_file(
    files: Path, model_dir: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Full batches; the directions are those of 40 records of another file, which are not trained on."""
    rows = [f"{'a fine' if i % 2 else 'no good'} book number {i}\t{i % 2}" for i in range(40)]
    (files / "public.tsv").write_text("sentence\tlabel\n" + "\n".join(rows) + "\n")
    given = arguments(
        model_dir, preconditioner="subspace", preconditioner_kwargs='{"rank": 4}', public_file="public.tsv",
        max_steps="30", feature_norm="6", head_radius="5",
    )  # fmt: skip
    at = given.index("--expected_batch_size")
    assert linear_probe.run([*given[:at], *given[at + 2 :]]) == 0
    out, err = capsys.readouterr()
    assert "no last-iterate bound; composition of 30 releases" in out and "Noise alone" not in err
    first = (files / "out" / "privacy" / "statement.md").read_text().splitlines()[0]
    assert first.startswith("# Composition of 30 releases, no last-iterate bound: epsilon 8")
    ledger = [json.loads(line) for line in (files / "out/privacy/ledger.jsonl").read_text().splitlines()]
    assert [record["kind"] for record in ledger] == ["header", "plan", "chain", "step"]
    plan = ledger[1]["plan"]
    assert (plan["num_examples"], plan["expected_batch_size"], plan["num_public_records"]) == (120, 120, 40)
    assert len(list((files / "private").rglob("features-*.npy"))) == 1  # those of private records alone
    classify = pipeline("text-classification", model=str(files / "out"), device="cpu")
    found = [answer["label"] for answer in classify(TEXTS[:20])]
    assert sum(label == ("good" if i % 2 == 0 else "bad") for i, label in enumerate(found)) > 15


@pytest.mark.parametrize(
    "changes, mend",
    [
        ({}, "Add --public_file"),
        ({"public_file": "train.tsv"}, "is a file of the private run, too"),
        ({"public_file": "other.tsv", "public_epochs": "2"}, "by glue.py"),
        ({"public_file": "other.tsv", "l2": "0.1"}, "Leave both at 0"),
        ({"public_file": "other.tsv", "optim": "adamw_torch"}, "Use --optim sgd"),
        ({"public_file": "other.tsv", "preconditioner": "none"}, "for glue.py alone"),
    ],
)
def test_refusals_of_a_subspace_are_one_line_and_write_nothing(
    files: Path, model_dir: str, capsys: pytest.CaptureFixture[str], changes: dict[str, str], mend: str
) -> None:
    assert linear_probe.run(arguments(model_dir, **{"preconditioner": "subspace", **changes})) == 2
    err = capsys.readouterr().err
    assert mend in err.splitlines()[-1] and err.startswith("error: ")
    assert not (files / "out").exists() and not (files / "private").exists()


@pytest.mark.parametrize("missing", ["head_radius", "feature_norm"])
def test_a_missing_bound_is_refused(
    files: Path, model_dir: str, capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    given = arguments(model_dir)
    at = given.index(f"--{missing}")
    assert linear_probe.run([*given[:at], *given[at + 2 :]]) == 2
    assert f"Give --{missing}" in capsys.readouterr().err


def test_no_arguments_are_the_embedded_job(files: Path) -> None:
    _, data_args, training_args = linear_probe.parse([])
    assert data_args.embedded and training_args.head_config(30_000).num_steps == linear_probe.EMBEDDED["max_steps"]
