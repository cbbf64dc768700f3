"""DP^2: delayed preconditioners, built from the gradients of the phase before."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from hf_dpopt.clipping.scaling import Scale
from hf_dpopt.common.checks import check_choice, check_count, check_kind
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.sharding import local_of
from hf_dpopt.common.types import Gradients, Released
from hf_dpopt.noise.registry import is_independent
from hf_dpopt.preclip.preconditioner import Preconditioning, RunOptions, ScaleChanges, check_keys
from hf_dpopt.preclip.queries import split
from hf_dpopt.preclip.scale import DividingByMoment, ScaledStep, SecondMoment

VARIANTS = ("dp2", "extra_query", "algorithm2", "noise_first")
TWO_QUERIES = ("extra_query", "algorithm2")
SMALLEST_EPS = 1e-8


@dataclasses.dataclass(frozen=True, kw_only=True)
class DelayedPreconditioner(DividingByMoment):
    r"""`delay` steps of private SGD, then `adaptive_steps` steps of private RMSProp, and again.

    With G the mean of the releases g~ of an SGD phase: ``v = beta v + (1 - beta) G^2`` at its end, ``D = 1`` in the
    SGD phase and ``sqrt(v) + eps`` in the adaptive one, ``g~ = (sum_b clip(g_b / D) + sigma C z) / B`` in both.

    Formal guarantee: as without it. Every record is used once per step, clipped to the same C in the step's own
    coordinates, and D is made of releases alone. ``variant="extra_query"`` and ``"algorithm2"`` release two sums a
    step, which one record moves by ``sqrt(2) C`` together: the same epsilon needs noise of that much more on each. A
    step of ``"algorithm2"`` that needs one of the two is noised and paid for as if it needed both.

    Args:
        delay: s1, steps of SGD, from which D is made; >= 1. A plan that is not told takes a tenth of its steps, at
            most 200.
        adaptive_steps: s2, steps that use it; None for s1, as in the paper.
        eps: floor of D, in gradient units; > 0. None takes the stddev of the noise in the mean of the SGD phase:
            below it, a D is a draw of the noise.
        second_moment, beta, factored: those of `DividingByMoment`; a factored D is ours, not the paper's.
        clipping_norm: bound on the norm of g / D in the adaptive phase; None for that of the clipping rule, which
            always holds in the SGD phase.
        learning_rate_ratio: what the release of the adaptive phase is multiplied by: with SGD, its step size relative
            to that of the SGD phase. Optimizers that divide by a second moment (Adam, GaLore) undo much of it, and
            their averages mix both phases.
        unbiased: subtract the variance of the noise in G from G^2.
        variant: "dp2", or an ablation. Of the paper: "algorithm2" (1) releases the plain sum in every step beside the
            preconditioned one, refreshes D in the first step, from its plain release alone, and in every `delay`-th
            after it, and gives the optimizer the plain release of these steps; for independent noise only.
            "noise_first" (2) adds the noise to the plain sum and divides afterwards. Ours: "extra_query" is variant 1
            whose first D is made after `delay` steps, and which divides in every step from then on.

    Raises:
        DPConfigError: for values outside these ranges.

    References:
        Li et al. (2022), arXiv:2212.00309, Algorithm 1; variants: its Section 5.3, and for "algorithm2" the authors'
        program (github.com/kenziyuliu/DP2, trainers/dp2_rmsprop_ablation1.py).
    """

    delay: int = 200
    adaptive_steps: int | None = None
    unbiased: bool = False
    variant: str = "dp2"
    name: ClassVar[str] = "dp2"
    listed: ClassVar[tuple[str, ...]] = (
        "delay", "adaptive_steps", "second_moment", "eps", "beta", "clipping_norm", "learning_rate_ratio", "unbiased",
        "factored", "variant",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check_count("delay", self.delay, "the steps of an SGD phase, an integer >= 1")
        if self.adaptive_steps is not None:
            check_count("adaptive_steps", self.adaptive_steps, "the steps of an adaptive phase, an integer >= 1")
        super().__post_init__()
        check_kind("unbiased", self.unbiased, bool)
        check_choice("variant", self.variant, VARIANTS)
        if self.variant in TWO_QUERIES and self.adaptive_steps not in (None, self.delay):
            raise DPConfigError(f"variant={self.variant!r} has no SGD phase: leave adaptive_steps out.")
        if self.variant == "algorithm2" and self.delay == 1:
            raise DPConfigError(
                "delay=1 with variant='algorithm2' never divides: all releases are plain. Use a delay of 2 or more."
            )

    @classmethod
    def defaults(cls, num_steps: int, options: Mapping[str, Any]) -> dict[str, Any]:
        least = 2 if options.get("variant") == "algorithm2" else 1
        return {"delay": min(cls.delay, max(least, num_steps // 10))}

    def check_steps(self, num_steps: int) -> None:
        if self.delay >= num_steps:
            fix = "Leave the delay out: it is a tenth of the steps then."
            raise DPConfigError(
                f"delay={self.delay} leaves no step of {num_steps} that would be preconditioned. "
                f"{fix if num_steps > 2 else 'Take more steps, or no preconditioner.'}"
            )

    def check_config(self, config: RunOptions) -> None:
        """Refuse correlated noise for updates that two streams of it make in turn."""
        if self.variant == "algorithm2" and not is_independent(config.noise_mechanism):
            raise DPConfigError(
                f"variant='algorithm2' with noise_mechanism={config.noise_mechanism!r}: two queries take turns, and "
                "neither takes the other's noise back. Use noise_mechanism='gaussian' or variant='extra_query'."
            )

    @property
    def keeps_one_noise_level(self) -> bool:
        return self.variant != "noise_first"

    @property
    def num_queries(self) -> int:
        return 2 if self.variant in TWO_QUERIES else 1

    def sensitivity_ratio(self, noise_stddev: float, expected_batch_size: int) -> float:
        return math.sqrt(self.num_queries)

    def changes(self, clipping_norm: float) -> ScaleChanges:
        factor = self.factor(clipping_norm)
        if self.variant == "algorithm2":
            return ScaleChanges((1, self.delay - 1), (1.0, factor), is_taken_back=False)
        if self.variant == "extra_query":  # a short time without D, then with one that is made anew
            return ScaleChanges((self.delay,), (factor,))
        phases = (self.delay, self.adaptive_steps or self.delay)
        return ScaleChanges(phases, (1.0, factor), is_taken_back=self.variant != "noise_first")

    @property
    def period(self) -> int:
        """Steps of an SGD and an adaptive phase."""
        return self.delay + (self.adaptive_steps or self.delay)


class DelayedPreconditioning(Preconditioning):
    """`DelayedPreconditioner` at work. Two buffers of the model's size: v, and G or 1 / D; factored, one at a time."""

    _spec: DelayedPreconditioner

    def __init__(self, spec: DelayedPreconditioner, parameters: Mapping[str, torch.Tensor], *of_run: Any):
        super().__init__(spec, parameters, *of_run)
        self.moment = SecondMoment(parameters, spec)
        self._t = 0  # steps done
        self._sum: Gradients = {}  # of the releases since the last refresh
        self._num_missed = 0  # steps since then whose release was lost
        self._eps: float | None = None  # of the D in use; None while there is none
        self._sgd = ScaledStep({}, clipping_norm=self._clipping_norm)
        self._adaptive: ScaledStep | None = None
        self._gain: float | None = 1.0  # of the latest release

    @property
    def uses_preconditioner(self) -> bool:
        """Whether the next step divides by D."""
        return self._eps is not None and not self._is_refreshing

    @property
    def _is_refreshing(self) -> bool:
        """Whether the next step gives its plain release to the optimizer, and makes D of it and of those before."""
        return self._spec.variant == "algorithm2" and self._t % self._spec.delay == 0

    def _step(self) -> ScaledStep:
        if self._eps is None or self._is_refreshing:
            return self._sgd
        if self._adaptive is None:
            self._adaptive = self._spec.step(self.moment.inverse(self._eps), self._clipping_norm)
        return self._adaptive

    @property
    def gain(self) -> float | None:
        return self._gain

    def scales(self) -> tuple[Scale | None, ...]:
        scale = self._step().scale
        if self._spec.variant in TWO_QUERIES:
            return None, scale
        if self._spec.variant == "noise_first" and scale is not None:
            return (Scale(factor=scale.factor),)
        return (scale,)

    def receive(self, released: Released) -> Released:
        queries = split(released, self._spec.num_queries)
        step, plain = self._step(), queries[0]
        update = plain if self._is_refreshing else queries[-1]
        is_divided_now = self._spec.variant == "noise_first" and self.uses_preconditioner
        self._gain = None if is_divided_now else step.gain
        if self._is_averaging:
            self._add(plain)
        if is_divided_now and step.scale is not None:
            for name, part in step.scale.parts.items():
                part.divide_(update[name])
        if self._is_refreshing:
            self._refresh(count=self._spec.delay if self._t else 1)
        update = step.receive(update)
        self._t += 1
        self._turn()
        return update

    def pass_over(self) -> None:
        if self._is_averaging:
            self._num_missed += 1
        if self._is_refreshing:
            self._refresh(count=self._spec.delay if self._t else 1)
        self._t += 1
        self._turn()

    @property
    def _is_averaging(self) -> bool:
        return self._spec.variant in TWO_QUERIES or self._t % self._spec.period < self._spec.delay

    def _add(self, plain: Released) -> None:
        if not self._sum:
            self._sum = {name: g.clone() for name, g in plain.items()}
        else:
            torch._foreach_add_(
                [local_of(g) for g in self._sum.values()], [local_of(plain[name]) for name in self._sum]
            )

    def _turn(self) -> None:
        """Change phase, if it is time, between the step that was done and the next."""
        if self._spec.variant == "algorithm2":
            return
        delay = self._spec.delay
        is_extra = self._spec.variant == "extra_query"
        position = self._t % (delay if is_extra else self._spec.period)
        if position == (0 if is_extra else delay):
            self._refresh(delay)
        elif position == 0:
            self._eps, self._adaptive, self._sum, self._num_missed = None, None, {}, 0

    def _refresh(self, count: int) -> None:
        """Make D of the mean of the releases in the latest `count` steps; it stays if all of them were lost."""
        count, self._num_missed = count - self._num_missed, 0
        if count == 0:
            return
        mean = {name: g.div_(count) for name, g in self._sum.items()}
        variance = self._noise.variance_of_mean(count)
        self.moment.update(mean, variance if self._spec.unbiased else 0.0)
        self._eps = self._spec.eps or max(math.sqrt(variance), SMALLEST_EPS)
        self._adaptive, self._sum = None, {}

    def state_dict(self) -> dict[str, Any]:
        missed = {"num_missed": self._num_missed} if self._num_missed else {}
        return {
            "t": self._t,
            "eps": self._eps,
            "sum": {name: g.clone() for name, g in self._sum.items()},
            "moment": self.moment.state_dict(),
            **missed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._num_missed = state.get("num_missed", 0)
        check_keys({**state, "num_missed": 0}, {"t", "eps", "sum", "moment", "num_missed"})
        self.moment.load_state_dict(state["moment"])
        self._t, self._eps, self._adaptive = state["t"], state["eps"], None
        self._sum = {name: g.to(self._devices[name], copy=True) for name, g in state["sum"].items()}


DelayedPreconditioner.at_work = DelayedPreconditioning
