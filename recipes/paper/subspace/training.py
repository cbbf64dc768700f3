"""One private training run, with public data or without, as `private_step` does it, but for the ledger.

Keys are fixed by the seed, so that a run can be repeated; nothing here is to be used on records that need protection.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from hf_dpopt.clipping import make_engine
from hf_dpopt.common.types import ClippedSums, Released
from hf_dpopt.experimental.goe import GoePreconditioner
from hf_dpopt.experimental.subspace_accounting import goe_budget, split_budget
from hf_dpopt.noise import independent_noise, make_noise_source
from hf_dpopt.plan.plan import PrivacyPlan
from hf_dpopt.postprocess import IndependentNoise, Postprocess
from hf_dpopt.preclip.subspace_projection import ProjectedGradient, ProjectingEngine, SubspaceAdaGrad
from hf_dpopt.public import PublicGradients
from hf_dpopt.public.subspace import COORDINATES, RefreshedSubspace
from hf_dpopt.randomness.source import derive_key
from recipes.paper.steps import EngineSums, Part, PrivateSteps, Scales, descend

Tensors = dict[str, torch.Tensor]
Losses = Callable[[nn.Module, Tensors], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What is done with the released gradients.

    Args:
        projection: "none", "before_clip" or "after_noise".
        preconditioner: "none", "released" or "goe", in the subspace.
        rank, num_public, refresh_every: of the subspace.
        goe_share: of the budget, in zCDP, for the releases of the preconditioner; one every `goe_every` steps.
    """

    projection: str = "none"
    preconditioner: str = "none"
    rank: int = 32
    num_public: int = 128
    refresh_every: int = 20
    goe_share: float = 0.3
    goe_every: int = 20


def pick(data: Tensors, rows: Sequence[int] | torch.Tensor) -> Tensors:
    """Some records."""
    index = torch.as_tensor(rows, dtype=torch.long)
    return {name: values[index] for name, values in data.items()}


def public_gradients(model: nn.Module, losses: Losses, public: Tensors, batch_size: int, seed: int) -> PublicGradients:
    """Over a table of public records."""
    num = len(next(iter(public.values())))
    return PublicGradients(
        model, lambda batch: losses(model, batch), range(num), lambda rows: pick(public, rows),
        batch_size=batch_size, seed=seed,
    )  # fmt: skip


def train(
    model: nn.Module,
    losses: Losses,
    private: Tensors,
    public: PublicGradients | None,
    recipe: Recipe,
    plan: PrivacyPlan,
    optimizer: torch.optim.Optimizer,
    seed: int,
    *,
    after_step: Callable[[int], None] = lambda step: None,
) -> dict[str, Any]:
    """Runs all steps of the plan.

    Returns:
        What it cost: epsilon, and for "goe" both parts of it.
    """
    key = np.random.default_rng(seed).bytes(32)
    num_steps, sensitivity = plan.num_steps, plan.clipper.sensitivity(plan.adjacency)
    multiplier, goe = plan.noise_multiplier, None
    if recipe.preconditioner == "goe":
        multiplier, goe = _goe(recipe, plan, key)
    level = IndependentNoise(multiplier * sensitivity / plan.config.expected_batch_size)
    subspace, chain = _chain(recipe, public, level)
    if recipe.projection == "before_clip":
        assert subspace is not None
        engine: Any = ProjectingEngine(model, plan.clipper, subspace)
    else:
        engine = make_engine(model, plan.clipper)

    def parts(rows: torch.Tensor) -> list[Part]:
        batch = pick(private, rows)
        return [(lambda: losses(model, batch), len(rows))]

    sums: Any = EngineSums(engine, parts)
    start = None
    if goe is not None:
        assert subspace is not None
        sums = preconditioner = _InSubspace(sums, subspace, goe, recipe.goe_every, plan.config.expected_batch_size)
        chain, start = [], lambda level: preconditioner
    steps = PrivateSteps(
        plan, sums, keys=(key, key), start=start, sensitivity=sensitivity, mechanism=independent_noise(multiplier)
    )
    for step in descend(steps, engine, optimizer, num_steps, chain):
        after_step(step)
    if goe is None:
        return {"epsilon": plan.epsilon()}
    spent = goe_budget(
        goe.releases, clipping_norm=plan.config.clipping_norm, gradient_noise_multiplier=multiplier, delta=plan.delta,
        num_participations=plan.sampler.max_participations(num_steps), adjacency=plan.adjacency,
    )  # fmt: skip
    return {"epsilon": spent.epsilon, "rho_gradients": spent.gradients, "rho_preconditioner": spent.preconditioner}


class _InSubspace:
    """The paper's preconditioner around the sums of a run: it takes them in before the noise, for its own releases.

    Args:
        sums: clipped sums in the subspace.
        subspace: of public gradients.
        goe: the preconditioner.
        every: steps between its releases.
        batch: expected batch size, which the releases were divided by.
    """

    def __init__(self, sums: EngineSums, subspace: RefreshedSubspace, goe: GoePreconditioner, every: int, batch: int):
        self._sums, self._subspace, self._goe, self._every, self._batch = sums, subspace, goe, every, batch
        self._version = self._step = 0

    def __call__(self, rows: np.ndarray, scales: Scales) -> ClippedSums:
        sums, version = self._sums(rows, scales), self._subspace.version
        if self._version not in (0, version):
            self._goe.rotate(self._subspace.transition)
        self._version = version
        self._goe.accumulate(sums[COORDINATES])
        return sums

    def scales(self) -> tuple[None]:
        return (None,)

    def receive(self, released: Released) -> Any:
        self._step += 1
        if (self._step - 1) % self._every == 0:
            self._goe.release(self._step)
        return self._subspace.lift(self._goe.apply(released[COORDINATES] * self._batch))


def _goe(recipe: Recipe, plan: PrivacyPlan, key: bytes) -> tuple[float, GoePreconditioner]:
    """The paper's preconditioner, and what is left for the gradients of the plan's budget."""
    gradients, preconditioner = split_budget(
        plan.epsilon(), plan.delta, share=recipe.goe_share,
        num_participations=plan.sampler.max_participations(plan.num_steps),
        num_releases=-(-plan.num_steps // recipe.goe_every),
    )  # fmt: skip
    made = GoePreconditioner(
        recipe.rank, clipping_norm=plan.config.clipping_norm, noise_multiplier=preconditioner,
        max_participations=plan.sampler.max_participations, adjacency=plan.adjacency,
        source=make_noise_source("fast", derive_key(key, "preconditioner")),
    )  # fmt: skip
    return gradients, made


def _chain(
    recipe: Recipe, public: PublicGradients | None, level: IndependentNoise
) -> tuple[RefreshedSubspace | None, list[Postprocess]]:
    if recipe.projection == "none":
        return None, []
    assert public is not None
    subspace = RefreshedSubspace(
        public, rank=recipe.rank, num_public=recipe.num_public, refresh_every=recipe.refresh_every
    )
    if recipe.preconditioner == "released":
        return subspace, [SubspaceAdaGrad(subspace, level)]
    return subspace, [ProjectedGradient(subspace)]
