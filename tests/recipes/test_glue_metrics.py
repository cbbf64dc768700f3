"""The offline metrics equal hand-computed values, scikit-learn's and scipy's definitions (which `evaluate` calls)."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef
from transformers import EvalPrediction

from recipes.glue_metrics import (
    accuracy_and_f1,
    compute_metrics_with,
    load_metric,
    matthews_correlation,
    offline_metric,
    pearson_and_spearman,
)

PREDICTED = np.array([1, 1, 1, 0, 0, 0, 0, 1])
TRUE = np.array([1, 1, 0, 0, 0, 0, 1, 1])


@pytest.mark.parametrize("num_classes", [2, 3])
def test_equal_to_scikit_learn_and_scipy(num_classes: int) -> None:
    """Any draw must agree, so the generator is not seeded."""
    generator = np.random.default_rng()
    for _ in range(20):
        predicted, true = generator.integers(num_classes, size=(2, 50))
        assert matthews_correlation(predicted, true)["matthews_correlation"] == pytest.approx(
            matthews_corrcoef(true, predicted), abs=1e-12
        )
        scores = pearson_and_spearman(predicted + 0.1, true)
        assert scores["pearson"] == pytest.approx(stats.pearsonr(predicted, true)[0])
        assert scores["spearmanr"] == pytest.approx(stats.spearmanr(predicted, true)[0])
        if num_classes == 2:
            found = accuracy_and_f1(predicted, true)
            assert found == pytest.approx(
                {"accuracy": accuracy_score(true, predicted), "f1": f1_score(true, predicted, zero_division=0)}
            )


def test_degenerate_predictions() -> None:
    ones, zeros = np.ones(4, dtype=int), np.zeros(4, dtype=int)
    assert matthews_correlation(ones, np.array([0, 1, 0, 1])) == {"matthews_correlation": 0.0}
    assert accuracy_and_f1(zeros, zeros) == {"accuracy": 1.0, "f1": 0.0}


@pytest.mark.parametrize(
    "task, keys",
    [
        ("cola", {"matthews_correlation"}),
        ("stsb", {"pearson", "spearmanr", "combined_score"}),
        ("mrpc", {"accuracy", "f1", "combined_score"}),
        ("qqp", {"accuracy", "f1", "combined_score"}),
        *((task, {"accuracy"}) for task in ("sst2", "mnli", "qnli", "rte", "wnli", None)),
    ],
)
def test_each_task_has_glues_metric(task: str | None, keys: set[str]) -> None:
    is_regression = task == "stsb"
    compute = compute_metrics_with(offline_metric(task, is_regression=is_regression), is_regression=is_regression)
    logits = np.array([[0.3], [0.2], [0.9]]) if is_regression else np.array([[2.0, 1.0], [0.0, 1.0], [0.0, 3.0]])
    labels = np.array([0.1, 0.2, 0.7]) if is_regression else np.array([0, 1, 1])
    result = compute(EvalPrediction(predictions=(logits, "hidden states"), label_ids=labels))
    assert set(result) == keys
    if task != "stsb":
        assert set(result.values()) == {1.0}


def test_regression_without_task_is_squared_error() -> None:
    compute = compute_metrics_with(offline_metric(None, is_regression=True), is_regression=True)
    assert compute(EvalPrediction(predictions=np.array([[1.0], [3.0]]), label_ids=np.array([1.0, 1.0]))) == {
        "mse": 2.0
    }


def test_offline_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        metric = load_metric("mrpc", is_regression=False)
    assert "instead of `evaluate`" in caplog.text
    assert metric(PREDICTED, TRUE) == {"accuracy": 0.75, "f1": 0.75}
