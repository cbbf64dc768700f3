"""Stages of a run that its training arguments ask for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hf_dpopt.clipping import ClippingEngine
from hf_dpopt.huggingface.inputs import TrainerInputs
from hf_dpopt.optim import NoiseAwareOptimizer
from hf_dpopt.optim.stock_options import optimizer_from_arguments
from hf_dpopt.plan.plan import PrivacyPlan
from hf_dpopt.postprocess import IndependentNoise, Postprocess
from hf_dpopt.postprocess.adaptive_fir import AdaptiveFIR
from hf_dpopt.postprocess.iterates import IterateAverage, decay_over
from hf_dpopt.postprocess.low_pass import LowPassFilter
from hf_dpopt.postprocess.mirror_descent import PublicMirrorDescent
from hf_dpopt.public.public_gradients import PublicGradients
from hf_dpopt.run.run import PrivateRun
from hf_dpopt.run.stages import Stages

Public = Callable[[int], PublicGradients | None]  # from a seed


def optimizer_of(args: Any) -> tuple[type[torch.optim.Optimizer], dict[str, Any]] | None:
    """Class and options of the optimizer of `hf_dpopt.optim` that is asked for, filter included; None for another."""
    name = args.optimizer_name()
    if name is None:
        return None
    cls, options = optimizer_from_arguments(name, args)
    return cls, {**options, "filter": low_pass_of(args)}


def make_stages(
    inputs: TrainerInputs, engine: ClippingEngine, optimizer: torch.optim.Optimizer, run: PrivateRun, public: Public
) -> Stages:
    """The stages that are asked for; maps of the user's own come after those of the arguments.

    A filter is among the maps of the released gradient unless the optimizer has a place for it.
    """
    args, num_steps = inputs.args, run.plan.num_steps
    low_pass, chain = low_pass_of(args), list[Postprocess]()
    if low_pass is not None and not isinstance(optimizer, NoiseAwareOptimizer):
        chain.append(low_pass)
    if args.public_mirror_descent is not None:
        gradients = public(1)
        assert gradients is not None  # `refusals.check_stages`
        chain.append(PublicMirrorDescent(gradients, num_steps=num_steps, schedule=args.public_mirror_descent))
    average: IterateAverage | None = None
    match args.average_iterate:
        case "exponential":
            average = IterateAverage(engine.model, "exponential", decay=decay_over(num_steps))
        case "uniform" | "tail":
            average = IterateAverage(engine.model, start=num_steps // 2 if args.average_iterate == "tail" else 0)
    return Stages(run, engine, optimizer, [*chain, *inputs.postprocess], public=public(0), average=average)


def check_preclip(plan: PrivacyPlan, engine: ClippingEngine, public: Public) -> None:
    """Make the plan's preconditioner and let go of it: what does not fit is refused before there is a ledger."""
    noise, norm = IndependentNoise(), plan.config.clipping_norm
    plan.preclip.start(engine.parameters, clipping_norm=norm, noise=noise, public=public(0)).engine(engine)


def low_pass_of(args: Any) -> LowPassFilter | AdaptiveFIR | None:
    """The filter that is asked for, with a noise level that says nothing: stages tell it that of the run."""
    if args.filter is None:
        return None
    return LowPassFilter.parse(args.filter, noise=IndependentNoise())
