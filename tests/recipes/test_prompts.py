"""`glue.py --prompt`: classification by label words in the gap of a template, exactly as the language head says it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2LMHeadModel,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from hf_dpopt import DPConfigError
from recipes import glue
from recipes.classifiers import PromptConfig, PromptForSequenceClassification
from recipes.prompts import TASKS, Prompt, fill, make_prompt, word_ids
from tests.recipes.conftest import save_roberta
from tests.recipes.texts import words

TEXTS = [f"{good} film number {i}" for i, good in enumerate(["a great", "a terrible"] * 20)]
TEMPLATE = "{text} It was {mask}."
WORDS = ["terrible", "great"]


MODEL, run = "masked_dir", glue.run  # for test_refusals


@pytest.fixture(scope="session")
def masked_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small RoBERTa with its masked language head."""
    folder, texts = tmp_path_factory.mktemp("masked"), [*TEXTS, "It was great.", "It was terrible.", "Yes , No ?"]
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.3}
    return save_roberta(folder, RobertaForMaskedLM, texts * 30, **still)


def test_logits_are_those_of_the_language_head_at_the_gap(masked_dir: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(masked_dir)
    lm = RobertaForMaskedLM.from_pretrained(masked_dir).eval()
    ids = word_ids(Prompt(TEMPLATE, tuple(WORDS)), tokenizer)
    put = fill(TEMPLATE, tokenizer, 32)
    rows = [put("a great film"), put("an unusually long title of a film number 7")]
    batch = tokenizer.pad(rows, return_tensors="pt")
    with torch.no_grad():
        whole = lm(**batch).logits  # before the hook is there
        places = [row["input_ids"].index(tokenizer.mask_token_id) for row in rows]
        expected = torch.stack([whole[i, place, ids] for i, place in enumerate(places)])
        model = PromptForSequenceClassification(
            PromptConfig(lm.config, TEMPLATE, ids, tokenizer.mask_token_id, num_labels=2), lm
        ).eval()
        torch.testing.assert_close(model(**batch).logits, expected)
        alone = model(**{name: value[:1] for name, value in tokenizer.pad(rows[:1], return_tensors="pt").items()})
    torch.testing.assert_close(alone.logits, expected[:1])


def test_a_causal_model_is_asked_after_the_last_token(gpt2_dir: str) -> None:
    lm = GPT2LMHeadModel.from_pretrained(gpt2_dir, dtype=torch.float32).eval()
    ids_BT = torch.tensor([[5, 6, 7, 0], [8, 9, 10, 11]])
    mask_BT = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    with torch.no_grad():
        whole = lm(input_ids=ids_BT, attention_mask=mask_BT).logits
        model = PromptForSequenceClassification(PromptConfig(lm.config, "{text} {mask}", [3, 4], num_labels=2), lm)
        found = model.eval()(input_ids=ids_BT, attention_mask=mask_BT).logits
    torch.testing.assert_close(found, torch.stack([whole[0, 2, [3, 4]], whole[1, 3, [3, 4]]]))


def test_long_texts_are_cut_and_the_template_is_not(masked_dir: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(masked_dir)
    for template in ("{text} ? {mask} , {pair}", "{text} {mask} , {pair}"):
        put = fill(template, tokenizer, 24)
        for first, second in (("film " * 50, "a " * 50), ("film", "number " * 50), ("film " * 50, ""), ("", "")):
            ids = put(first, second)["input_ids"]
            assert len(ids) <= 24 and ids.count(tokenizer.mask_token_id) == 1
            assert tokenizer.eos_token_id is None or ids[-1] == tokenizer.eos_token_id
        both = tokenizer.decode(put("film " * 50, "number " * 50)["input_ids"])
        assert both.count("film") > 2 and both.count("number") > 2, "neither text is lost"


def test_a_causal_tokenizer_that_ends_texts_is_asked_before_its_end(gpt2_dir: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gpt2_dir)
    plain = fill("{text} It was {mask}", tokenizer, 24)("a film")
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <end>", special_tokens=[("<end>", tokenizer.eos_token_id)]
    )
    assert tokenizer("a film")["input_ids"][-1] == tokenizer.eos_token_id
    assert fill("{text} It was {mask}", tokenizer, 24)("a film") == plain


def test_a_text_cannot_make_a_gap_or_a_pair_of_its_own(masked_dir: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(masked_dir)
    put = fill("{text} ? {mask} , {pair}", tokenizer, 40)
    ids = put(f"a {tokenizer.mask_token} film {{pair}}", "number")["input_ids"]
    assert ids.count(tokenizer.mask_token_id) == 1
    assert tokenizer.decode(ids).count("number") == 1


@pytest.mark.parametrize("task", TASKS)
def test_the_prompts_of_the_tasks_fit_their_labels(task: str) -> None:
    from recipes.glue_data import GLUE_LABELS

    labels = GLUE_LABELS[task]
    prompt = make_prompt("auto", None, task, labels=labels, is_causal=False)
    is_pair = task not in ("cola", "sst2")
    prompt.check(labels, has_pairs=is_pair, is_causal=False)
    turned = make_prompt("auto", None, task, labels=labels[::-1], is_causal=False)
    assert turned.words == prompt.words[::-1], "words belong to names, not to places"
    if not is_pair:
        make_prompt("auto", None, task, labels=labels, is_causal=True).check(labels, has_pairs=False, is_causal=True)


def make(prompt="auto", words=None, task="sst2", labels=("negative", "positive"), is_causal=False):
    return make_prompt(prompt, words, task, labels=labels, is_causal=is_causal)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: Prompt("no gap {text}", ("a", "b")), "needs {text} and {mask}"),
        (lambda: make(task="stsb"), "no known prompt for stsb"),
        (lambda: make(TEMPLATE), "Add --label_words"),
        (lambda: make(labels=("0", "1")), "Add --label_words"),
        (lambda: make(task="rte", labels=("entailment", "not_entailment"), is_causal=True), "ends in the gap"),
        (lambda: Prompt(TEMPLATE, ("a",)).check(["0", "1"], has_pairs=False, is_causal=False), "one word for each"),
        (lambda: Prompt(TEMPLATE, ("a", "b")).check(["0", "1"], has_pairs=True, is_causal=False), "two texts"),
        (lambda: Prompt(TEMPLATE, ("a", "b")).check(["0", "1"], has_pairs=False, is_causal=True), "has to be its end"),
        (lambda: Prompt(TEMPLATE, ("a", "b")).check(None, has_pairs=False, is_causal=False), "labels are numbers"),
    ],
)
def test_prompts_that_do_not_fit_are_refused(call, words) -> None:
    with pytest.raises(DPConfigError, match=words):
        call()


def test_words_of_several_tokens_are_refused(masked_dir: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(masked_dir)
    with pytest.raises(DPConfigError, match="Use words that are one token"):
        word_ids(Prompt(TEMPLATE, ("unbelievable!?", "great")), tokenizer)
    with pytest.raises(DPConfigError, match="the same token"):
        word_ids(Prompt(TEMPLATE, ("great", "great")), tokenizer)


# --- a run -----------------------------------------------------------------------------------------------------------

FLAGS: dict[str, str | None] = {
    "train_file": "train.tsv", "validation_file": "dev.tsv", "target_epsilon": "8", "max_steps": "2",
    "expected_batch_size": "8", "use_cpu": "true", "disable_tqdm": "true", "report_to": "none",
    "target_delta": "1e-3", "max_seq_length": "32", "output_dir": "out", "label_list": "bad,good",
    "prompt": TEMPLATE, "clipping_norm": "1",
}  # fmt: skip


def write_files(folder: Path) -> None:
    rows = [f"{text}\t{'bad' if 'terrible' in text else 'good'}" for text in TEXTS]
    for name, part in (("train", [f"truly {row}" for row in rows]), ("dev", rows[:10])):
        (folder / f"{name}.tsv").write_text("sentence\tlabel\n" + "\n".join(part) + "\n")


def arguments(model: str, label_words: Sequence[str] = WORDS, **changes: str | None) -> list[str]:
    flags = words({"model_name_or_path": model, **FLAGS, **changes})
    return flags + (["--label_words", *label_words] if label_words else [])


@pytest.mark.parametrize("lora", [False, True])
def test_a_run_is_exact_and_its_model_loads(masked_dir: str, files: Path, caplog, lora: bool) -> None:
    """The self-check compares the clipped sum with a loop over records, and ends the run where they differ."""
    assert glue.run(arguments(masked_dir, **({"lora_r": "2"} if lora else {}))) == 0
    assert (files / "out" / "privacy" / "report.json").exists()
    assert json.loads((files / "out" / "privacy" / "report.json").read_text())["self_check"] == "passed"
    folder = files / "out" / "merged" if lora else files / "out"
    stored = json.loads((folder / "config.json").read_text())
    assert stored["model_type"] not in CONFIG_MAPPING_NAMES and stored["template"] == TEMPLATE
    loaded = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True)
    assert loaded.config.label2id == {"bad": 0, "good": 1} and len(loaded.config.label_word_ids) == 2
    if not lora:
        again = [
            "--model_name_or_path", "out", "--validation_file", "dev.tsv", "--do_eval", "--output_dir", "again",
            "--report_to", "none", "--use_cpu", "true", "--label_list", "bad,good", "--disable_tqdm", "true",
        ]  # fmt: skip
        assert glue.run(again) == 0
        first, second = (json.loads((files / name / "eval_results.json").read_text()) for name in ("out", "again"))
        assert second["eval_loss"] == pytest.approx(first["eval_loss"], rel=1e-4)


def test_a_model_without_a_language_head_is_refused(masked_dir: str, files: Path, capsys) -> None:
    RobertaForSequenceClassification.from_pretrained(masked_dir).save_pretrained(files / "headless")
    AutoTokenizer.from_pretrained(masked_dir).save_pretrained(files / "headless")
    assert glue.run(arguments("headless")) == 2
    assert "has no language head" in capsys.readouterr().err


@pytest.fixture(scope="module")
def prompted_dir(masked_dir: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A saved model that classifies by label words."""
    folder = tmp_path_factory.mktemp("prompted")
    tokenizer = AutoTokenizer.from_pretrained(masked_dir)
    lm = RobertaForMaskedLM.from_pretrained(masked_dir)
    ids = word_ids(Prompt(TEMPLATE, tuple(WORDS)), tokenizer)
    labels = {"num_labels": 2, "label2id": {"bad": 0, "good": 1}, "id2label": {0: "bad", 1: "good"}}
    config = PromptConfig(
        lm.config, TEMPLATE, ids, tokenizer.mask_token_id, pad_token_id=lm.config.pad_token_id, **labels
    )
    PromptForSequenceClassification(config, lm).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    "flags, mend",
    [
        ({"prompt": "{text} {mask}", "label_words": WORDS}, "was trained with the prompt"),
        ({"prompt": TEMPLATE, "label_words": ["great", "terrible"]}, "was trained with the prompt"),
        ({"pooling": "mean"}, "Leave --pooling"),
        ({"warm_start_epsilon": "1"}, "--warm_start_epsilon out"),
        ({"label_list": "bad,good,other"}, "one word for each"),
        ({"text_pair_column": "label", "label_column": "sentence"}, "has|fit|not one of"),
    ],
    ids=str,
)
def test_a_saved_prompt_is_used_for_what_it_was_made_for(prompted_dir, files, capsys, flags, mend) -> None:
    assert glue.run(arguments(prompted_dir, **{"prompt": None, "label_words": (), **flags})) == 2
    assert re.search(mend, capsys.readouterr().err)
    assert not (files / "out").exists()


REFUSED: dict[str, tuple[dict[str, str | None], str]] = {
    "two gaps": ({"prompt": "{text} {mask} {mask}"}, "needs {text} and {mask}"),
    "pooling": ({"pooling": "mean"}, "Leave pooling out"),
    "warm start": ({"warm_start_epsilon": "1"}, "Leave warm_start_epsilon out"),
    "a pair": ({"prompt": "{text} {mask} {pair}"}, "does not fit records of one text"),
}
