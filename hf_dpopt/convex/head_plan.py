"""Plan of a convex head: settings and privacy cost, built from the same numbers, so they cannot disagree."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from dp_accounting import DpEvent, SelfComposedDpEvent

from hf_dpopt.accounting import accountants
from hf_dpopt.accounting.delta import resolve_delta
from hf_dpopt.common.checks import check_count, check_noise_multiplier, check_positive, check_range
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.convex.last_iterate import (
    ADJACENCY,
    OVERSIZED_SHARE,
    LastIterate,
    ProjectedSGD,
    batch_cap_of,
    calibrate_last_iterate,
    event_of,
    last_iterate_epsilon,
    plateau,
)
from hf_dpopt.plan.size_limits import check_budget, check_sizes
from hf_dpopt.sampling import SAMPLERS
from hf_dpopt.sampling.sampler import Sampler

SMALLEST_NORM, LARGEST_NORM = 1e-9, 1e9  # of features, head and regulariser: their products are squared
MAX_NOISE_RADII = 3.0  # radii that noise alone may cover; with more, accuracy fell in most runs (docs/convex.md)
BIAS_SHARE = 0.25  # of the feature norm: the constant feature that stands for the bias


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """Softmax regression on features of bounded norm, by projected noisy SGD. All values are public.

    Args:
        head_radius: the weights, bias included, stay in a Frobenius ball of this radius; > 0. With `feature_norm` R
            no logit exceeds ``head_radius R``. None for no ball, which asks for l2 > 0.
        feature_norm: R > 0. Features, with the constant one of the bias, are shortened to it.
        expected_batch_size: average number of records of a step.
        num_steps: T >= 1.
        target_epsilon: epsilon that the final weights may cost, > 0; or
        noise_multiplier: stddev of the noise on a batch's sum, over ``sqrt(2) R``; 0 switches it off: NOT PRIVATE.
        target_delta: delta of epsilon, at most 1/n; None for the default of `hf_dpopt.accounting.delta`.
        allow_large_delta: accept a delta above 1/n.
        learning_rate: eta of the first step, below ``2 / (M + l2)`` by what large batches need; None for ``1 / (M + 2
            l2)``.
        decay: exponent of the step size ``eta t^-decay`` of step t; in [0, 1).
        l2: weight of ``|w|^2 / 2`` in the loss; >= 0.
        has_bias: whether the head has a bias.

    Raises:
        DPConfigError: for values out of range, or none or both of epsilon and noise.
    """

    head_radius: float | None
    feature_norm: float
    expected_batch_size: int
    num_steps: int
    target_epsilon: float | None = None
    noise_multiplier: float | None = None
    target_delta: float | None = None
    allow_large_delta: bool = False
    learning_rate: float | None = None
    decay: float = 0.0
    l2: float = 0.0
    has_bias: bool = True

    def __post_init__(self) -> None:
        if self.feature_norm is None:
            raise DPConfigError(
                "There is no feature_norm, which bounds a record's gradient. Give --feature_norm a public number > 0."
            )
        if self.head_radius is None and not self.l2:
            raise DPConfigError(
                "There is no head_radius: without a bounded domain the privacy loss grows with every step, unless the "
                "loss is strongly convex. Give --head_radius a public number > 0, or --l2."
            )
        check_positive(
            head_radius=self.head_radius, feature_norm=self.feature_norm, target_epsilon=self.target_epsilon,
            learning_rate=self.learning_rate,
        )  # fmt: skip
        for name, value in (("head_radius", self.head_radius), ("feature_norm", self.feature_norm)):
            if value is not None and not SMALLEST_NORM <= value <= LARGEST_NORM:
                raise DPConfigError(
                    f"{name}={value:g} is outside {SMALLEST_NORM:g} to {LARGEST_NORM:g}, between which its squares "
                    "are exact. 1 to 100 is usual."
                )
        check_range("l2", self.l2, 0, LARGEST_NORM)
        check_range("decay", self.decay, 0, 1)
        check_count("expected_batch_size", self.expected_batch_size)
        check_sizes(1, self.num_steps)
        if (self.target_epsilon is None) == (self.noise_multiplier is None):
            raise DPConfigError(
                "Give exactly one of target_epsilon (the noise is computed) and noise_multiplier (epsilon is)."
            )
        check_budget(self.target_epsilon, self.target_delta)
        if self.noise_multiplier is not None:
            check_noise_multiplier(self.noise_multiplier)

    @property
    def lipschitz(self) -> float:
        """``sqrt(2) R``: the gradient of a record is ``(p - y) x^T``, and no ``p - y`` is longer than ``sqrt(2)``."""
        return math.sqrt(2) * self.feature_norm

    @property
    def smoothness(self) -> float:
        """``R^2 / 2``: the Hessian is ``(diag(p) - p p^T) (x) x x^T``, whose first factor is at most 1/2."""
        return self.feature_norm**2 / 2

    @property
    def step_size(self) -> float:
        return self.learning_rate or 1 / (self.smoothness + 2 * self.l2)

    @property
    def bias_feature(self) -> float:
        """The constant feature that stands for the bias; 0 without one."""
        return BIAS_SHARE * self.feature_norm if self.has_bias else 0.0

    def delta(self, num_examples: int, recorded: Mapping[str, Any] | None) -> float:
        """Delta of a run on so many records: the one that was asked for, or recorded, or the default."""
        check_count("num_examples", num_examples)
        known = None if recorded is None else recorded["delta"]
        return resolve_delta(self.target_delta, num_examples, allow_large=self.allow_large_delta, recorded=known)

    def sgd(self, num_examples: int, noise_multiplier: float, delta: float) -> ProjectedSGD:
        """The run as its accountant sees it."""
        is_long = self.step_size * (self.smoothness + 2 * self.l2) > 2
        size = (num_examples, self.expected_batch_size, self.num_steps)
        return ProjectedSGD(
            num_examples=num_examples,
            expected_batch_size=self.expected_batch_size,
            num_steps=self.num_steps,
            noise_multiplier=noise_multiplier,
            diameter=math.inf if self.head_radius is None else 2 * self.head_radius,
            lipschitz=self.lipschitz,
            smoothness=self.smoothness,
            step_size=self.step_size,
            decay=self.decay,
            l2=self.l2,
            batch_cap=batch_cap_of(*size, delta) if is_long and self.l2 else None,
        )


@dataclasses.dataclass(frozen=True)
class HeadPlan:
    """A run that is ready to be trained; made by `make_head_plan`.

    Attributes:
        config: the settings that were asked for.
        sgd: the run as its accountant sees it, noise included.
        delta: delta that epsilon holds at, in (0, 1).
        spent: privacy bound of the final weights.
    """

    config: HeadConfig
    sgd: ProjectedSGD
    delta: float
    spent: LastIterate

    @property
    def num_examples(self) -> int:
        return self.sgd.num_examples

    @property
    def noise_multiplier(self) -> float:
        return self.sgd.noise_multiplier

    @property
    def is_private(self) -> bool:
        return math.isfinite(self.spent.epsilon)

    @property
    def note(self) -> str:
        """Line of the ledger on what a run reveals."""
        return "convex head, final weights only"

    @functools.cached_property
    def sampler(self) -> Sampler:
        return SAMPLERS["poisson"](num_examples=self.num_examples, expected_batch_size=self.config.expected_batch_size)

    @property
    def event(self) -> DpEvent:
        """Bound on what the final weights of one run reveal, as an event of dp_accounting."""
        return event_of(self.sgd, self.spent)

    def epsilon(self, num_runs: int = 1) -> float:
        """Epsilon of the final weights of `num_runs` runs on the same records."""
        if num_runs == 1 or not self.is_private:
            return self.spent.epsilon if num_runs else 0.0
        kept = self.delta * (1 - num_runs * OVERSIZED_SHARE)
        return accountants.epsilon(SelfComposedDpEvent(self.event, num_runs), kept, ADJACENCY).epsilon

    def free_steps(self) -> int | None:
        """Number of steps after which further ones are free; None if none are: step size decays, or no noise."""
        return None if self.config.decay or not self.is_private else plateau(self.sgd, self.delta)

    def noise_over_radius(self, num_weights: int) -> float | None:
        """Radii that noise alone would move K x D weights, above `MAX_NOISE_RADII` it fills the ball; None without."""
        radius = self.config.head_radius
        return None if radius is None else self.sgd.noise_norm(num_weights) / radius

    def public_dict(self) -> dict[str, Any]:
        """Everything that may be published, JSON-able."""
        return {
            "kind": "convex_head",
            "released": "final weights only",
            "adjacency": ADJACENCY,
            "unit": "example",
            "delta": self.delta,
            "allow_large_delta": self.config.allow_large_delta,
            "epsilon": self.spent.epsilon if self.is_private else None,
            "epsilon_by_composition": self.spent.composition if math.isfinite(self.spent.composition) else None,
            "horizon": self.spent.horizon,
            "noise_share": self.spent.share,
            "head_radius": self.config.head_radius,
            "feature_norm": self.config.feature_norm,
            "has_bias": self.config.has_bias,
            "target_epsilon": self.config.target_epsilon,
            **{name: v for name, v in dataclasses.asdict(self.sgd).items() if name != "batch_cap" or v is not None},
            "diameter": None if self.config.head_radius is None else self.sgd.diameter,
        }


def make_head_plan(config: HeadConfig, *, num_examples: int, recorded: Mapping[str, Any] | None = None) -> HeadPlan:
    """Make the plan: calibrate the noise to a target epsilon, or compute epsilon from the noise.

    Formal guarantee: if a run is executed by `HeadRun` with this plan on `num_examples` records and nothing but its
    final weights leaves, it is ``(spent.epsilon, delta)``-differentially private under ``add_or_remove_one``. A target
    epsilon is never exceeded.

    Args:
        config: the settings of the head.
        num_examples: records of the training set.
        recorded: the plan in the ledger of a killed run, which keeps its delta if the config names none.

    Raises:
        DPConfigError: for a step size that is no contraction, a batch larger than the data, batches that are too
            large too often, or a delta above 1/n.
    """
    delta = config.delta(num_examples, recorded)
    noise = config.noise_multiplier
    if noise is None:
        assert config.target_epsilon is not None
        noise = calibrate_last_iterate(config.sgd(num_examples, 1.0, delta), config.target_epsilon, delta)
    sgd = config.sgd(num_examples, noise, delta)
    return HeadPlan(config, sgd, delta, last_iterate_epsilon(sgd, delta))
