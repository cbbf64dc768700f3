"""Metrics of `recipes/clm.py`: perplexity of records and of tokens, and BLEU, ROUGE-L, NIST of generated texts.

B = records, T = tokens, V = vocabulary.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import EvalPrediction

logger = logging.getLogger(__name__)

IGNORED = -100
Tokens = Sequence[str]

# --- perplexity ------------------------------------------------------------------------------------------------------


def loss_of_records(logits: Any, labels_BT: torch.Tensor, *, shifted: bool = True) -> torch.Tensor:
    """Cross entropy summed over each record's target tokens, and how many those are; (B, 2).

    For `Trainer(preprocess_logits_for_metrics=...)`: what is kept of a batch is two numbers per record, no logits.

    Args:
        shifted: a causal model predicts the label after the one it stands at; a decoder with an encoder that one.
    """
    logits_BTV = logits[0] if isinstance(logits, tuple) else logits
    if shifted:
        logits_BTV, labels_BT = logits_BTV[:, :-1], labels_BT[:, 1:]
    losses_BT = F.cross_entropy(
        logits_BTV.float().flatten(0, 1), labels_BT.flatten(), ignore_index=IGNORED, reduction="none"
    ).view(labels_BT.shape)
    return torch.stack([losses_BT.sum(1), (labels_BT != IGNORED).sum(1).to(losses_BT.dtype)], dim=1)


def perplexity_metrics(p: EvalPrediction) -> dict[str, float]:
    """Losses (nats per token) and perplexities over an evaluation set, whatever the batches were.

    * ``record_*``: the mean over records of each record's mean over its own tokens: what private training optimises. A
      short record weighs as much as a long one.
    * ``token_*``: the mean over all tokens of the set: the perplexity of the corpus, as papers report it.

    Records without a target token are in neither.
    """
    sums_B, counts_B = np.asarray(p.predictions, dtype=np.float64).T
    has_target_B = counts_B > 0
    if not has_target_B.any():
        return {}
    record_loss = float((sums_B[has_target_B] / counts_B[has_target_B]).mean())
    token_loss = float(sums_B.sum() / counts_B.sum())
    return {
        "record_loss": record_loss,
        "record_perplexity": _exp(record_loss),
        "token_loss": token_loss,
        "token_perplexity": _exp(token_loss),
    }


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


# --- generated texts -------------------------------------------------------------------------------------------------


def generation_metrics(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """BLEU and ROUGE-L in percent, NIST, of one text per prompt against all references of that prompt.

    BLEU comes from the package `sacrebleu` and ROUGE-L from `rouge_score` (the ones that `evaluate` wraps) where they
    are installed, else from this module, which gives the same numbers. NIST is always computed here: the usual package
    (`nltk`) takes the best single reference where mteval, and so the results on E2E, take all of them.
    """
    own = {name: importlib.util.find_spec(name) is None for name in ("sacrebleu", "rouge_score")}
    logger.info(
        f"BLEU: {'recipes/clm_metrics.py' if own['sacrebleu'] else 'sacrebleu'}; "
        f"ROUGE-L: {'recipes/clm_metrics.py' if own['rouge_score'] else 'rouge_score'}; NIST: recipes/clm_metrics.py."
    )
    return {
        "bleu": (corpus_bleu if own["sacrebleu"] else _sacrebleu)(predictions, references),
        "rouge_l": (rouge_l if own["rouge_score"] else _rouge_score)(predictions, references),
        "nist": nist(predictions, references),
    }


def _sacrebleu(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    import sacrebleu

    most = max(map(len, references))  # sacrebleu takes the first references of all, the second of all, ...
    streams = [[group[i] if i < len(group) else None for group in references] for i in range(most)]
    return float(sacrebleu.corpus_bleu(list(predictions), streams).score)


def _rouge_score(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"])
    scores = [
        scorer.score_multi(list(group), text)["rougeL"].fmeasure
        for text, group in zip(predictions, references, strict=True)
    ]
    return 100 * float(np.mean(scores))


SYMBOLS = re.compile(r"([\{-\~\[-\` -\&\(-\+\:-\@\/])")
SPLITS = (
    (SYMBOLS, r" \1 "),
    (re.compile(r"([^0-9])([\.,])"), r"\1 \2 "),  # full stop and comma, unless a digit stands before
    (re.compile(r"([\.,])([^0-9])"), r" \1 \2"),  # ... or behind
    (re.compile(r"([0-9])(-)"), r"\1 \2 "),
)
ENTITIES = (("&quot;", '"'), ("&amp;", "&"), ("&lt;", "<"), ("&gt;", ">"))


def tokens_13a(text: str) -> list[str]:
    """Tokens of mteval-v13a, which is sacrebleu's default."""
    text = text.replace("<skipped>", "").replace("-\n", "").replace("\n", " ")
    for entity, character in ENTITIES:
        text = text.replace(entity, character)
    text = f" {text} "
    for pattern, replacement in SPLITS:
        text = pattern.sub(replacement, text)
    return text.split()


def ngrams(tokens: Tokens, n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))


def _most(groups: Sequence[Tokens], n: int) -> Counter[tuple[str, ...]]:
    """n-gram -> the largest number of times that one of the references has it."""
    counts: Counter[tuple[str, ...]] = Counter()
    for tokens in groups:
        counts |= ngrams(tokens, n)
    return counts


def corpus_bleu(predictions: Sequence[str], references: Sequence[Sequence[str]], max_n: int = 4) -> float:
    """BLEU of a corpus with several references per text, in percent, as sacrebleu computes it by default.

    100 * BP * (prod_n p_n)^(1/4); p_n counts an n-gram at most as often as the reference that has it most often; BP is
    exp(1 - r/c) for a total length c below r, the sum of the closest reference lengths (of two, the shorter). An order
    without a match counts as if it had 1/2, 1/4, ... of one ("exp" smoothing).

    References:
        Papineni et al. (2002), doi:10.3115/1073083.1073135; Post (2018), arXiv:1804.08771.
    """
    matches, totals = [0] * max_n, [0] * max_n
    length, reference_length = 0, 0
    for text, group in zip(predictions, references, strict=True):
        tokens, others = tokens_13a(text), [tokens_13a(reference) for reference in group]
        length += len(tokens)
        reference_length += min((abs(len(other) - len(tokens)), len(other)) for other in others)[1]
        for n in range(1, max_n + 1):
            found = ngrams(tokens, n)
            matches[n - 1] += (found & _most(others, n)).total()
            totals[n - 1] += found.total()
    if not any(matches) or not all(totals):
        return 0.0
    smoothing, logs = 1.0, 0.0
    for matched, total in zip(matches, totals, strict=True):
        if matched == 0:
            smoothing /= 2
        logs += math.log((matched or smoothing) / total)
    brevity = min(0.0, 1 - reference_length / length)
    return 100 * math.exp(brevity + logs / max_n)


def rouge_l(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Mean over texts of the best ROUGE-L F1 over the references, in percent; words are lower case [a-z0-9]+.

    F1 = 2PR / (P + R), with P and R the longest common subsequence over the length of text and reference.

    References:
        Lin (2004), https://aclanthology.org/W04-1013, section 3.1; words and F1 as in the package rouge_score.
    """
    scores = []
    for text, group in zip(predictions, references, strict=True):
        words = _words(text)
        scores.append(max(_rouge_l_f1(words, _words(reference)) for reference in group))
    return 100 * float(np.mean(scores))


def _words(text: str) -> list[str]:
    return re.findall("[a-z0-9]+", text.lower())


def _rouge_l_f1(words: Tokens, reference: Tokens) -> float:
    common = longest_common_subsequence(words, reference)
    return 2 * common / (len(words) + len(reference)) if common else 0.0


def longest_common_subsequence(a: Tokens, b: Tokens) -> int:
    """Its length."""
    row = [0] * (len(b) + 1)
    for x in a:
        before = 0  # the row above, one column to the left
        for j, y in enumerate(b, start=1):
            before, row[j] = row[j], before + 1 if x == y else max(row[j], row[j - 1])
    return row[-1]


def nist(predictions: Sequence[str], references: Sequence[Sequence[str]], max_n: int = 5) -> float:
    """NIST-5 of a corpus with several references per text; tokens as for BLEU, case counts.

    sum_n (information of the matched n-grams / number of n-grams) * exp(beta ln^2 min(1, c / r)), where information is
    log2(count of the first n-1 words / count of the n-gram) over all references, r the mean length of the references
    of each text, summed, and beta makes the penalty 1/2 at c/r = 2/3.

    References:
        Doddington (2002), doi:10.3115/1289189.1289273, Eq. 2 and 3; matches over all references as in mteval-v13a.
    """
    tokens = [tokens_13a(text) for text in predictions]
    groups = [[tokens_13a(reference) for reference in group] for group in references]
    counts: Counter[tuple[str, ...]] = Counter()
    for group in groups:
        for reference in group:
            counts[()] += len(reference)
            for n in range(1, max_n + 1):
                counts += ngrams(reference, n)
    score = 0.0
    for n in range(1, max_n + 1):
        information, total = 0.0, 0
        for words, group in zip(tokens, groups, strict=True):
            found = ngrams(words, n)
            total += found.total()
            for ngram, matched in (found & _most(group, n)).items():
                information += matched * math.log2(counts[ngram[:-1]] / counts[ngram])
        score += information / total if total else 0.0
    length = sum(map(len, tokens))
    reference_length = sum(sum(map(len, group)) / len(group) for group in groups)
    if not length or not reference_length:
        return 0.0
    beta = math.log(0.5) / math.log(1.5) ** 2
    return score * math.exp(beta * math.log(min(1.0, length / reference_length)) ** 2)
