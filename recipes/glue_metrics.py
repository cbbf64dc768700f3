"""GLUE's metrics: through `evaluate` where the hub can be reached, else the same numbers computed here."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
from transformers import EvalPrediction

from recipes import hub

logger = logging.getLogger(__name__)

Metric = Callable[[np.ndarray, np.ndarray], dict[str, float]]


def accuracy(predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
    """Share of equal entries."""
    return {"accuracy": float((predictions == references).mean())}


def accuracy_and_f1(predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
    """Accuracy, and F1 of class 1: 2 TP / (2 TP + FP + FN), 0 if there is nothing to find."""
    true_positives = float(((predictions == 1) & (references == 1)).sum())
    wrong = float(((predictions == 1) != (references == 1)).sum())
    f1 = 2 * true_positives / (2 * true_positives + wrong) if true_positives else 0.0
    return {**accuracy(predictions, references), "f1": f1}


def matthews_correlation(predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
    """Correlation of two classifications, for any number of classes; 0 if one of them is constant.

    References:
        Gorodkin (2004), doi:10.1016/j.compbiolchem.2004.09.006, Eq. 8.
    """
    classes = np.union1d(predictions, references)
    x = (predictions[:, None] == classes).astype(float)
    y = (references[:, None] == classes).astype(float)
    x, y = x - x.mean(axis=0), y - y.mean(axis=0)
    spread = float((x * x).sum() * (y * y).sum())
    return {"matthews_correlation": float((x * y).sum()) / spread**0.5 if spread > 0 else 0.0}


def pearson_and_spearman(predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
    """Linear correlation of the values and of their ranks."""
    from scipy.stats import pearsonr, spearmanr

    return {
        "pearson": float(pearsonr(predictions, references)[0]),
        "spearmanr": float(spearmanr(predictions, references)[0]),
    }


def mean_squared_error(predictions: np.ndarray, references: np.ndarray) -> dict[str, float]:
    return {"mse": float(np.square(predictions - references).mean())}


def offline_metric(task: str | None, *, is_regression: bool) -> Metric:
    """The metric GLUE defines for a task; accuracy, or squared error, for other data."""
    special: dict[str | None, Metric] = {
        "cola": matthews_correlation,
        "stsb": pearson_and_spearman,
        "mrpc": accuracy_and_f1,
        "qqp": accuracy_and_f1,
    }
    return special.get(task, mean_squared_error if is_regression else accuracy)


def load_metric(task: str | None, *, is_regression: bool, cache_dir: str | None = None) -> Metric:
    """`evaluate`'s metric, or the offline equivalent, said in the log."""
    offline = offline_metric(task, is_regression=is_regression)
    if not hub.is_reachable():
        logger.warning(
            "The hub cannot be reached, so metrics are computed by recipes/glue_metrics.py instead of `evaluate`."
        )
        return offline
    try:
        import evaluate

        name = ("glue", task) if task is not None else ("mse",) if is_regression else ("accuracy",)
        module = evaluate.load(*name, cache_dir=cache_dir)
    except (OSError, ValueError, ImportError) as error:
        logger.warning(f"`evaluate` cannot load its metric ({error}); recipes/glue_metrics.py computes it instead.")
        return offline
    return lambda predictions, references: module.compute(predictions=predictions, references=references)


def compute_metrics_with(metric: Metric, *, is_regression: bool) -> Callable[[EvalPrediction], dict[str, float]]:
    """What `Trainer(compute_metrics=...)` takes; several values are also averaged, as in run_glue.py."""

    def compute_metrics(p: EvalPrediction) -> dict[str, float]:
        logits = p.predictions[0] if isinstance(p.predictions, tuple) else p.predictions
        predictions = np.squeeze(logits, axis=-1) if is_regression else np.argmax(logits, axis=-1)
        result = dict(metric(predictions, p.label_ids))
        if len(result) > 1:
            result["combined_score"] = float(np.mean(list(result.values())))
        return result

    return compute_metrics
