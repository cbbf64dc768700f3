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
from hf_dpopt.experimental.goe import GoePreconditioner
from hf_dpopt.experimental.subspace_accounting import goe_budget, split_budget
from hf_dpopt.noise import independent_noise, make_noise_source
from hf_dpopt.plan.plan import PrivacyPlan
from hf_dpopt.postprocess import IndependentNoise, Postprocess
from hf_dpopt.postprocess.mirror_descent import PublicMirrorDescent
from hf_dpopt.postprocess.subspace import ProjectedGradient, SubspaceAdaGrad
from hf_dpopt.preclip.projected import ProjectingEngine
from hf_dpopt.public import PublicGradients, RefreshedSubspace
from hf_dpopt.public.subspace import COORDINATES
from hf_dpopt.randomness.cipher import derive_key

Tensors = dict[str, torch.Tensor]
Losses = Callable[[nn.Module, Tensors], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What is done with the released gradients.

    Args:
        projection: "none", "before_clip" or "after_noise".
        preconditioner: "none", "released" or "goe", in the subspace.
        mirror: PDA-DPMD's schedule, or "".
        rank, num_public, refresh_every: of the subspace.
        goe_share: of the budget, in zCDP, for the releases of the preconditioner; one every `goe_every` steps.
    """

    projection: str = "none"
    preconditioner: str = "none"
    mirror: str = ""
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
    config, num_steps = plan.config, plan.num_steps
    sensitivity = plan.clipper.sensitivity(plan.adjacency)
    multiplier, goe = plan.noise_multiplier, None
    if recipe.preconditioner == "goe":
        multiplier, goe = _goe(recipe, plan, key)
    mechanism = independent_noise(multiplier)
    noise = mechanism.stream(make_noise_source("fast", key), sensitivity, first_step=1)
    level = IndependentNoise(multiplier * sensitivity / config.expected_batch_size)
    subspace, chain = _chain(recipe, public, level, num_steps)
    if recipe.projection == "before_clip":
        assert subspace is not None
        engine: Any = ProjectingEngine(model, plan.clipper, subspace)
    else:
        engine = make_engine(model, plan.clipper)
    version = 0
    for step in range(1, num_steps + 1):
        rows = torch.tensor(plan.sampler.draw(key, step))
        clipped = engine.empty_sum()
        if len(rows):
            batch = pick(private, rows)
            engine.add_clipped_sum(clipped, lambda batch=batch: losses(model, batch), len(rows))
        sums = {name: total.float() for name, total in clipped.result().items()}
        if goe is not None and subspace is not None:
            if version and version != subspace.version:
                goe.rotate(subspace.transition)
            version = subspace.version
            goe.accumulate(sums[COORDINATES])
        noise.add_(sums, step)
        if goe is not None and subspace is not None:
            if (step - 1) % recipe.goe_every == 0:
                goe.release(step)
            released = subspace.lift(goe.apply(sums[COORDINATES]))
        else:
            released = {name: total / config.expected_batch_size for name, total in sums.items()}
            for postprocess in chain:
                released = postprocess(released)
        for name, p in engine.parameters.items():
            p.grad = released[name]
        optimizer.step()
        after_step(step)
    if goe is None:
        return {"epsilon": plan.epsilon()}
    spent = goe_budget(
        goe.releases, clipping_norm=config.clipping_norm, gradient_noise_multiplier=multiplier, delta=plan.delta,
        num_participations=plan.sampler.max_participations(num_steps), adjacency=plan.adjacency,
    )  # fmt: skip
    return {"epsilon": spent.epsilon, "rho_gradients": spent.gradients, "rho_preconditioner": spent.preconditioner}


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
    recipe: Recipe, public: PublicGradients | None, level: IndependentNoise, num_steps: int
) -> tuple[RefreshedSubspace | None, list[Postprocess]]:
    if recipe.mirror:
        assert public is not None
        return None, [PublicMirrorDescent(public, num_steps=num_steps, schedule=recipe.mirror)]
    if recipe.projection == "none":
        return None, []
    assert public is not None
    subspace = RefreshedSubspace(
        public, rank=recipe.rank, num_public=recipe.num_public, refresh_every=recipe.refresh_every
    )
    if recipe.preconditioner == "released":
        return subspace, [SubspaceAdaGrad(subspace, level)]
    return subspace, [ProjectedGradient(subspace)]
