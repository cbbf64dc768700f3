"""How good synthetic rows are, and how near they come to the training records.

`public_scores` reads synthetic rows, which are released, and held-out rows, whose privacy the user declared.
`private_scores` reads the training records without noise: its results stay in the private folder.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from scipy.integrate import trapezoid
from scipy.special import rel_entr
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
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


def distance_of(cells: np.ndarray, histogram: np.ndarray) -> float:
    """Total variation between the cells of rows and a histogram."""
    return distance(Counter(cells.tolist()), Counter(dict(enumerate(histogram.tolist()))))


def mauve(synthetic_NE: np.ndarray, real_ME: np.ndarray, seed: int) -> float:
    """MAUVE of two samples of embeddings, 0 to 1; near 1 where neither has clusters that the other lacks.

    Its size depends on the encoder and on the number of rows: compare values of the same encoder and sizes alone.

    References:
        Pillutla et al. (2021), arXiv:2102.01454; the constants are those of the package mauve-text.
    """
    num = max(2, round(min(len(synthetic_NE), len(real_ME)) / 10))
    reduced = PCA(0.9, svd_solver="full").fit_transform(np.concatenate([real_ME, synthetic_NE]))
    clusters = KMeans(num, n_init=5, random_state=seed).fit_predict(reduced)
    return frontier_area(*(np.bincount(some, minlength=num) for some in np.split(clusters, [len(real_ME)])))


def frontier_area(first: np.ndarray, second: np.ndarray, scale: float = 5.0, num_points: int = 25) -> float:
    """Area under ``exp(-scale * KL)`` of two histograms from their mixtures, 0 to 1."""
    p, q = first / first.sum(), second / second.sum()
    weights = np.linspace(1e-6, 1 - 1e-6, num_points)[:, None]
    mixtures = weights * p + (1 - weights) * q
    of_p, of_q = (np.exp(-scale * rel_entr(part, mixtures).sum(1)) for part in (p, q))
    return float(trapezoid([1.0, *of_p[::-1], 0.0], [0.0, *of_q[::-1], 1.0]))


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
