"""BLEU, ROUGE-L and NIST against values computed by hand, and against the usual packages where they are installed."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from transformers import EvalPrediction

from recipes import clm_metrics
from recipes.clm_metrics import (
    corpus_bleu,
    loss_of_records,
    nist,
    perplexity_metrics,
    rouge_l,
    tokens_13a,
)


def test_nist_by_hand() -> None:
    # two words of log2(3) bits each, the pair has none: log2(3) per word, halved as 2 of 3 words are there
    assert nist(["a b"], [["a b c"]]) == pytest.approx(math.log2(3) / 2)
    # 5 words in the references, a twice; "a b" says 1 bit more than a, "b c" and "a b c" nothing; 3 words of 2.5
    expected = (math.log2(5 / 2) + 2 * math.log2(5)) / 3 + 1 / 2
    assert nist(["a b c"], [["a b c", "a d"]]) == pytest.approx(expected)
    assert nist(["x"], [["a b"]]) == 0


@pytest.fixture
def corpus() -> tuple[list[str], list[list[str]]]:
    """Random texts of few words, with one to four references; some share nothing."""
    coins = random.Random()  # the packages agree on any texts
    words = ["the", "Cat", "cat's", "sat,", "on", "3.5", "mat.", "4-5", "&", "a"]

    def text() -> str:
        return " ".join(coins.choices(words, k=coins.randint(4, 12)))

    return [text() for _ in range(30)], [[text() for _ in range(coins.randint(1, 4))] for _ in range(30)]


def test_bleu_is_that_of_sacrebleu(corpus: tuple[list[str], list[list[str]]]) -> None:
    pytest.importorskip("sacrebleu")
    assert corpus_bleu(*corpus) == pytest.approx(clm_metrics._sacrebleu(*corpus), abs=1e-9)


def test_rouge_l_is_that_of_rouge_score(corpus: tuple[list[str], list[list[str]]]) -> None:
    pytest.importorskip("rouge_score")
    assert rouge_l(*corpus) == pytest.approx(clm_metrics._rouge_score(*corpus), abs=1e-9)


def test_nist_of_one_reference_is_that_of_nltk(corpus: tuple[list[str], list[list[str]]]) -> None:
    nist_score = pytest.importorskip("nltk.translate.nist_score")
    texts, references = corpus[0], [group[:1] for group in corpus[1]]
    expected = nist_score.corpus_nist(
        [[tokens_13a(r) for r in g] for g in references], list(map(tokens_13a, texts)), n=5
    )
    assert nist(texts, references) == pytest.approx(expected)


def test_perplexity_of_records_and_of_tokens() -> None:
    """One record of 1 token at loss 3, one of 3 tokens at loss 1 each, and one without a target."""
    logits = torch.zeros(3, 4, 2)
    wanted = torch.tensor([3.0, 1.0])  # log(1 + exp(x)) = loss for a logit difference of log(exp(loss) - 1)
    differences = (wanted.exp() - 1).log()
    labels = torch.tensor([[-100, 0, -100, -100], [0, 0, 0, 0], [1, -100, -100, -100]])
    logits[0, :, 1], logits[1, :, 1] = differences[0], differences[1]
    kept = loss_of_records((logits, "past"), labels)
    torch.testing.assert_close(kept, torch.tensor([[3.0, 1.0], [3.0, 3.0], [0.0, 0.0]]))
    found = perplexity_metrics(EvalPrediction(predictions=kept.numpy(), label_ids=labels.numpy()))
    assert found == pytest.approx(
        {"record_loss": 2.0, "record_perplexity": math.e**2, "token_loss": 1.5, "token_perplexity": math.e**1.5}
    )
    assert perplexity_metrics(EvalPrediction(predictions=np.zeros((2, 2)), label_ids=np.zeros((2, 1)))) == {}
