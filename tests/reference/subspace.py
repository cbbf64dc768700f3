"""Slow, obvious float64 references for public subspaces: everything in the p dimensions of the parameters, no V kept."""

from __future__ import annotations

import math

import torch


def matrix(per_record: dict[str, torch.Tensor]) -> torch.Tensor:
    """X: one row per record, all parameters side by side; (m, p)."""
    return torch.cat([per_record[name].double().reshape(len(per_record[name]), -1) for name in per_record], dim=1)


def vector(grads: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([g.double().reshape(-1) for g in grads.values()])


def top_directions(per_record: dict[str, torch.Tensor], rank: int) -> torch.Tensor:
    """(p, k), by the singular value decomposition of X itself."""
    return torch.linalg.svd(matrix(per_record), full_matrices=False).Vh[:rank].T


class AmbientAdaGrad:
    """Full-matrix AdaGrad of projected gradients as a p x p matrix, with the noise's covariance taken off."""

    def __init__(self, rank: int):
        self.rank, self.variances = rank, []
        self.moment: torch.Tensor | None = None

    def step(self, released: torch.Tensor, projector: torch.Tensor, variance: float, eps: float) -> torch.Tensor:
        g = projector @ released
        before = torch.zeros_like(projector) if self.moment is None else projector @ self.moment @ projector
        self.moment = before + torch.outer(g, g) - variance * projector
        self.variances.append(variance)
        level = 2 * math.sqrt(self.rank * sum(v * v for v in self.variances)) + self.rank * max(self.variances)
        values, vectors = torch.linalg.eigh(self.moment)
        update = torch.zeros_like(g)
        for value, direction in zip(values, vectors.T, strict=True):
            if value > max(level, 1e-12 * values[-1]):
                update += direction * (direction @ g) / (value.sqrt() + eps)
        return update


def clipped_coordinates(records: list[dict[str, torch.Tensor]], directions: torch.Tensor, clip: float, rule: str):
    """``sum_b clip(V^T g_b)`` by a loop; `directions` is V, (p, k)."""
    total = torch.zeros(directions.shape[1], dtype=torch.float64)
    for record in records:
        u = directions.T @ vector(record)
        norm = u.norm().item()
        if not math.isfinite(norm):
            continue
        total += u * (min(1.0, clip / max(norm, 1e-300)) if rule == "flat" else clip / (norm + 0.01))
    return total
