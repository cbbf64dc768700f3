"""The embedded text: the same for everybody, classes about equal, private and public records apart."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hf_dpopt import DPConfigError
from recipes.embedded.build import MAX_TOKENS, build
from recipes.embedded.corpus import LABELS, Corpus, read_corpus

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return read_corpus()


def test_a_library_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DPConfigError, match="Use a Python with sources"):
        read_corpus(tmp_path)


def test_real_corpus(corpus: Corpus) -> None:
    assert len(corpus.train) > 20_000  # private training likes many records
    assert 0.10 < len(corpus.evaluation) / (len(corpus.train) + len(corpus.evaluation)) < 0.14
    for records in (corpus.train, corpus.evaluation):
        counts = Counter(label for _, label in records)
        assert set(counts) == {0, 1, 2}
        assert max(counts.values()) / len(records) < 0.40  # the majority class is no good answer


def test_no_sentence_is_in_two_places(corpus: Corpus) -> None:
    parts = [[t for t, _ in corpus.train], [t for t, _ in corpus.evaluation], corpus.public_text]
    keys = [{text.casefold() for text in part} for part in parts]
    assert len(keys[0]) == len(corpus.train) and len(keys[1]) == len(corpus.evaluation)
    assert not keys[0] & keys[1] and not keys[0] & keys[2] and not keys[1] & keys[2]


def test_model_and_tokenizer_load(tmp_path: Path, corpus: Corpus) -> None:
    folder = build(tmp_path / "model", corpus)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert type(model).__name__ == "RobertaForSequenceClassification"
    assert model.config.label2id == {label: i for i, label in enumerate(LABELS)}
    assert len(tokenizer) == model.config.vocab_size
    assert [tokenizer.pad_token_id, tokenizer.bos_token_id] == [model.config.pad_token_id, model.config.bos_token_id]
    ids = tokenizer("Return the größte of all values. " * 30, truncation=True, return_tensors="pt")
    assert ids["input_ids"].shape == (1, MAX_TOKENS) == (1, tokenizer.model_max_length)
    assert model(**ids).logits.shape == (1, 3)  # the longest input has a position for every token
    short = tokenizer("Return the größte of all.")["input_ids"]
    assert tokenizer.decode(short, skip_special_tokens=True).strip() == "Return the größte of all."


@pytest.mark.slow
def test_the_job_as_a_command(repo: Path, tmp_path: Path, corpus: Corpus) -> None:
    """`python recipes/glue.py` from any folder, without an installed package; two steps instead of all.

    The folder of the model shows that another process, with other hash seeds, reads the same text: the processes of one
    run each read it.
    """
    flags = ["--max_steps", "2", "--expected_batch_size", "64", "--max_eval_samples", "300", "--disable_tqdm", "true"]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(repo / "recipes" / "glue.py"), *flags],
        cwd=tmp_path, env={**environment, "PYTHONHASHSEED": "12345"}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for expected in ("majority class", "accuracy", "at delta 1e-05 after 2 steps", "roberta-base --task_name sst2"):
        assert expected in done.stdout
    (run,) = (tmp_path / "runs").glob("embedded-2*")
    assert (run / "privacy" / "statement.md").exists()
    assert [path.name for path in (tmp_path / "runs").glob("embedded-model-*")] == [f"embedded-model-{corpus.digest}"]
