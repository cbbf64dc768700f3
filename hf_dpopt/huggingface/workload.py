"""Workload of the Trainer's optimizer and schedule, which correlated noise is tuned for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from transformers import Trainer, TrainingArguments, get_scheduler

from hf_dpopt.huggingface.inputs import TrainerInputs
from hf_dpopt.noise import Workload, momentum_workload
from hf_dpopt.noise.workloads import MAX_SCHEDULED_STEPS


def workload_of(inputs: TrainerInputs, num_steps: int) -> Workload:
    """Learning rates and momentum of a run, as a linear map from gradients to iterates.

    An adaptive optimizer divides by a second moment, which no linear map has. Its proxy is the plain sum of gradients,
    not their average with beta_1: noise that is tuned for an average may be large in every single step, where it fills
    the second moment and shortens the steps (docs/mechanisms.md has the measurement).

    Args:
        inputs: what the Trainer was given; ``optimizers`` replaces what `args` say.
        num_steps: optimizer steps.

    Returns:
        A workload that has no influence on privacy: nothing in it depends on the data.
    """
    _, options, scheduler = _optimizer(inputs)
    # a scheduler that has begun cannot be asked without moving it
    is_unknown = scheduler is not None or num_steps > MAX_SCHEDULED_STEPS
    momentum = float(options.get("momentum", 0.0))
    workload = momentum_workload(num_steps, momentum, None if is_unknown else _step_sizes(inputs.args, num_steps))
    return dataclasses.replace(workload, adaptive=is_adaptive(inputs))


def is_adaptive(inputs: TrainerInputs) -> bool:
    """Whether the optimizer divides by a second moment."""
    kind = _optimizer(inputs)[0]
    return not (isinstance(kind, type) and issubclass(kind, torch.optim.SGD))  # it may be a function that makes one


def mean_step_size(args: TrainingArguments, num_steps: int) -> float:
    """Mean learning rate of the run relative to the largest; 1 where metrics decide."""
    if num_steps > MAX_SCHEDULED_STEPS:  # nearly that of a shorter run, and soon enough known
        num_steps = MAX_SCHEDULED_STEPS
    sizes = _step_sizes(args, num_steps)
    return 1.0 if sizes is None else sum(sizes) / (len(sizes) * max(sizes))


def _optimizer(inputs: TrainerInputs) -> tuple[type, Mapping[str, Any], Any]:
    """Class, options and scheduler of the run's optimizer; no scheduler where the arguments name it."""
    optimizer, scheduler = inputs.optimizers or (None, None)
    if optimizer is not None:
        return type(optimizer), optimizer.param_groups[0], scheduler
    kind, options = inputs.optimizer_cls_and_kwargs or _named(inputs.args)
    return kind, options, scheduler


def _named(args: TrainingArguments) -> tuple[type, Mapping[str, Any]]:
    """Class and options of ``--optim sgd``, with its ``--optim_args``; every other name is an adaptive optimizer."""
    if getattr(args.optim, "value", args.optim) != "sgd":
        return torch.optim.Optimizer, {}
    return Trainer.get_optimizer_cls_and_kwargs(args)


def _step_sizes(args: TrainingArguments, num_steps: int) -> list[float] | None:
    """Learning rate of every step relative to the largest; None for a constant one, or one that metrics decide."""
    unused = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
    try:
        schedule = get_scheduler(
            args.lr_scheduler_type,
            optimizer=unused,
            num_warmup_steps=args.get_warmup_steps(num_steps),
            num_training_steps=num_steps,
            scheduler_specific_kwargs=args.lr_scheduler_kwargs,  # type: ignore[arg-type]  # JSON was read into a dict
        )
        sizes = []
        for _ in range(num_steps):
            sizes.append(float(unused.param_groups[0]["lr"]))
            unused.step()
            schedule.step()
    except (TypeError, ValueError, ArithmeticError):
        return None  # ReduceLROnPlateau and its like, or options that the Trainer will refuse
    return None if min(sizes) == max(sizes) or max(sizes) <= 0 or min(sizes) < 0 else sizes
