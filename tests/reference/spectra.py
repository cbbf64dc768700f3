"""Spectral maps by a full SVD in numpy, one singular value at a time; derivatives by differences of every entry."""

from __future__ import annotations

import math

import numpy as np

COEFFICIENTS = {1: [3 / 2, -1 / 2], 2: [15 / 8, -5 / 4, 3 / 8]}  # of 1 + u / 2 (+ 3 u^2 / 8) with u = 1 - x


def denoised(matrix: np.ndarray, variance: float, values: str) -> np.ndarray:
    """Sum over singular values above the edge, each as Gavish and Donoho have it for its size."""
    u, singular, vh = np.linalg.svd(matrix, full_matrices=False)
    m, n = min(matrix.shape), max(matrix.shape)
    made, b = np.zeros_like(matrix), m / n
    for i, value in enumerate(singular):
        y = value / math.sqrt(variance * n)
        if y <= 1 + math.sqrt(b):
            continue
        if values == "shrink":
            size = math.sqrt((y * y - b - 1) ** 2 - 4 * b) / y
        else:  # the theta whose noisy value y is: y^2 = (1 + theta^2)(b + theta^2) / theta^2
            size = math.sqrt(max(np.roots([1, 1 + b - y * y, b]).real))
        made += size * math.sqrt(variance * n) * np.outer(u[:, i], vh[i])
    return made


def turned(matrix: np.ndarray, iterations: int, degree: int, norm: float | None = None) -> np.ndarray:
    """Newton-Schulz on the singular values alone; `norm` is that of the matrix unless it is given."""
    u, singular, vh = np.linalg.svd(matrix, full_matrices=False)
    values = []
    for value in singular:
        s = value / (np.linalg.norm(matrix) if norm is None else norm)
        for _ in range(iterations):
            s *= sum(c * s ** (2 * k) for k, c in enumerate(COEFFICIENTS[degree]))
        values.append(s)
    return (u * np.array(values)) @ vh


def laplacian_of_turned(matrix: np.ndarray, iterations: int, degree: int, h: float = 1e-3) -> np.ndarray:
    """Sum of the second derivatives by all entries, with the norm held."""
    norm, made = float(np.linalg.norm(matrix)), np.zeros_like(matrix)
    here = turned(matrix, iterations, degree, norm)
    for place in np.ndindex(*matrix.shape):
        moved = np.zeros_like(matrix)
        moved[place] = h
        ahead, behind = (turned(matrix + sign * moved, iterations, degree, norm) for sign in (1, -1))
        made += (ahead + behind - 2 * here) / h**2
    return made


def muon(w, gradients, *, lrs, momentum, scale, iterations, degree, weight_decay=0.0, variances=None):
    """Weights after all gradients; with variances of the noise in them, less the bias."""
    for t, lr in enumerate(lrs, start=1):
        weights = [momentum ** (t - i) for i in range(1, t + 1)]
        average = sum(weight * g for weight, g in zip(weights, gradients, strict=False))
        step = turned(average, iterations, degree)
        if variances is not None:
            variance = sum(weight**2 * v for weight, v in zip(weights, variances, strict=False))
            step = step - variance / 2 * laplacian_of_turned(average, iterations, degree)
        w = w - lr * weight_decay * w - lr * scale * math.sqrt(max(w.shape)) * step
    return w
