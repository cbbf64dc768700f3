"""Refusals of preconditioners, filters and optimizers that do not go together or lack their inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from hf_dpopt.common.checks import check_count, check_mapping
from hf_dpopt.common.errors import Refusal, refuses, shown
from hf_dpopt.huggingface.inputs import TrainerInputs
from hf_dpopt.huggingface.stage_options import low_pass_of, optimizer_of
from hf_dpopt.optim import OPTIMIZERS, NoiseAwareOptimizer
from hf_dpopt.postprocess import Filter, Postprocess
from hf_dpopt.preclip import Preclip, make_preclip
from hf_dpopt.records.overlap import TrainingRows

SHARED = 0.1  # of the public records, from which on they are not public: short texts repeat


@refuses
def check_stages(inputs: TrainerInputs, training: TrainingRows) -> Iterator[Refusal]:
    """Refuse preconditioners, filters and optimizers that do not go together, or lack their inputs."""
    args = inputs.args
    check_count("public_batch_size", args.public_batch_size)
    yield from _on_kinds(inputs)
    low_pass, optimizer = low_pass_of(args), _optimizer(inputs)
    yield from _on_what_is_given_twice(inputs, optimizer)
    preclip = _preclip(inputs)
    yield from _on_public_records(inputs, training, preclip)
    inner = optimizer.filter if isinstance(optimizer, NoiseAwareOptimizer) else None
    before = [] if low_pass is None or inner is not None else [low_pass]
    yield from _on_noise_level(args, preclip, optimizer, [*before, *inputs.postprocess], inner)


@refuses
def check_public_records(inputs: TrainerInputs, training: TrainingRows) -> Iterator[Refusal]:
    """Refuse public records as the trainer prepared them: training records among them, or too few."""
    yield from _on_public_records(inputs, training, _preclip(inputs))


def _preclip(inputs: TrainerInputs) -> Preclip:
    given = inputs.args.preconditioner_kwargs or {}
    options = check_mapping("preconditioner_kwargs", given, '{"clipping_norm": 5}')
    return inputs.preclip or make_preclip(inputs.args.preconditioner, options)


def _optimizer(inputs: TrainerInputs) -> Any:
    """The optimizer that was given, or one like it; None for one of transformers'. Refuses what is out of range."""
    args = inputs.args
    given, cls_and_kwargs = (inputs.optimizers or (None, None))[0], inputs.optimizer_cls_and_kwargs
    one = [torch.nn.Parameter(torch.zeros(1))]
    if cls_and_kwargs is not None:
        cls, options = cls_and_kwargs
        is_ours = isinstance(cls, type) and issubclass(cls, NoiseAwareOptimizer)  # a function may make one, too
        return cls(one, **{"lr": args.learning_rate, **options}) if is_ours else given
    ours = optimizer_of(args) if given is None else None
    return given if ours is None else ours[0](one, **{**ours[1], "weight_decay": args.weight_decay})


def _on_kinds(inputs: TrainerInputs) -> Iterator[Refusal]:
    yield (
        inputs.preclip is not None and not isinstance(inputs.preclip, Preclip),
        f"preclip={shown(inputs.preclip)} is no preconditioner. Give an object of a class that extends "
        "hf_dpopt.preclip.Preclip, such as ScaleThenPrivatize(scale=..); names go to the argument preconditioner.",
    )
    for stage in inputs.postprocess:
        yield (
            not isinstance(stage, Postprocess),
            f"postprocess={shown(stage)} is no map of gradients. Give objects of a class that extends "
            "hf_dpopt.postprocess.Postprocess.",
        )


def _on_what_is_given_twice(inputs: TrainerInputs, optimizer: Any) -> Iterator[Refusal]:
    args = inputs.args
    is_given = (inputs.optimizers or (None, None))[0] is not None or inputs.optimizer_cls_and_kwargs is not None
    yield (
        inputs.preclip is not None and args.preconditioner != "none",
        f"Two preconditioners were given: preclip={type(inputs.preclip).__name__} and "
        f"preconditioner={args.preconditioner!r}. Give one of them.",
    )
    yield (
        is_given and args.optim in OPTIMIZERS,
        f"Two optimizers were given: --optim {args.optim} and one that the trainer was called with. Give one of them.",
    )
    yield (
        is_given and args.filter is not None and isinstance(optimizer, NoiseAwareOptimizer),
        f"--filter {args.filter} belongs into the optimizer, and {type(optimizer).__name__} was made by the caller. "
        "Give the filter to the optimizer: filter=LowPassFilter.parse(..).",
    )
    yield (
        args.average_iterate is not None and bool(args.load_best_model_at_end),
        "`load_best_model_at_end` would replace the average by single iterates, which are evaluated on the way. "
        "Leave out one of load_best_model_at_end and average_iterate.",
    )


def _on_public_records(inputs: TrainerInputs, training: TrainingRows, preclip: Preclip) -> Iterator[Refusal]:
    args, public = inputs.args, inputs.public_dataset
    yield (
        preclip.needs_public_records and public is None,
        f"preconditioner={preclip.name!r} learns from public records, and there are none. Pass public_dataset to the "
        "trainer; without public records use --preconditioner dp2_rmsprop.",
    )
    yield (
        args.public_mirror_descent is not None and public is None,
        f"public_mirror_descent={args.public_mirror_descent!r} mixes gradients of public records in. Pass "
        "public_dataset to the trainer.",
    )
    if public is None:
        return
    yield (
        training.make_up(public, SHARED),
        f"At least {SHARED:.0%} of public_dataset are in the training dataset, whose records are private: their "
        "gradients would be used un-noised. Pass records that are public, or leave it out.",
    )
    needed = preclip.num_public_records or args.public_batch_size
    yield (
        len(public) < needed,
        f"A draw of {needed} public records was asked for, and public_dataset has {len(public)}. Lower "
        "public_batch_size (or rank and num_public of the subspace), or give more public records.",
    )


def _on_noise_level(
    args: Any, preclip: Preclip, optimizer: Any, maps: Sequence[Postprocess], inner: Filter | None
) -> Iterator[Refusal]:
    """Refusals of optimizers and filters that correct for the noise without knowing its level.

    Args:
        args: training arguments.
        preclip: spec of the preconditioner.
        optimizer: see `_optimizer`.
        maps: maps of the released gradient before the optimizer, in their order.
        inner: the filter inside of the optimizer.
    """
    stages, name = [*maps, *([] if inner is None else [inner])], type(optimizer).__name__
    adaptive = [type(stage).__name__ for stage in stages if _needs_level(stage)]
    corrects = isinstance(optimizer, NoiseAwareOptimizer) and optimizer.subtracts_noise
    yield (
        not preclip.keeps_one_noise_level and (corrects or bool(adaptive)),
        "The noise that this preconditioner leaves differs from coordinate to coordinate, and "
        f"{(name if corrects else ', '.join(adaptive[:1]))} corrects for one level. Use --optim adamw_torch, "
        "dp_adamw or sgd, and a fixed filter.",
    )
    silent = [type(stage).__name__ for stage in maps if stage.gain is None]
    yield (
        corrects and bool(silent),
        f"{', '.join(silent)} changes the noisy gradient, and {name} has to know the noise level in it. Give a map "
        "that multiplies all coordinates by one number the attribute gain; for others use adamw_torch.",
    )
    first = next((i for i, stage in enumerate(stages) if stage.gain is None), len(stages))
    told_nothing = [type(stage).__name__ for stage in stages[first + 1 :] if _needs_level(stage)]
    yield (
        bool(told_nothing),
        f"{', '.join(told_nothing)} corrects for the noise, and a map before it changes the noisy gradient: its "
        "noise has no one level there. Put the filter that corrects first, and leave one out if there are two.",
    )
    yield (
        bool(args.max_grad_norm) and (corrects or _needs_level(inner)),
        f"max_grad_norm={args.max_grad_norm} rescales the noisy gradient, and {name} would subtract the noise it had "
        "before. Leave max_grad_norm at 0 (clipping_norm is the clip of privacy), or use --optim adamw_torch.",
    )


def _needs_level(stage: Postprocess | None) -> bool:
    return isinstance(stage, Filter) and stage.needs_noise_level
