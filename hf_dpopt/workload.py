"""What the Trainer's optimizer and schedule make of the noise: the workload that correlated noise is tuned for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import TrainingArguments, get_scheduler

from hf_dpopt.mechanisms.strategies import Workload, momentum_workload

MAX_SCHEDULED_STEPS = 4096  # a schedule makes the matrix of the workload dense; beyond, noise is tuned without it
FIRST_MOMENT = ("adam", "lion", "galore", "apollo", "radam")  # optimizers that average gradients with beta_1


def workload_of(args: TrainingArguments, num_steps: int, given: Mapping[str, Any] | None = None) -> Workload:
    """Learning rates and momentum of a run, as a linear map from gradients to iterates.

    An adaptive optimizer divides by a second moment, which no linear map has; its first moment is the proxy.

    Args:
        args: of the run.
        num_steps: optimizer steps.
        given: what the Trainer was called with; ``optimizers`` replaces what `args` say.

    Returns:
        A workload that has no influence on privacy: nothing in it depends on the data.
    """
    optimizer, scheduler = (given or {}).get("optimizers") or (None, None)
    momentum = _momentum(optimizer) if optimizer is not None else _momentum_of(args)
    if scheduler is not None or num_steps > MAX_SCHEDULED_STEPS:
        return momentum_workload(num_steps, momentum)  # a scheduler that has begun cannot be asked without moving it
    return momentum_workload(num_steps, momentum, _step_sizes(args, num_steps))


def _momentum_of(args: TrainingArguments) -> float:
    name = str(getattr(args.optim, "value", args.optim)).lower()
    return args.adam_beta1 if any(part in name for part in FIRST_MOMENT) else 0.0


def _momentum(optimizer: torch.optim.Optimizer) -> float:
    group = optimizer.param_groups[0]
    return float(group["betas"][0] if "betas" in group else group.get("momentum", 0.0))


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
    except (TypeError, ValueError):  # ReduceLROnPlateau and its like, or options that the Trainer will refuse
        return None
    return None if min(sizes) == max(sizes) or max(sizes) <= 0 or min(sizes) < 0 else sizes
