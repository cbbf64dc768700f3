"""Metrics of `recipes/clm.py`: perplexity of records and of tokens, and BLEU, ROUGE-L, NIST of generated texts.

B = records, T = tokens, V = vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import reduce
from operator import and_, or_
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import EvalPrediction

IGNORED = -100

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
    """BLEU and mean ROUGE-L (F1 of the best reference) in percent, and NIST-5, of one text per prompt.

    Args:
        predictions: generated texts.
        references: all references of each text.
    """
    import sacrebleu  # here: these packages take a second to load, and few runs generate
    from rouge_score.rouge_scorer import RougeScorer

    most = max(map(len, references))  # sacrebleu takes the first references of all texts, then the second, ...
    streams = [[group[i] if i < len(group) else None for group in references] for i in range(most)]
    scorer, pairs = RougeScorer(["rougeL"]), zip(references, predictions, strict=True)
    return {
        "bleu": float(sacrebleu.corpus_bleu(list(predictions), streams).score),
        "rouge_l": 100 * float(np.mean([scorer.score_multi(list(r), p)["rougeL"].fmeasure for r, p in pairs])),
        "nist": nist(predictions, references),
    }


def nist(predictions: Sequence[str], references: Sequence[Sequence[str]], max_n: int = 5) -> float:
    """NIST-5 as mteval-v13a computes it, on sacrebleu's 13a tokens; case counts.

    Not from a package: `nltk.translate.nist_score` matches an n-gram against the best single reference, where mteval,
    and with it all results on E2E, matches it against all references. With one reference both give the same.

    References:
        Doddington (2002), doi:10.3115/1289189.1289273, Eq. 2 and 3.
    """
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    tokenize = Tokenizer13a()
    texts = [tokenize(text).split() for text in predictions]
    groups = [[tokenize(reference).split() for reference in group] for group in references]
    counts = Counter({(): sum(len(reference) for group in groups for reference in group)})
    score = 0.0
    for n in range(1, max_n + 1):
        found = [_ngrams(text, n) for text in texts]
        own = [[_ngrams(reference, n) for reference in group] for group in groups]
        counts.update(ngram for group in own for reference in group for ngram in reference.elements())
        known = [reduce(or_, group) for group in own]
        matches = [match for pair in zip(found, known, strict=True) for match in and_(*pair).items()]
        information = sum(times * math.log2(counts[ngram[:-1]] / counts[ngram]) for ngram, times in matches)
        score += information / max(1, sum(map(Counter.total, found)))
    length, wanted = sum(map(len, texts)), sum(np.mean([len(reference) for reference in group]) for group in groups)
    if not length or not wanted:
        return 0.0
    beta = math.log(0.5) / math.log(1.5) ** 2  # the penalty is 1/2 at two thirds of the references' length
    return score * math.exp(beta * math.log(min(1.0, length / wanted)) ** 2)


def _ngrams(words: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(zip(*(words[i:] for i in range(n)), strict=False))
