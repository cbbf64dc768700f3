"""How good synthetic rows are, and how near they come to the training records.

`public_scores` reads synthetic rows, which are released, and held-out rows, whose privacy the user declared.
`private_scores` reads the training records without noise: its results stay in the private folder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from sklearn.linear_model import LogisticRegression

COPIED_WORDS = 8  # a run of so many words that a training record has, too


def accuracy(train_NE: np.ndarray, labels: Sequence[int], test_NE: np.ndarray, test_labels: Sequence[int]) -> float:
    """Percent of held-out rows that logistic regression on embeddings gets right; of one label, its share."""
    if len(set(labels)) < 2:
        return 100 * float(np.mean(np.array(test_labels) == labels[0]))
    found = LogisticRegression(C=10.0, max_iter=1000).fit(train_NE, labels)
    return 100 * float(found.score(test_NE, test_labels))


def ngrams(texts: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    split = (text.casefold().split() for text in texts)
    return Counter(gram for words in split for gram in zip(*(words[i:] for i in range(n)), strict=False))


def distinct(texts: Sequence[str], n: int) -> float:
    """Different n-grams over all n-grams."""
    found = ngrams(texts, n)
    return len(found) / max(1, found.total())


def distance(first: Counter, second: Counter) -> float:
    """Total variation between two frequencies, 0 to 1."""
    a, b = max(1, first.total()), max(1, second.total())
    return sum(abs(first[key] / a - second[key] / b) for key in first.keys() | second.keys()) / 2


def public_scores(texts: Sequence[str], held_out: Sequence[str]) -> dict[str, float]:
    """Diversity of the synthetic texts, and their distance from held-out ones, where there are any."""
    found = {f"distinct_{n}": distinct(texts, n) for n in (1, 2, 3)}
    found["mean_words"] = float(np.mean([len(text.split()) for text in texts]))
    if held_out:
        lengths = [Counter(len(text.split()) // 5 for text in some) for some in (texts, held_out)]
        found["distance_of_lengths"] = distance(*lengths)
        for n in (1, 2):
            found[f"distance_of_{n}_grams"] = distance(ngrams(texts, n), ngrams(held_out, n))
    return found


def private_scores(
    texts: Sequence[str], train: Sequence[str], synthetic_NE: np.ndarray, train_NE: np.ndarray, test_NE: np.ndarray
) -> dict[str, float]:
    """Nearness of the synthetic texts to training records, exact: private, and not covered by epsilon.

    Next to each number is the same for held-out rows, where there are any: what records of the same kind have in
    common is no copy.
    """
    known, grams = {text.casefold() for text in train}, ngrams(train, COPIED_WORDS)
    copied = [bool(ngrams([text], COPIED_WORDS).keys() & grams.keys()) for text in texts]
    found = {
        "copies_of_whole_records": float(np.mean([text.casefold() in known for text in texts])),
        f"share_with_{COPIED_WORDS}_words_of_a_record": float(np.mean(copied)),
        "nearest_training_record": float(np.median(largest_product(synthetic_NE, train_NE))),
    }
    if len(test_NE):
        found["nearest_held_out_row"] = float(np.median(largest_product(synthetic_NE, test_NE)))
        found["nearest_training_record_of_held_out_rows"] = float(np.median(largest_product(test_NE, train_NE)))
    return found


def largest_product(of_NE: np.ndarray, among_ME: np.ndarray, at_once: int = 1024) -> np.ndarray:
    """Cosine with the nearest of some embeddings, (N,)."""
    return np.concatenate([(of_NE[i : i + at_once] @ among_ME.T).max(1) for i in range(0, len(of_NE), at_once)])
