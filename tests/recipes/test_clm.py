"""`recipes/clm.py` as a user meets it: flags, one-line errors with exit status 2, and what a run leaves behind."""

from __future__ import annotations

import csv
import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes import clm
from recipes.embedded import build, corpus
from recipes.embedded.corpus import Corpus
from tests.recipes.texts import DOCUMENTS, PAIRS, words

pytestmark = pytest.mark.slow

MODEL, run = "gpt2_dir", clm.run  # for test_refusals


def write_files(folder: Path) -> None:
    """One training and one validation file of each kind, and one without rows."""
    for name, part in (("train", slice(0, 40)), ("dev", slice(0, 12))):
        with open(folder / f"{name}.csv", "w", newline="") as file:
            asked = "" if name == "dev" else ", open"  # held out: no pair is in both
            csv.writer(file).writerows([("mr", "ref"), *((f"{mr}{asked}", ref) for mr, ref in PAIRS[part])])
        (folder / f"{name}.txt").write_text("\n".join(DOCUMENTS[part]) + "\n")
    (folder / "empty.csv").write_text("mr,ref\n")


TINY = {"max_steps": "2", "expected_batch_size": "8", "per_device_eval_batch_size": "5", "use_cpu": "true",
        "disable_tqdm": "true", "report_to": "none", "target_delta": "1e-3", "block_size": "48",
        "save_strategy": "no", "output_dir": "out"}  # fmt: skip


def arguments(model: str, kind: str = "csv", **changes: str | None) -> list[str]:
    return words({"model_name_or_path": model, "train_file": f"train.{kind}", "validation_file": f"dev.{kind}",
                  "target_epsilon": "8", **TINY, **changes})  # fmt: skip


# --- bad input -------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, str | None], str]] = {
    "users and a cut": ({"privacy_unit": "user", "user_id_column": "author", "max_train_samples": "5", "do_train": "true"}, "^error: max_train_samples=5: if one user were removed"),
    "predict": ({"do_predict": "true", "do_train": "true"}, "Use --generate"),
    "generate without evaluation": ({"generate": "true", "do_train": "true"}, "Add --do_eval"),
    "metrics on training records": ({"validation_file": "train.csv"}, "exact values of the training .* Hold out"),
    "block of one": ({"block_size": "1"}, "block_size=1 leaves nothing to predict. Use 2 or more"),
    "nothing to learn": ({"block_size": "4", "do_train": "true"}, "block_size=4: no record of .* Raise --block_size"),
    "beams": ({"num_beams": "0"}, "num_beams=0 is not a positive count"),
    "no room": ({"generate": "true", "max_new_tokens": "64", "do_eval": "true"}, "no room for a prompt.* Use less"),
    "extension": ({"train_file": "train.docx"}, "neither of .csv, .tsv, .json, .jsonl, .txt, .parquet .* Convert"),
    "missing column": ({"prompt_column": "nope"}, "has no column 'nope'. It has: 'mr', 'ref' .its first line.. Needed is a prompt"),
    "other validation": ({"validation_file": "dev.txt"}, "dev.txt has no column 'mr' or 'ref'. It has: 'text'"),
}  # fmt: skip


def test_a_tokenizer_without_an_end_is_refused(
    gpt2_dir: str, files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gpt2_dir)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "endless")
    assert clm.run(arguments(gpt2_dir, tokenizer_name="endless")) == 2
    assert "no end token" in capsys.readouterr().err


# --- whole runs ------------------------------------------------------------------------------------------------------

UNPRIVATIZED = {"loss", "train_loss", "total_flos", "train_runtime", "train_samples_per_second"}


def results_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "out" / "all_results.json").read_text())


def expected_losses(folder: Path, records: list[tuple[str, str]]) -> list[tuple[float, int]]:
    """(summed loss, number of tokens) of each (context, learned text), one at a time, by the saved model."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for context, learned in records:
        before, after = tokenizer(context)["input_ids"], [*tokenizer(learned)["input_ids"], tokenizer.eos_token_id]
        ids = torch.tensor([before + after])
        with torch.no_grad():
            log_probabilities = model(ids).logits[0, :-1].log_softmax(-1)
        losses = -log_probabilities.gather(1, ids[0, 1:, None])[max(len(before) - 1, 0) :, 0]
        found.append((losses.sum().item(), len(losses)))
    return found


def check_perplexities(folder: Path, losses: list[tuple[float, int]]) -> None:
    results = results_of(folder)
    assert results["eval_record_loss"] == pytest.approx(sum(s / n for s, n in losses) / len(losses), rel=1e-4)
    assert results["eval_token_loss"] == pytest.approx(sum(s for s, _ in losses) / sum(n for _, n in losses), rel=1e-4)
    assert results["eval_token_perplexity"] == pytest.approx(math.exp(results["eval_token_loss"]))


def test_pairs_are_trained_and_evaluated(gpt2_dir: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = arguments(gpt2_dir, generate="true", do_train="true", do_eval="true", eval_on_start="true",
                      max_new_tokens="6", num_beams="2", eval_data_privacy="public")  # fmt: skip
    assert clm.run(flags) == 0
    shown, out, results = capsys.readouterr().out, files / "out", results_of(files)
    check_perplexities(out.parent, expected_losses(out, [(f"{mr}\n", ref) for mr, ref in PAIRS[:12]]))
    assert "eval_loss" not in results and results["eval_samples"] == 12 and results["train_samples"] == 40
    assert 0 < results["epsilon"] <= 8
    for name in ("all_results.json", "train_results.json"):
        assert not set(json.loads((out / name).read_text())) & UNPRIVATIZED
    distinct = list(dict.fromkeys(mr for mr, _ in PAIRS[:12]))
    assert results["generate_samples"] == len(distinct) == 8
    assert {"generate_bleu", "generate_rouge_l", "generate_nist"} <= set(results)
    assert len((out / "generations.txt").read_text().splitlines()) == len(distinct)
    assert "before training" in shown and "of the corpus: over all tokens" in shown and "of a record: each" in shown
    assert f"epsilon {results['epsilon']:.3f} at delta 0.001" in shown and "one row: a prompt with its target" in shown
    assert "One record (example) is one row: a prompt" in (out / "privacy" / "statement.md").read_text()
    assert (out / "README.md").exists() and (out / "model.safetensors").exists()


def test_generated_texts_do_not_depend_on_the_batch(
    gpt2_dir: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts of different lengths: padded in one batch, or each alone."""
    texts = []
    for size in ("1", "8"):
        flags = arguments(gpt2_dir, do_eval="true", generate="true", per_device_eval_batch_size=size,
                          max_new_tokens="8", prompt_column="ref", target_column="mr")  # fmt: skip
        assert clm.run(flags) == 0
        texts.append((files / "out" / "generations.txt").read_text())
    assert texts[0] == texts[1] and len(set(texts[0].splitlines())) > 1
    shown = capsys.readouterr().out
    assert "nothing was trained" in shown and "before training" not in shown


def test_adapters_alone_are_saved(gpt2_dir: str, files: Path) -> None:
    assert clm.run(arguments(gpt2_dir, lora_r="2", do_train="true", do_eval="true")) == 0
    out = files / "out"
    assert (out / "adapter_model.safetensors").exists() and not (out / "model.safetensors").exists()
    assert results_of(files)["eval_samples"] == 12


def test_a_preconditioner_learns_from_the_public_file(gpt2_dir: str, files: Path) -> None:
    (files / "public.csv").write_text("mr,ref\n" + "name[X],X is here\n" * 8)
    flags = {"public_file": "public.csv", "public_epochs": "0", "public_batch_size": "8", "max_steps": "2"}
    assert clm.run(arguments(gpt2_dir, preconditioner="adadps", **flags)) == 0
    assert "adadps" in (files / "out" / "privacy" / "statement.md").read_text()


def test_non_private_says_so(gpt2_dir: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert clm.run(arguments(gpt2_dir, non_private="true", target_epsilon=None)) == 0
    assert "NONE (--non_private)" in capsys.readouterr().out
    assert not (files / "out" / "privacy").exists()
    assert AutoModelForCausalLM.from_pretrained(files / "out").dtype == torch.float32  # not the file's half precision


def test_embedded(files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The job without arguments, on little text and with few steps."""
    train, held_out = ([(text, 0) for text in texts] for texts in (DOCUMENTS, DOCUMENTS[:9]))
    tiny = Corpus(train, held_out, [ref for _, ref in PAIRS], ["a.py"] * len(train), ["a.py"] * len(held_out))
    monkeypatch.setattr(corpus, "read_corpus", lambda: tiny)
    monkeypatch.setattr(build, "build_gpt2", functools.partial(build.build_gpt2, num_steps=3))
    flags = {"--max_steps": "2", "--expected_batch_size": "8", "--disable_tqdm": "true", "--use_cpu": "true"}
    assert clm.run([part for flag in flags.items() for part in flag]) == 0
    shown = capsys.readouterr().out
    assert "before training," in shown and "at delta 1e-05 after 2 steps" in shown and "The real thing:" in shown
    (folder,) = (files / "runs").glob("embedded-gpt2-*")
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert len(tokenizer) == model.config.vocab_size
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == model.config.eos_token_id
    assert tokenizer.model_max_length == model.config.n_positions
