"""The private step on one page: charge, clip, sum, noise, release. Nothing else may stand between the stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from hf_dpopt.clipping import ClippingEngine, UnprivatizedStatistics
from hf_dpopt.common.types import ClippedSums
from hf_dpopt.postprocess import Postprocess
from hf_dpopt.preclip import Preconditioning
from hf_dpopt.records.losses import RecordLosses
from hf_dpopt.run import queries
from hf_dpopt.run.run import PrivateRun
from hf_dpopt.run.units import add_batch


def private_step(
    engine: ClippingEngine,
    losses: RecordLosses,
    physical_batches: Iterable[Any],
    *,
    run: PrivateRun,
    step: int,
    preclip: Preconditioning | None = None,
    chain: Sequence[Postprocess] = (),
) -> UnprivatizedStatistics:
    r"""Leaves ``(sum_b clip(g_b / D) + noise) / expected_batch_size`` in `p.grad` of every trainable parameter.

    Call it once per optimizer step, also when the logical batch is empty, then `optimizer.step()`.

    Formal guarantee: if `physical_batches` of all ranks together hold each record drawn by `run.draw(step)` once, the
    gradients left in the model are one release of `run.plan`'s mechanism, and it was charged before any record was
    looked at. Every trainable coordinate is noised.

    Args:
        engine: made once for the model, with the clipping rule of the plan.
        losses: the model's per-record losses.
        physical_batches: this rank's share of the logical batch, collated, on the device; may be empty. With users as
            the unit, `hf_dpopt.users.batches` of whole users.
        run: keys, ledger and plan of the run.
        step: optimizer step, 1-based; every step of a run once, in order.
        preclip: D, made once by `run.start_preclip(engine)`; None for the plan's if that is no division at all.
        chain: maps of the released mean gradient.

    Returns:
        What the step saw before the noise, on this rank. Secret.

    Raises:
        DPConfigError: before the step is charged, for an engine, a preconditioner or scales that the plan's noise was
            not made for.
        DPBudgetExceeded: before the step runs, if it would spend more than the target.
    """
    preclip = run.allowed(preclip)
    scales = run.checked(engine, preclip.scales())
    run.charge(step)
    clipped = [engine.empty_sum(scale) for scale in scales]
    seen = UnprivatizedStatistics()
    for batch in physical_batches:
        for query in clipped:
            seen += add_batch(query, engine, losses, batch, sums_users=run.plan.sums_users)
    sums = ClippedSums(queries.joined([query.result() for query in clipped]))
    sums = run.ranks.sum(sums)
    # private from here
    run.noise.add_(sums, step)
    # released from here
    torch._foreach_div_(list(sums.values()), run.plan.config.expected_batch_size)
    released = preclip.receive(queries.split(sums, len(clipped)))
    for stage in chain:
        released = stage(released)
    for name, p in engine.parameters.items():
        p.grad = released[name].to(p.dtype)
    return seen
