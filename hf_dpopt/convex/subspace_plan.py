"""Plan of a convex head trained in the subspace of public gradients: composition of its releases, no other bound."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NoReturn

from hf_dpopt.accounting.events import flatten
from hf_dpopt.common.checks import check_count, check_positive
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.convex.head_plan import HeadConfig
from hf_dpopt.convex.last_iterate import ADJACENCY
from hf_dpopt.noise import IdentityStrategy
from hf_dpopt.plan.release import Release
from hf_dpopt.sampling import SAMPLERS
from hf_dpopt.sampling.sampler import Sampler

ACCOUNTING = "no last-iterate bound; composition of {num_steps} releases"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SubspaceHeadConfig(HeadConfig):
    r"""Softmax regression by private AdaGrad in the subspace of public gradients. All values are public.

    A step releases ``u~ = V^T g + noise``, (k,), g the sum of its records' gradients and V the top directions of
    public gradients; takes ``S += u~ u~^T`` and ``H = (S + eps I)^{1/2}``, all of the mean gradient; goes to
    ``w - eta V H^{-1} u~``, and from there to the closest point of the ball in the norm of H. The result is the mean
    of the iterates. `HeadConfig` says what the arguments are that are not listed here.

    Args:
        expected_batch_size: number of records for full batches, as in the paper; with fewer, batches are Poisson.
        learning_rate: eta, in units of weights: the length of the first step; None for a quarter of `head_radius`.
        rank: k >= 1, largest number of directions.
        refresh_every: steps between two computations of V from the public records, at the weights of then; >= 1.
        eps: number added to the eigenvalues of S, > 0; squared units of the mean gradient.
        decay, l2: 0; the algorithm has neither.

    Raises:
        DPConfigError: for values out of range, and settings of the bound on the last iterate.

    References:
        Kairouz et al. (2021), arXiv:2008.06570, Alg. 1. Departures: S is made of released gradients instead of
        un-noised ones, whose matrix would be a release of its own (`hf_dpopt.experimental.goe`); the mean is that of
        the iterates after each step; V is refreshed every `refresh_every` steps, and S keeps what both bases see.
    """

    head_radius: float  # the projection is one to this ball
    rank: int = 16
    refresh_every: int = 20
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("rank", self.rank)
        check_count("refresh_every", self.refresh_every)
        check_positive(eps=self.eps)
        if self.decay or self.l2:
            raise DPConfigError(
                f"decay={self.decay:g}, l2={self.l2:g}: AdaGrad's matrix makes the steps fall, and the ball is what "
                "regularises. Leave both at 0, or train the head by plain projected SGD, which has them."
            )

    @property
    def step_size(self) -> float:
        return self.learning_rate or self.head_radius / 4

    def sgd(self, num_examples: int, noise_multiplier: float) -> NoReturn:
        """Refuse the bound on the last iterate.

        Raises:
            DPConfigError: always.
        """
        raise DPConfigError(
            "Steps of AdaGrad in a subspace are no contractions, for their matrix is made of the releases: the bound "
            "on the last iterate does not hold. Use make_subspace_plan, which composes all releases."
        )


@dataclasses.dataclass(frozen=True)
class SubspaceHeadPlan:
    """A run of `SubspaceHeadConfig` that is ready to be trained; made by `make_subspace_plan`.

    Attributes:
        config: the settings that were asked for.
        num_examples: number of records, n.
        noise_multiplier: stddev of the noise on a coordinate of a step's sum, over ``sqrt(2) R``; unitless.
        delta: delta that epsilon holds at, in (0, 1).
    """

    config: SubspaceHeadConfig
    num_examples: int
    noise_multiplier: float
    delta: float

    @property
    def is_private(self) -> bool:
        return self.noise_multiplier > 0

    @functools.cached_property
    def release(self) -> Release:
        """All T releases of one run together."""
        sampler = SAMPLERS["poisson"](
            num_examples=self.num_examples, expected_batch_size=self.config.expected_batch_size
        )
        return Release(sampler=sampler, strategy=IdentityStrategy(), steps=self.config.num_steps, adjacency=ADJACENCY)

    @property
    def sampler(self) -> Sampler:
        return self.release.sampler

    @property
    def note(self) -> str:
        """Line of the ledger on what a run reveals."""
        return f"convex head in a public subspace: {self.accounting}"

    @property
    def accounting(self) -> str:
        return ACCOUNTING.format(num_steps=self.config.num_steps)

    def epsilon(self, num_runs: int = 1) -> float:
        """Epsilon of all releases and iterates of `num_runs` runs on the same records; infinite without noise."""
        return self.release.epsilon(self.noise_multiplier, self.delta, (self.config.num_steps,) * num_runs).epsilon

    def public_dict(self) -> dict[str, Any]:
        """Everything that may be published, JSON-able."""
        config = dataclasses.asdict(self.config)
        return {
            "kind": "convex_head",
            "algorithm": "AdaGrad in a public subspace (arXiv:2008.06570)",
            "released": "all noisy coordinates of gradients, and so all iterates and their mean",
            "accounting": self.accounting,
            "adjacency": ADJACENCY,
            "unit": "example",
            **{name: value for name, value in config.items() if name not in ("decay", "l2")},
            "delta": self.delta,
            "epsilon": self.epsilon() if self.is_private else None,
            "num_examples": self.num_examples,
            "noise_multiplier": self.noise_multiplier,
            "lipschitz": self.config.lipschitz,
            "step_size": self.config.step_size,
        }


def make_subspace_plan(
    config: SubspaceHeadConfig, *, num_examples: int, recorded: Mapping[str, Any] | None = None
) -> SubspaceHeadPlan:
    """Make the plan: calibrate the noise to a target epsilon, or compute epsilon from the noise.

    Formal guarantee: if a run is executed by `HeadRun` with this plan on `num_examples` records, everything that is
    made of its releases, all iterates and their mean included, is together ``(epsilon(), delta)``-differentially
    private under ``add_or_remove_one``. A target epsilon is never exceeded. One record moves the sum of a step's
    gradients by at most ``sqrt(2) R`` and its k coordinates by no more, for V has orthonormal columns and depends on
    public records and earlier releases alone: T Gaussian mechanisms (Poisson-sampled ones for batches of fewer records
    than all) that compose adaptively.

    Args:
        config: the settings of the head.
        num_examples: records of the training set, n; public.
        recorded: the plan in the ledger of a killed run, which keeps its delta if the config names none.

    Raises:
        DPConfigError: for a batch larger than the data, or a delta above 1/n.

    References:
        Kairouz et al. (2021), arXiv:2008.06570. Balle and Wang (2018), arXiv:1805.06530 (exact epsilon of Gaussian
        mechanisms, and so of full batches).
    """
    delta = config.delta(num_examples, recorded)
    plan = SubspaceHeadPlan(config, num_examples, config.noise_multiplier or 0.0, delta)
    flatten(plan.release.event(1.0))  # refuses batches larger than the data, also where the noise is given
    if config.target_epsilon is None:
        return plan
    return dataclasses.replace(plan, noise_multiplier=plan.release.calibrate(config.target_epsilon, delta)[0])
