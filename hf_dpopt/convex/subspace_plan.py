"""Plan of a convex head trained in the subspace of public gradients: composition of its releases, no other bound."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from hf_dpopt.accounting.events import flatten
from hf_dpopt.common.checks import check_choice, check_count, check_positive, check_range, check_share
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.convex.head_plan import HeadConfig
from hf_dpopt.convex.last_iterate import ADJACENCY
from hf_dpopt.noise import IdentityStrategy
from hf_dpopt.plan.release import Release
from hf_dpopt.sampling import SAMPLERS
from hf_dpopt.sampling.sampler import Sampler

ACCOUNTING = "no last-iterate bound; composition of {num_steps} releases"
CLEAN = "clean"  # the matrix of the paper's Algorithm 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class SubspaceHeadConfig(HeadConfig):
    r"""Softmax regression by private AdaGrad in the subspace of public gradients. All values are public.

    A step releases ``u~ = V^T g + noise``, (k,), g the mean of its records' gradients and V the top directions of
    public gradients; goes to ``w - eta V H^{-1} u~``, and from there to the closest point of the ball in the norm of
    H. The result is the mean of the iterates. With ``adagrad="clean"``, the paper's Algorithm 1, ``S += u u^T`` of the
    un-noised ``u = V^T g`` and ``H = S^{1/2} + B``, released, too, with symmetric noise B. With "released", ``S += u~
    u~^T`` and ``H = (S + eps I)^{1/2}``, which costs nothing. `HeadConfig` says what the arguments are that are not
    listed here.

    Args:
        expected_batch_size: number of records for full batches, as in the paper; with fewer, batches are Poisson.
        learning_rate: eta, in units of weights: the length of the first step; None for a quarter of `head_radius`.
        rank: k >= 1, largest number of directions.
        refresh_every: steps between two computations of V from the public records, at the weights of then; >= 1.
        eps: number added to the eigenvalues of S, > 0; squared units of the mean gradient. Eigenvalues of a "clean" H
            are raised to its root, or to the largest that B alone has, if that is more.
        adagrad: "released"; "clean", for full batches only; or "none" for ``H = I``, projected DP-SGD.
        matrix_share: share of a step's privacy budget, in (0, 1), that a "clean" H costs; the rest is for u~.
        envelope: alpha >= 0; gradients of records are clipped to ``sqrt(2) R t^-alpha`` in step t, and so much smaller
            is the noise. 0 clips nothing.
        decay, l2: 0; the algorithm has neither.

    Raises:
        DPConfigError: for values out of range, and settings of the bound on the last iterate.

    References:
        Kairouz et al. (2021), arXiv:2008.06570, Alg. 1. Departures of "clean": the constant of the noise of H
        (`SubspaceDescent`); the least eigenvalue of H; gradients are clipped to the envelope, where the paper assumes
        one; the mean is that of the iterates after each step; V is refreshed every `refresh_every` steps, and S keeps
        what both bases see. Zhou et al. (2021), arXiv:2007.03813 ("none").
    """

    head_radius: float  # the projection is one to this ball
    rank: int = 16
    refresh_every: int = 20
    eps: float = 1e-8
    adagrad: str = "released"
    matrix_share: float = 0.3
    envelope: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("rank", self.rank)
        check_count("refresh_every", self.refresh_every)
        check_positive(eps=self.eps)
        check_choice("adagrad", self.adagrad, ("none", "released", CLEAN))
        check_share("matrix_share", self.matrix_share, "0.1 to 0.5")
        check_range("envelope", self.envelope, 0, math.inf)
        if self.decay or self.l2:
            raise DPConfigError(
                f"decay={self.decay:g}, l2={self.l2:g}: AdaGrad's matrix makes the steps fall, and the ball is what "
                "regularises. Leave both at 0, or train the head by plain projected SGD, which has them."
            )

    @property
    def step_size(self) -> float:
        return self.learning_rate or self.head_radius / 4

    def gradient_bound(self, step: int) -> float:
        """Norm that gradients of records are clipped to in a step, ``sqrt(2) R t^-envelope``; infinite if not."""
        return self.lipschitz * step**-self.envelope if self.envelope else math.inf

    def query_scales(self, step: int) -> tuple[float, float]:
        """Factors of ``V^T g`` and of a "clean" matrix, with which one record moves both together by ``sqrt(2) R``."""
        if self.adagrad != CLEAN:
            return step**self.envelope, 0.0
        squares = _sums_of_squares(self.envelope, self.num_steps)[step - 1]
        return math.sqrt(1 - self.matrix_share) * step**self.envelope, math.sqrt(self.matrix_share / (2 * squares))

    def sgd(self, num_examples: int, noise_multiplier: float, delta: float) -> NoReturn:
        """Refuse the bound on the last iterate.

        Raises:
            DPConfigError: always.
        """
        raise DPConfigError(
            "Steps of AdaGrad in a subspace are no contractions, for their matrix is made of the releases: the bound "
            "on the last iterate does not hold. Use make_subspace_plan, which composes all releases."
        )


@functools.lru_cache(maxsize=8)
def _sums_of_squares(envelope: float, num_steps: int) -> np.ndarray:
    """``sum_{s <= t} s^(-2 envelope)`` for each step t, (T,)."""
    return np.cumsum(np.arange(1, num_steps + 1, dtype=np.float64) ** (-2 * envelope))


@dataclasses.dataclass(frozen=True)
class SubspaceHeadPlan:
    """A run of `SubspaceHeadConfig` that is ready to be trained; made by `make_subspace_plan`.

    Attributes:
        config: the settings that were asked for.
        num_examples: number of records, n.
        noise_multiplier: stddev of the noise on a step's release, over what one record moves it by; unitless.
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
    def gradient_noise_multiplier(self) -> float:
        """Stddev of the noise on a coordinate of a step's sum, over the norm that gradients are clipped to."""
        return self.noise_multiplier / self.config.query_scales(1)[0]

    @property
    def note(self) -> str:
        """Line of the ledger on what a run reveals."""
        return f"convex head in a public subspace: {self.accounting}"

    @property
    def accounting(self) -> str:
        what = ", each of a gradient and a matrix" if self.config.adagrad == CLEAN else ""
        return ACCOUNTING.format(num_steps=self.config.num_steps) + what

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
    private under ``add_or_remove_one``. A target epsilon is never exceeded. One record moves what a step releases by
    at most ``sqrt(2) R`` (`SubspaceDescent`): T Gaussian mechanisms (Poisson-sampled ones for batches of fewer records
    than all) that compose adaptively. A "clean" matrix is made of the batches of all earlier steps, whose random draws
    would hide a record twice, so its batches are full.

    Args:
        config: the settings of the head.
        num_examples: records of the training set, n; public.
        recorded: the plan in the ledger of a killed run, which keeps its delta if the config names none.

    Raises:
        DPConfigError: for a batch larger than the data, a delta above 1/n, or a "clean" matrix of Poisson batches.

    References:
        Kairouz et al. (2021), arXiv:2008.06570. Balle and Wang (2018), arXiv:1805.06530 (exact epsilon of Gaussian
        mechanisms, and so of full batches).
    """
    delta = config.delta(num_examples, recorded)
    if config.adagrad == CLEAN and config.expected_batch_size < num_examples:
        raise DPConfigError(
            f"adagrad={CLEAN!r}: its matrix is made of all earlier batches, so they are not amplified by sampling. "
            f"Use expected_batch_size={num_examples}, all records, or adagrad='released'."
        )
    plan = SubspaceHeadPlan(config, num_examples, config.noise_multiplier or 0.0, delta)
    flatten(plan.release.event(1.0))  # refuses batches larger than the data, also where the noise is given
    if config.target_epsilon is None:
        return plan
    return dataclasses.replace(plan, noise_multiplier=plan.release.calibrate(config.target_epsilon, delta)[0])
