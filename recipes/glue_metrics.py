"""GLUE's metrics, by scikit-learn and scipy: the functions that `evaluate`'s metric of GLUE calls."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef, mean_squared_error
from transformers import EvalPrediction

ACCURACY = {"accuracy": accuracy_score}
ACCURACY_AND_F1 = {**ACCURACY, "f1": lambda true, predicted: f1_score(true, predicted, zero_division=0)}
OF_TASK: dict[str | None, dict[str, Callable[..., float]]] = {
    "cola": {"matthews_correlation": matthews_corrcoef},
    "mrpc": ACCURACY_AND_F1,
    "qqp": ACCURACY_AND_F1,
    "stsb": {"pearson": lambda *both: pearsonr(*both)[0], "spearmanr": lambda *both: spearmanr(*both)[0]},
}


def metrics_of(task: str | None, *, is_regression: bool) -> Callable[[EvalPrediction], dict[str, float]]:
    """What `Trainer(compute_metrics=...)` takes; several values are also averaged, as in run_glue.py.

    Args:
        task: GLUE task; None for other data, whose metric is the accuracy, or the squared error of a regression.
    """
    measures = OF_TASK.get(task, {"mse": mean_squared_error} if is_regression else ACCURACY)

    def compute_metrics(p: EvalPrediction) -> dict[str, float]:
        logits = p.predictions[0] if isinstance(p.predictions, tuple) else p.predictions
        predictions = np.squeeze(logits, axis=-1) if is_regression else np.argmax(logits, axis=-1)
        result = {name: float(measure(p.label_ids, predictions)) for name, measure in measures.items()}
        if len(result) > 1:
            result["combined_score"] = float(np.mean(list(result.values())))
        return result

    return compute_metrics
