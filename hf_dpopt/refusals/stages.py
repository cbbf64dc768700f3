"""What stands before the clip and after the noise, and what it needs to know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hf_dpopt.errors import DPConfigError
from hf_dpopt.optim import OPTIMIZERS, NoiseAwareOptimizer, from_arguments
from hf_dpopt.postprocess import IndependentNoise
from hf_dpopt.postprocess.low_pass import LowPassFilter
from hf_dpopt.preclip import Preclip, PublicSubspaceProjection, make_preclip
from hf_dpopt.refusals.data import is_training_data
from hf_dpopt.refusals.table import Refusal, raise_first


def check_stages(args: Any, own: Preclip | None, given: Mapping[str, Any], public_dataset: Any) -> None:
    """Refuses preconditioners, filters and optimizers that do not go together, or lack what they learn from."""
    if args.filter is not None:
        LowPassFilter.parse(args.filter, noise=IndependentNoise())
    optimizer = (given.get("optimizers") or (None, None))[0]
    name = args.optimizer_name()
    if name is not None and optimizer is None:
        cls, options = from_arguments(name, args)
        optimizer = cls([torch.nn.Parameter(torch.zeros(1))], **options)  # refuses what is out of range
    raise_first(_on_preconditioner(args, own, given, public_dataset))
    raise_first(_on_noise_level(args, own, optimizer))
    if args.ball_radius is not None and not args.ball_radius > 0:
        raise DPConfigError(f"ball_radius={args.ball_radius} is no ball. Use a number > 0, in units of weights.")


def _on_noise_level(args: Any, own: Preclip | None, optimizer: torch.optim.Optimizer | None) -> Iterator[Refusal]:
    """What corrects for the noise has to know how loud it is."""
    corrects = isinstance(optimizer, NoiseAwareOptimizer) and optimizer.subtracts_noise
    preclip = own or make_preclip(args.preconditioner, _options(args))
    spoils = getattr(preclip, "unscale", False) or getattr(preclip, "variant", "") == "noise_first"
    is_projected = preclip.name == "subspace"
    yield (
        (spoils or is_projected) and (corrects or str(args.filter).startswith("adaptive")),
        "The noise that this preconditioner leaves differs from coordinate to coordinate, and "
        f"{type(optimizer).__name__ if corrects else args.filter} corrects for one level.",
        "Use --optim adamw_torch, dp_adamw or sgd, and a fixed filter.",
    )
    yield (
        corrects and bool(args.max_grad_norm),
        f"max_grad_norm={args.max_grad_norm} rescales the noisy gradient, and {type(optimizer).__name__} would "
        "subtract the variance of a noise that is not there.",
        "Leave max_grad_norm at 0 (the clip of privacy is clipping_norm), or use --optim adamw_torch.",
    )


def _on_preconditioner(
    args: Any, own: Preclip | None, given: Mapping[str, Any], public_dataset: Any
) -> Iterator[Refusal]:
    yield (
        own is not None and args.preconditioner != "none",
        f"Two preconditioners were given: preclip={type(own).__name__} and preconditioner={args.preconditioner!r}.",
        "Give one of them.",
    )
    preclip = own or make_preclip(args.preconditioner, _options(args))
    yield (
        preclip.name in ("adadps", "subspace") and public_dataset is None,
        f"preconditioner={preclip.name!r} learns from public records, and there are none.",
        "Pass public_dataset to the trainer; without public records use --preconditioner dp2_rmsprop.",
    )
    yield (
        args.public_mirror_descent is not None and public_dataset is None,
        f"public_mirror_descent={args.public_mirror_descent!r} mixes gradients of public records in.",
        "Pass public_dataset to the trainer.",
    )
    yield (
        public_dataset is not None and is_training_data(public_dataset, given.get("train_dataset")),
        "public_dataset is the training dataset, whose records are private: their gradients would be used un-noised.",
        "Pass records that are public, or leave it out.",
    )
    needed = preclip.num_public_records if isinstance(preclip, PublicSubspaceProjection) else args.public_batch_size
    yield (
        public_dataset is not None and len(public_dataset) < needed,
        f"A draw of {needed} public records was asked for, and public_dataset has {len(public_dataset or ())}.",
        "Lower public_batch_size (or rank and num_public of the subspace), or give more public records.",
    )
    given_optimizer = (given.get("optimizers") or (None, None))[0]
    yield (
        given_optimizer is not None and args.optimizer_name() in OPTIMIZERS and args.filter is None,
        f"Two optimizers were given: --optim {args.optimizer_name()} and {type(given_optimizer).__name__}.",
        "Give one of them.",
    )


def _options(args: Any) -> Mapping[str, Any]:
    options = args.preconditioner_kwargs or {}
    if not isinstance(options, Mapping):
        raise DPConfigError(
            f"preconditioner_kwargs={options!r} is no mapping of names to values. Use JSON on a command line."
        )
    return options
