"""A step taken again from the journal of a killed run: all that comes after the release, and nothing before it.

It is post-processing of released values: no record is read, nothing is charged, and no noise is drawn for a release.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch

from hf_dpopt.clipping import ClippingEngine
from hf_dpopt.common.log import logger
from hf_dpopt.common.sharding import cut_like, whole_of
from hf_dpopt.common.types import Released
from hf_dpopt.postprocess import Map
from hf_dpopt.preclip.queries import parameter_of
from hf_dpopt.run.run import PrivateRun
from hf_dpopt.run.step import write_gradients


def replay_step(engine: ClippingEngine, *, run: PrivateRun, step: int, chain: Sequence[Map] = ()) -> bool:
    """Leave in `p.grad` what a step left there before the run was killed, bit for bit.

    Call it in place of `private_step` for every step that `run.recovery` covers, in order, then `optimizer.step()`
    where it returns True.

    Args:
        engine: the one that the step would be clipped with.
        run: run that was continued.
        step: optimizer step, 1-based.
        chain: maps of the released mean gradient.

    Returns:
        Whether there is an update. False for a step whose release was lost with the kill: it stays charged and is done
        without one, so the optimizer must not step; schedules go past it. Gradients are zeros then.
    """
    if run.preclip.awaits_opening:
        _answer_again(engine, run, step)
    for scale in run.preclip.scales():
        engine.empty_sum(scale)  # a subspace of public gradients begins its step with it
    released = run.take_again(step)
    if released is None:
        run.preclip.pass_over()
        for p in engine.parameters.values():
            p.grad = torch.zeros_like(p)
        return False
    released = run.metrics.receive(_on_device_of(engine, released))
    released = run.preclip.receive(released)
    for stage in chain:
        released = stage(released)
    write_gradients(engine.parameters, released)
    return True


def _answer_again(engine: ClippingEngine, run: PrivateRun, step: int) -> None:
    """Give the preconditioner the answer to its opening query, or none if it was lost: its charge is spent."""
    released = run.take_again(step, is_opening=True)
    if released is None:
        run.preclip.pass_over_opening()
        logger.warning(
            "The run was killed while it asked the query before its first step. The query is charged, so it is not "
            "asked again, and its answer is lost: the run goes on without the division that was to be made of it. To "
            "have it, start over in another output_dir; what was spent here comes on top."
        )
    else:
        run.preclip.receive_opening(_on_device_of(engine, released))


def _on_device_of(engine: ClippingEngine, released: Released) -> Released:
    def placed(name: str, value: torch.Tensor) -> torch.Tensor:
        p = engine.parameters.get(parameter_of(name))
        return value.to(first.device) if p is None else cut_like(p, value)  # None: counts and numbers

    first = next(iter(engine.parameters.values()))
    return Released({name: placed(name, value) for name, value in released.items()})


def digest_of(parameters: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of names, types, shapes and values of the trained parameters, in hexadecimal.

    Args:
        parameters: name -> parameter, in any order. Of those in shards the whole is taken, by all ranks together.
    """
    digest = hashlib.sha256()
    for name in sorted(parameters):
        value = whole_of(parameters[name].detach()).contiguous().cpu()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
