"""Each GLUE task has GLUE's metric, on predictions whose score is known."""

from __future__ import annotations

import numpy as np
import pytest
from transformers import EvalPrediction

from recipes.glue import metrics_of

PREDICTED, TRUE = np.array([1, 1, 1, 0, 0, 0, 0, 1]), np.array([1, 1, 0, 0, 0, 0, 1, 1])
ACCURACY, F1 = {"accuracy": 0.75}, {"f1": 0.75}  # 3 of 4 that are 1 are found, and 3 of 4 that were found are 1


def score(task: str | None, predicted: np.ndarray, true: np.ndarray, *, is_regression: bool = False) -> dict:
    logits = predicted[:, None] if is_regression else np.eye(2)[predicted]
    given = EvalPrediction(predictions=(logits, "hidden states"), label_ids=true)
    return metrics_of(task, is_regression=is_regression)(given)


@pytest.mark.parametrize(
    "task, expected",
    [
        ("cola", {"matthews_correlation": 0.5}),
        ("mrpc", ACCURACY | F1 | {"combined_score": 0.75}),
        ("qqp", ACCURACY | F1 | {"combined_score": 0.75}),
        *((task, ACCURACY) for task in ("sst2", "mnli", "qnli", "rte", "wnli", None)),
    ],
)
def test_each_task_has_glues_metric(task: str | None, expected: dict) -> None:
    assert score(task, PREDICTED, TRUE) == pytest.approx(expected)


def test_scores_have_correlations_or_a_squared_error() -> None:
    predicted, true = np.array([1.0, 3.0, 2.0]), np.array([1.0, 1.5, 4.0])
    found = score("stsb", predicted, true, is_regression=True)
    expected = {"pearson": np.corrcoef(predicted, true)[0, 1], "spearmanr": 0.5}
    assert found == pytest.approx(expected | {"combined_score": np.mean(list(expected.values()))})
    assert score(None, predicted, true, is_regression=True) == pytest.approx({"mse": (1.5**2 + 2**2) / 3})


def test_constant_predictions_have_a_score_of_zero() -> None:
    zeros = np.zeros(4, dtype=int)
    assert score("cola", zeros, np.array([0, 1, 0, 1])) == {"matthews_correlation": 0.0}
    assert score("mrpc", zeros, zeros) == {"accuracy": 1.0, "f1": 0.0, "combined_score": 0.5}
