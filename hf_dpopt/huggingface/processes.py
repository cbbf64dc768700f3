"""Processes of a run: those that a launcher did not start, and what accelerate must not do among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_dpopt.common.log import logger


def warn_if_alone(environment: Mapping[str, str], num_processes: int) -> None:
    """Warn of one process where `accelerate launch` was asked for several.

    With ``--cpu`` it starts one, whatever ``--num_processes`` says, unless MPI is set up, and says nothing (accelerate
    1.15). It then sets an address for processes to meet at, and no rank.

    Args:
        environment: variables of this process.
        num_processes: number of processes that train together, >= 1.
    """
    is_launched = "ACCELERATE_USE_CPU" in environment and "MASTER_ADDR" in environment
    if num_processes == 1 and is_launched and "RANK" not in environment:
        logger.warning(
            "One process trains, although `accelerate launch` was asked for several: with --cpu it starts one. The "
            "statement is as true as with several, and training slower. Fix: start them with `torchrun "
            "--nproc_per_node=<number> <script>`."
        )


def average_no_gradients(accelerator: Any) -> None:
    """Place models as usual, autocast included, but without DistributedDataParallel.

    Its reducer would average un-noised gradients. The step does one SUM of clipped sums instead.
    """
    prepare = accelerator.prepare_model
    accelerator.prepare_model = lambda model, device_placement=None, evaluation_mode=False: prepare(
        model, device_placement=device_placement, evaluation_mode=True
    )
