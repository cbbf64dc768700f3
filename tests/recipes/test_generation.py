"""Scores of generated texts against values computed by hand, and perplexities."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from transformers import EvalPrediction

from recipes.clm import loss_of_records, perplexity_metrics
from recipes.generation import generation_metrics, nist


def test_nist_by_hand() -> None:
    # two words of log2(3) bits each, the pair has none: log2(3) per word, halved as 2 of 3 words are there
    assert nist(["a b"], [["a b c"]]) == pytest.approx(math.log2(3) / 2)
    # 5 words in the references, a twice; "a b" says 1 bit more than a, "b c" and "a b c" nothing; 3 words of 2.5
    expected = (math.log2(5 / 2) + 2 * math.log2(5)) / 3 + 1 / 2
    assert nist(["a b c"], [["a b c", "a d"]]) == pytest.approx(expected)
    assert nist(["x"], [["a b"]]) == 0


def test_bleu_and_rouge_l_by_hand() -> None:
    """Of 4, 3, 2 and 1 n-grams, 3, 2, 1 and half a one (smoothed) match; 3 of 4 words are a common subsequence."""
    found = generation_metrics(["a b c x"], [["a b c d", "y"]])
    assert found["bleu"] == pytest.approx(100 * (3 / 4 * 2 / 3 * 1 / 2 * 1 / 2) ** (1 / 4))
    assert found["rouge_l"] == pytest.approx(75)
    perfect = generation_metrics(["The mat.", "a b c d e"], [["x", "the mat"], ["a b c d e", "y"]])
    assert perfect["rouge_l"] == pytest.approx(100) and perfect["bleu"] < 100  # BLEU alone reads case and full stop


def test_nist_of_one_reference_is_that_of_nltk() -> None:
    nist_score = pytest.importorskip("nltk.translate.nist_score")
    coins, words = random.Random(), ["the", "Cat", "sat", "on", "mat", "a", "3.5"]  # they agree on any texts
    texts, references = ([" ".join(coins.choices(words, k=coins.randint(5, 12))) for _ in range(30)] for _ in "ab")
    expected = nist_score.corpus_nist([[one.split()] for one in references], [text.split() for text in texts], n=5)
    assert nist(texts, [[one] for one in references]) == pytest.approx(expected)


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
