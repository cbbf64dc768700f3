"""Second moments of averaged gradients: per coordinate, or as the means of rows and columns.

Shape legend: P / Q = rows / columns of a parameter (its first dimension, the rest).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from hf_dpopt.clipping.scaling import Diagonal, Factored
from hf_dpopt.common.checks import check_choice, check_positive, check_real
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.sharding import whole_of
from hf_dpopt.preclip.preconditioner import check_keys
from hf_dpopt.preclip.scale import Dividing

Rule = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]


def _rmsprop(v: torch.Tensor, x: torch.Tensor, beta: float) -> torch.Tensor:
    return v.mul_(beta).add_(x, alpha=1 - beta)


def _adagrad(v: torch.Tensor, x: torch.Tensor, beta: float) -> torch.Tensor:
    return v.add_(x)


def _yogi(v: torch.Tensor, x: torch.Tensor, beta: float) -> torch.Tensor:
    return v.add_(torch.sign(x - v).mul_(x), alpha=1 - beta)


SMALLEST = 1e-30

RULES: dict[str, Rule] = {"rmsprop": _rmsprop, "adagrad": _adagrad, "yogi": _yogi}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DividingByMoment(Dividing):
    """Base of the preconditioners that divide by ``sqrt(v) + eps``.

    Args:
        second_moment: "rmsprop", "adagrad" or "yogi".
        eps: floor of D, in gradient units; > 0.
        beta: decay of the second moment, in [0, 1).
        factored: D = rows columns^T (see `SecondMoment`), which keeps ghost norms: any model size.
    """

    second_moment: str = "rmsprop"
    eps: float | None = None
    beta: float = 0.9
    factored: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("second_moment", self.second_moment, RULES)
        check_real("beta", self.beta, "a number in [0, 1); 0.9 is usual")
        if not 0 <= self.beta < 1:
            raise DPConfigError(f"beta={self.beta} is outside [0, 1). Use 0.9, or 0 to forget earlier phases.")
        check_positive(eps=self.eps)
        if self.eps is not None and self.eps < SMALLEST:
            raise DPConfigError(
                f"eps={self.eps} is so small that 1 / eps has no place in float32. Use {SMALLEST:g} or more."
            )
        if not isinstance(self.factored, bool):
            raise DPConfigError(f"factored={self.factored!r} is neither true nor false. Use one of them.")


class SecondMoment:
    r"""v of ``x = max(g^2 - noise variance, 0)``, and D = sqrt(v) + eps.

    RMSProp: ``v = beta v + (1 - beta) x``. AdaGrad: ``v += x``. Yogi: ``v += (1 - beta) sign(x - v) x``
    (Zaheer et al. 2018); arXiv:2212.00309 prints ``sign(g - v^2)`` there, whose units do not agree.

    Factored, a parameter of two dimensions or more keeps the means r and c of the rows and columns of x under the same
    rule, and ``D = (sqrt(r) + eps) (sqrt(c) + eps)^T / (sqrt(mean r) + eps)``: the approximation of Adafactor
    (arXiv:1804.04235, Algorithm 1), with eps where a full diagonal has it. It is not part of arXiv:2212.00309.

    Args:
        parameters: name -> parameter; for shapes and devices.
        spec: the rule, the decay of the average (without effect for AdaGrad), and whether it is factored.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], spec: DividingByMoment):
        self._rule, self._beta = RULES[spec.second_moment], spec.beta
        self._values: dict[str, list[torch.Tensor]] = {}
        for name, p in parameters.items():
            if spec.factored and p.dim() > 1:  # whole on every rank, where the parameter is in shards
                sides = (p.shape[0], p.shape[1:].numel())
                self._values[name] = [torch.zeros(side, dtype=torch.float32, device=p.device) for side in sides]
            else:
                self._values[name] = [torch.zeros_like(p, dtype=torch.float32, requires_grad=False)]

    def update(self, gradients: Mapping[str, torch.Tensor], noise_variance: float = 0.0) -> None:
        """Take an averaged gradient whose coordinates have noise of that variance, which is subtracted."""
        for name, g in gradients.items():
            x = g.float().square()
            if noise_variance:
                x.sub_(noise_variance).clamp_(min=0.0)
            values = self._values[name]
            if len(values) == 1:
                self._rule(values[0], x, self._beta)
            else:
                x_PQ = x.flatten(1)
                self._rule(values[0], whole_of(x_PQ.mean(dim=1)), self._beta)
                self._rule(values[1], whole_of(x_PQ.mean(dim=0)), self._beta)

    def inverse(self, eps: float) -> dict[str, Diagonal | Factored]:
        """Name -> 1 / D."""
        parts: dict[str, Diagonal | Factored] = {}
        for name, values in self._values.items():
            if len(values) == 1:
                parts[name] = Diagonal(1 / (values[0].sqrt() + eps))
            else:
                rows_P, columns_Q = (v.sqrt() + eps for v in values)
                parts[name] = Factored((values[0].mean().sqrt() + eps) / rows_P, 1 / columns_Q)
        return parts

    def diagonal(self) -> dict[str, torch.Tensor]:
        """Name -> sqrt(v), flat, or the roots of its row and column means: for plots."""
        return {name: torch.cat([v.sqrt().flatten() for v in values]) for name, values in self._values.items()}

    def state_dict(self) -> dict[str, Any]:
        return {name: [v.clone() for v in values] for name, values in self._values.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_keys(state, set(self._values))
        for name, values in self._values.items():
            if [v.shape for v in values] != [v.shape for v in state[name]]:
                raise DPConfigError(
                    f"The second moment kept of {name} has other shapes than this one: it was factored and is not "
                    "now, or the other way round. Resume with the options that the run began with."
                )
            for v, kept in zip(values, state[name], strict=True):
                v.copy_(kept)
