"""DP^2 as its paper writes it, one record at a time, in float64: arXiv:2212.00309, Algorithm 1 and its variants."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

Vector = torch.Tensor


def clip(g: Vector, norm: float) -> Vector:
    return g * min(1.0, norm / max(g.norm().item(), 1e-300))


def second_moment(rule: str, v: Vector, x: Vector, beta: float) -> Vector:
    if rule == "rmsprop":
        return beta * v + (1 - beta) * x
    if rule == "adagrad":
        return v + x
    return v + (1 - beta) * torch.sign(x - v) * x


def rank_one(rule: str, kept: tuple[Vector, Vector], x: Vector, beta: float) -> tuple[Vector, Vector]:
    return second_moment(rule, kept[0], x.mean(1), beta), second_moment(rule, kept[1], x.mean(0), beta)


class Moment:
    """v of one tensor; as row and column means if `factored` and it is a matrix."""

    def __init__(self, shape: Sequence[int], rule: str, beta: float, eps: float, factored: bool):
        self.rule, self.beta, self.eps = rule, beta, eps
        self.factored = factored and len(shape) > 1
        self.v = torch.zeros(*shape, dtype=torch.float64)
        if self.factored:
            self.rows, self.columns = torch.zeros(shape[0]).double(), torch.zeros(shape[1]).double()

    def update(self, x: Vector) -> None:
        if self.factored:
            self.rows, self.columns = rank_one(self.rule, (self.rows, self.columns), x, self.beta)
        else:
            self.v = second_moment(self.rule, self.v, x, self.beta)

    def divisor(self) -> Vector:
        if not self.factored:
            return self.v.sqrt() + self.eps
        rows, columns = self.rows.sqrt() + self.eps, self.columns.sqrt() + self.eps
        return rows[:, None] * columns[None, :] / (math.sqrt(self.rows.mean()) + self.eps)


def trajectory(
    visited: list[list[Vector]],
    gradient: Callable[[list[Vector], int], list[Vector]],
    batches: list[list[int]],
    noise: list[list[list[Vector]]],
    *,
    expected: int,
    s1: int,
    s2: int,
    clip_sgd: float,
    clip_adaptive: float,
    rate: float,
    rate_adaptive: float,
    rule: str,
    beta: float,
    eps: float,
    factored: bool = False,
    variance: float = 0.0,
    variant: str = "dp2",
    eps_of: Callable[[int], float] | None = None,
) -> list[list[Vector]]:
    """Weights after every step from the weights before it, and from the releases of all steps before.

    Args:
        visited: weights before every step, one tensor per parameter: rounding of one step does not reach the next.
        gradient: (weights, record) -> gradient of that record, one tensor per parameter.
        batches: records of every step.
        noise: what was added in every step, query and parameter, in units of g / D times its clip norm / `unit`, where
            the unit is `clip_sgd`: the noise of a step with clip norm C is that times C / clip_sgd.
        variance: subtracted from the squared mean of `s1` releases; of the noise in it.
        eps_of: floor of D after a mean of that many releases, where it is not `eps`.
    """
    weights = [w.double() for w in visited[0]]
    moments = [Moment(w.shape, rule, beta, eps, factored) for w in weights]
    sums = [torch.zeros_like(w) for w in weights]
    ones = [torch.ones_like(w) for w in weights]
    divisors, out = ones, []

    def query(records: list[int], by: list[Vector], norm: float, added: list[Vector]) -> list[Vector]:
        total = [torch.zeros_like(w) for w in weights]
        for b in records:
            g = [gi / d for gi, d in zip(gradient(weights, b), by, strict=True)]
            flat = clip(torch.cat([x.flatten() for x in g]), norm)
            for i, part in enumerate(flat.split([x.numel() for x in g])):
                total[i] = total[i] + part.view_as(g[i])
        return [(t + n.double() * norm / clip_sgd) / expected for t, n in zip(total, added, strict=True)]

    def refresh(count: int) -> None:
        nonlocal sums, divisors
        for m, s in zip(moments, sums, strict=True):
            m.update(((s / count) ** 2 - (variance * s1 / count)).clamp(min=0))
        sums, divisors = [torch.zeros_like(w) for w in weights], [m.divisor() for m in moments]

    refreshed, count = False, 0
    for t, records in enumerate(batches):
        weights = [w.double() for w in visited[t]]
        if variant == "extra_query":
            plain = query(records, ones, clip_sgd, noise[t][0])
            second = query(records, divisors, clip_adaptive if refreshed else clip_sgd, noise[t][1])
            sums = [s + g for s, g in zip(sums, plain, strict=True)]
            step = rate_adaptive if refreshed else rate
            weights = [w - step * g for w, g in zip(weights, second, strict=True)]
            if (t + 1) % s1 == 0:
                for m, s in zip(moments, sums, strict=True):
                    m.update(((s / s1) ** 2 - variance).clamp(min=0))
                sums, divisors, refreshed = (
                    [torch.zeros_like(w) for w in weights],
                    [m.divisor() for m in moments],
                    True,
                )
        elif variant == "algorithm2":  # the authors' dp2_rmsprop_ablation1.py, line by line
            plain = query(records, ones, clip_sgd, noise[t][0])
            sums, count = [s + g for s, g in zip(sums, plain, strict=True)], count + 1
            if t % s1 == 0:
                if eps_of is not None:
                    for m in moments:
                        m.eps = eps_of(count)
                refresh(count)
                count, final, step = 0, plain, rate
            else:
                final, step = query(records, divisors, clip_adaptive, noise[t][1]), rate_adaptive
            weights = [w - step * g for w, g in zip(weights, final, strict=True)]
        else:
            position = t % (s1 + s2)
            if position == 0:
                sums, divisors = [torch.zeros_like(w) for w in weights], ones
            if position == s1:
                for m, s in zip(moments, sums, strict=True):
                    m.update(((s / s1) ** 2 - variance).clamp(min=0))
                divisors = [m.divisor() for m in moments]
            adaptive = position >= s1
            norm, step = (clip_adaptive, rate_adaptive) if adaptive else (clip_sgd, rate)
            if variant == "noise_first":
                released = [g / d for g, d in zip(query(records, ones, norm, noise[t][0]), divisors, strict=True)]
            else:
                released = query(records, divisors, norm, noise[t][0])
            sums = [s + g for s, g in zip(sums, released, strict=True)]
            weights = [w - step * g for w, g in zip(weights, released, strict=True)]
        out.append([w.clone() for w in weights])
    return out
