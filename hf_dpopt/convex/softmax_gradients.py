"""Gradients of softmax regression, in float64.

Shape legend: B = records, K = labels, D = features.
"""

from __future__ import annotations

import math

import torch


def gradient_sum(
    features: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, clipping_norm: float = math.inf
) -> torch.Tensor:
    """Gradient of the summed cross entropies of a batch: ``sum_b (p_b - y_b) x_b^T``, each term clipped.

    In float64: a step has to be a contraction, and the bound leaves each one a room of about ``D / R`` only.

    Args:
        features: features of the records, (B, D); B may be 0.
        labels: labels of the records, (B,).
        weights: weights of the head, float64, (K, D).
        clipping_norm: largest norm of a record's gradient; infinite for no clipping.

    Returns:
        float64, (K, D).
    """
    features_BD = features.double()
    errors_BK = _errors(features_BD, labels, weights)
    if clipping_norm < math.inf:
        norms_B1 = errors_BK.norm(dim=1, keepdim=True) * features_BD.norm(dim=1, keepdim=True)
        errors_BK = errors_BK * (clipping_norm / norms_B1.clamp(min=clipping_norm))
    return errors_BK.T @ features_BD


def record_gradients(features: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Gradients ``(p_b - y_b) x_b^T`` of each record, float64, (B, K, D); arguments as for `gradient_sum`."""
    features_BD = features.double()
    return _errors(features_BD, labels, weights).unsqueeze(2) * features_BD.unsqueeze(1)


def _errors(features_BD: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """``p_b - y_b``, (B, K)."""
    assert labels.shape == features_BD.shape[:1], "one label for each record: others would be spread over the batch"
    errors_BK = torch.softmax(features_BD @ weights.T, dim=1)
    errors_BK[torch.arange(len(labels)), labels] -= 1
    return errors_BK
