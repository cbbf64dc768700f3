"""recipes/clm.py with models that have an encoder: sources and targets, whole runs on a tiny T5."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, BartConfig, BartForConditionalGeneration

from hf_dpopt import DPConfigError
from recipes import clm
from recipes.clm_data import SourceTarget, tokenize
from recipes.tables import Table
from tests.recipes.texts import PAIRS, words

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def bart_dir(t5_dir: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Positions of its own, and few of them."""
    folder = str(tmp_path_factory.mktemp("bart") / "model")
    tokenizer = AutoTokenizer.from_pretrained(t5_dir)
    config = BartConfig(
        vocab_size=len(tokenizer), d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16,
        decoder_ffn_dim=16, encoder_attention_heads=2, decoder_attention_heads=2, max_position_embeddings=48,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.eos_token_id, forced_eos_token_id=None,
    )  # fmt: skip
    BartForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


MODEL, run = "t5_dir", clm.run  # for test_refusals


def write_files(folder: Path) -> None:
    for name, rows in (("train", PAIRS[12:]), ("dev", PAIRS[:12])):
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps({"mr": mr, "ref": ref}) for mr, ref in rows))
    (folder / "odd.jsonl").write_text('{"a": "b"}\n')


def arguments(model: str, **changes: str | None) -> list[str]:
    return words({
        "model_name_or_path": model, "train_file": "train.jsonl", "validation_file": "dev.jsonl", "output_dir": "out",
        "prompt_column": "mr", "target_column": "ref", "target_epsilon": "8", "target_delta": "1e-3", "max_steps": "2",
        "per_device_train_batch_size": "8", "use_cpu": "true", "report_to": "none", "save_strategy": "no", **changes,
    })  # fmt: skip


def expected_losses(folder: Path) -> list[tuple[float, int]]:
    """(summed loss, tokens) of each validation record, one at a time, by the saved model."""
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for mr, ref in PAIRS[:12]:
        source, target = ([*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in (mr, ref))
        with torch.no_grad():
            loss = model(input_ids=torch.tensor([source]), labels=torch.tensor([target])).loss
        found.append((loss.item() * len(target), len(target)))
    return found


def test_a_run_trains_evaluates_and_generates(t5_dir: str, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = arguments(t5_dir, do_train="true", do_eval="true", generate="true", max_new_tokens="6", num_beams="2")
    assert clm.run(flags) == 0
    out = files / "out"
    results, losses = json.loads((out / "all_results.json").read_text()), expected_losses(out)
    assert results["eval_token_loss"] == pytest.approx(sum(s for s, _ in losses) / sum(n for _, n in losses), rel=1e-4)
    assert results["eval_record_loss"] == pytest.approx(sum(s / n for s, n in losses) / len(losses), rel=1e-4)
    assert results["eval_token_perplexity"] == pytest.approx(math.exp(results["eval_token_loss"]))
    assert 0 < results["epsilon"] <= 8 and "train_loss" not in results
    assert len((out / "generations.txt").read_text().splitlines()) == results["generate_samples"] == 8
    assert "one row: a source of at most 64 tokens with its target" in (out / "privacy/statement.md").read_text()
    shown = capsys.readouterr().out
    assert f"epsilon {results['epsilon']:.3f} at delta 0.001" in shown and "NONE" not in shown and "wall time" in shown
    assert not {"train_runtime", "train_samples_per_second", "train_loss", "total_flos"} & results.keys()


def test_public_sources_and_targets_are_mixed_in(t5_dir: str, files: Path) -> None:
    (files / "public.jsonl").write_text('{"mr": "name[X]", "ref": "X is here"}\n' * 8)
    flags = {"public_file": "public.jsonl", "public_epochs": "0", "public_batch_size": "8", "optim": "sgd"}
    assert clm.run(arguments(t5_dir, do_train="true", public_mirror_descent="cosine", **flags)) == 0
    report = json.loads((files / "out" / "privacy" / "report.json").read_text())
    assert "mirror" in json.dumps(report).lower()


def test_texts_that_leave_no_room_are_refused_before_training(
    bart_dir: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = arguments(bart_dir, do_train="true", do_eval="true", generate="true", max_new_tokens="48")
    assert clm.run(flags) == 2
    assert "leaves no room" in capsys.readouterr().err and not (files / "out").exists()


def test_special_tokens_are_those_of_the_tokenizer(t5_dir: str) -> None:
    """BART's begins every text with a start token, which its decoder is to learn."""
    tokenizer = AutoTokenizer.from_pretrained(t5_dir)
    start, end = tokenizer.convert_tokens_to_ids("a"), tokenizer.eos_token_id
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="a $A <|endoftext|>", special_tokens=[("a", start), ("<|endoftext|>", end)]
    )
    kind = SourceTarget("{mr}", "ref", separator="", block_size=4)
    (record,) = kind.records({"mr": ["bcdefgh"], "ref": ["b"]}, tokenizer, 9)
    assert record.input_ids[0] == record.labels[0] == start and record.input_ids[-1] == record.labels[-1] == end
    assert record.labels.count(end) == 1 and len(record.input_ids) == 4


def test_sources_and_targets_are_cut_apart(t5_dir: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(t5_dir)
    kind = SourceTarget("{mr}", "ref", separator="", block_size=4)
    table = Table("rows", {"mr": ["a b c d e f g h", "a", "b"], "ref": ["h g f e d c b a", "b", ""]})
    split = tokenize(table, kind, tokenizer, block_size=3)
    long, short, empty = split.dataset
    assert len(long["input_ids"]) == 4 and len(long["labels"]) == 3 and split.num_cut == 1
    assert long["input_ids"][-1] == tokenizer.eos_token_id != long["labels"][-1]
    assert short["labels"] == [*tokenizer("b")["input_ids"], tokenizer.eos_token_id]
    assert empty["labels"] == [tokenizer.eos_token_id] and split.num_without_target == 0


REFUSED = {
    "no model": ({"model_name_or_path": None}, "Add --model_name_or_path"),
    "columns": (
        {"prompt_column": None, "target_column": None, "train_file": "odd.jsonl"},
        "no kind of data is recognised",
    ),
    "missing column": ({"prompt_column": "nope"}, "has no column 'nope'"),
    "plain text": ({"text_column": "ref", "prompt_column": None, "target_column": None}, "needs prompts and targets"),
    "no privacy": ({"target_epsilon": None, "do_train": "true"}, "Add --target_epsilon 8"),
    "metrics on training records": ({"validation_file": "train.jsonl", "do_train": "true"}, "exact values"),
}


def test_padding_that_is_the_end_is_refused(gpt2_dir: str, t5_dir: str, files: Path) -> None:
    with pytest.raises(DPConfigError, match="end token and a padding token that differ"):
        clm.main(arguments(t5_dir, tokenizer_name=gpt2_dir, do_train="true"))
