"""Optimizers as sums over the whole history of gradients, in float64: nothing is carried from step to step."""

from __future__ import annotations

import torch


class StepNoise:
    """A noise level whose variance differs from step to step, as that of correlated noise does."""

    def __init__(self, variances):
        self.variances, self.step = list(variances), 0

    def variance(self) -> float:
        return self.variances[self.step]

    def covariance(self, lag: int) -> float:
        return 0.0


class ExponentialAverage:
    """The simplest filter: ``m = beta m + (1 - beta) g``, bias-corrected. `seen` keeps what it was given."""

    def __init__(self, beta: float, dtype: torch.dtype = torch.float32):
        self.beta, self.dtype, self.steps, self.averages, self.seen = beta, dtype, 0, {}, []

    def update(self, gradients):
        self.seen.append({name: g.clone() for name, g in gradients.items()})
        assert self.steps == 0 or set(gradients) == set(self.averages), "the tensors of a filter are fixed"
        self.steps += 1
        for name, g in gradients.items():
            old = self.averages.get(name, torch.zeros_like(g, dtype=self.dtype)).to(g.dtype)
            self.averages[name] = (self.beta * old + (1 - self.beta) * g).to(self.dtype)
        return {name: self.averages[name].to(g.dtype) / (1 - self.beta**self.steps) for name, g in gradients.items()}

    def state_dict(self):
        return {"steps": self.steps, "averages": dict(self.averages)}

    def load_state_dict(self, state):
        self.steps, self.averages = state["steps"], dict(state["averages"])


def average_weights(beta: float, num_steps: int) -> torch.Tensor:
    """Weights of steps 1 ... num_steps in a bias-corrected exponential average; they sum to 1."""
    w = torch.tensor([beta ** (num_steps - i) for i in range(1, num_steps + 1)], dtype=torch.float64)
    return w / w.sum()


def _weighted(weights, values):
    return sum(w * v for w, v in zip(weights.tolist(), values, strict=True))


def adam_direction(history, *, betas, eps, variances=None, variance_floor=None, filtered=None):
    """Adam's direction after gradients `history`; `filtered` are the weights of a filter that replaces the first."""
    first = average_weights(betas[0], len(history)) if filtered is None else filtered
    second = average_weights(betas[1], len(history))
    m, v = _weighted(first, history), _weighted(second, [g**2 for g in history])
    if variances is None:
        return m / (v.sqrt() + eps)
    phi = _weighted(second, variances)
    floor = phi * (2 * (second**2).sum().item()) ** 0.5 if variance_floor is None else variance_floor
    return m / ((v - phi).clamp(min=floor).sqrt() + eps)


def adam(w, gradients, *, lrs, weight_decay=0.0, variances=None, filter_beta=None, **options):
    """Weights after all gradients, by (AdamW, DP-AdamBC) with the exponential average `filter_beta` as filter."""
    w, gradients = w.double(), [g.double() for g in gradients]
    for t, lr in enumerate(lrs, start=1):
        filtered = None if filter_beta is None else average_weights(filter_beta, t)
        known = None if variances is None else variances[:t]
        d = adam_direction(gradients[:t], variances=known, filtered=filtered, **options)
        w = w - lr * weight_decay * w - lr * d
    return w


def rmsprop(
    w, gradients, *, lrs, eps, alpha=1.0, weight_decay=0.0, variances=None, variance_floor=None, filter_beta=None
):
    """With alpha 1 it is AdaGrad, whose squares are summed and not averaged."""
    w, gradients, squares = w.double(), [g.double() for g in gradients], []
    for t, lr in enumerate(lrs, start=1):
        decay = weight_decay * w
        squares.append((gradients[t - 1] + decay) ** 2)
        numerator = gradients[t - 1]
        if filter_beta is not None:
            numerator = _weighted(average_weights(filter_beta, t), gradients[:t])
        shares = average_weights(alpha, t)
        weights = shares * (t if alpha == 1 else 1 - alpha**t)  # no bias correction
        v = _weighted(weights, squares)
        if variances is not None:
            u = _weighted(weights, variances[:t])
            spread = (2 * (shares**2).sum().item()) ** 0.5
            v = (v - u).clamp(min=u * spread if variance_floor is None else variance_floor)
        w = w - lr * (numerator + decay) / (v.sqrt() + eps)
    return w


def top_singular_vectors(gradient: torch.Tensor, rank: int) -> torch.Tensor:
    """On the shorter side (the right one of a square), by a full SVD, with signs fixed column by column."""
    u, _, vh = torch.linalg.svd(gradient.double(), full_matrices=False)
    vectors = u if gradient.shape[0] < gradient.shape[1] else vh.mT
    columns = []
    for j in range(rank):
        column = vectors[:, j]
        largest = max(range(len(column)), key=lambda i: abs(column[i].item()))
        columns.append(column if column[largest] > 0 else -column)
    return torch.stack(columns, dim=1)


def galore(
    w,
    gradients,
    *,
    lrs,
    rank,
    refresh_every,
    scale,
    weight_decay=0.0,
    variances=None,
    filter_beta=None,
    **options,
):
    w, history, known = w.double(), [], []
    is_wide = w.shape[0] < w.shape[1]
    for t, lr in enumerate(lrs, start=1):
        g = gradients[t - 1].double()
        if (t - 1) % refresh_every == 0:
            p = top_singular_vectors(g, rank)
        history.append(p.mT @ g if is_wide else g @ p)
        known.append(None if variances is None else variances[t - 1])
        filtered = None if filter_beta is None else average_weights(filter_beta, len(history))
        d = adam_direction(history, variances=None if variances is None else known, filtered=filtered, **options)
        w = w - lr * weight_decay * w - lr * scale * (p @ d if is_wide else d @ p.mT)
    return w
