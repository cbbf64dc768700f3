"""The private step on one page: charge, clip, sum, noise, release. Nothing else may stand between the stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hf_dpopt.clipping import ClippingEngine, UnprivatizedStatistics
from hf_dpopt.clipping.measures import Measures
from hf_dpopt.clipping.scaling import Scale
from hf_dpopt.common.collectives import Ranks
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.reduction import Reduction
from hf_dpopt.common.types import ClippedSums, Released
from hf_dpopt.postprocess import Map
from hf_dpopt.preclip import queries
from hf_dpopt.records.losses import RecordLosses
from hf_dpopt.run.opening import ask
from hf_dpopt.run.run import PrivateRun
from hf_dpopt.run.units import add_batch


def private_step(
    engine: ClippingEngine,
    losses: RecordLosses,
    physical_batches: Iterable[Any],
    *,
    run: PrivateRun,
    step: int,
    chain: Sequence[Map] = (),
    everything: Callable[[], Iterable[Any]] | None = None,
    stand_in: Callable[[], Any] | None = None,
) -> UnprivatizedStatistics:
    r"""Leave ``(sum_b clip(g_b / D) + noise) / expected_batch_size`` in `p.grad` of every trainable parameter.

    Call it once per optimizer step, also when the logical batch is empty, then `optimizer.step()`.

    Formal guarantee: if `physical_batches` of all ranks together hold each record drawn by `run.draw(step)` once, the
    gradients left in the model are one release of `run.plan`'s mechanism, and it was charged before any record was
    looked at. Every trainable coordinate is noised.

    Args:
        engine: made once for the model, with the clipping rule of the plan.
        losses: the model's per-record losses.
        physical_batches: this rank's share of the logical batch, collated, on the device; may be empty. With users as
            the unit, `hf_dpopt.users.batches` of whole users.
        run: keys, ledger and plan of the run, and the preconditioner D that `run.start_preclip(engine)` made, if the
            plan has one.
        step: optimizer step, 1-based; every step of a run once, in order.
        chain: maps of the released mean gradient.
        everything: gives this rank's share of all units, as physical batches; for a preconditioner that asks a query
            over them before the first step. None if there is no such query.
        stand_in: gives a batch whose records are not added, for a model in shards: every forward is a collective, so
            a rank that has fewer physical batches takes part with that. None where every rank has as many.

    Returns:
        What the step saw before the noise, on this rank. Secret.

    Raises:
        DPConfigError: before the step is charged, for an engine or scales that the plan's noise was not made for, and
            for a preconditioner that was not started.
        DPBudgetExceeded: before the step runs, if it would spend more than the target.
    """
    if everything is not None and run.preclip.awaits_opening:
        ask(engine, losses, everything(), run=run, step=step)
    scales = run.begin(step, engine)
    # private from here
    batches = physical_batches if not engine.is_collective else in_step(engine, physical_batches, stand_in, run.ranks)
    reduction, measures = run.reduction(engine, scales), run.metrics.measures()
    sums, seen = clip_and_sum(
        engine, losses, batches, scales, sums_users=run.plan.sums_users, reduction=reduction, measures=measures
    )
    joint = reduction.finish(sums)
    released = run.release(joint, step)
    # released from here
    released = run.metrics.receive(released)
    released = run.preclip.receive(released)
    for stage in chain:
        released = stage(released)
    write_gradients(engine.parameters, released)
    return seen


def clip_and_sum(
    engine: ClippingEngine,
    losses: RecordLosses,
    physical_batches: Iterable[Any],
    scales: Sequence[Scale | None],
    *,
    sums_users: bool,
    reduction: Reduction | None = None,
    measures: Measures | None = None,
) -> tuple[ClippedSums, UnprivatizedStatistics]:
    """The clipped sums of this rank, one query for each scale, side by side; and what was seen. Both are secret.

    Args:
        engine: clips.
        losses: losses of records.
        physical_batches: this rank's share of the logical batch.
        scales: scale of each query, or None for 1.
        sums_users: whether the plan clips whole users.
        reduction: takes what is final while the last batch is still at work, where it runs ahead.
        measures: numbers of the units that are summed beside their gradients, or None.
    """
    clipped = [engine.empty_sum(scale) for scale in scales]
    take = reduction.ready if reduction is not None and reduction.runs_ahead else None
    if measures is not None:
        clipped[0].take_measures(measures)  # once, whatever the number of queries
    seen = UnprivatizedStatistics()
    for batch, is_last in (
        ((batch, False) for batch in physical_batches) if take is None else with_last(physical_batches)
    ):
        for query in clipped:
            seen += add_batch(query, engine, losses, batch, sums_users=sums_users, take=take if is_last else None)
    return queries.join([query.result() for query in clipped]), seen


def with_last(batches: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
    """Yield each batch and whether it is the last one; the next one is made before one is handed out."""
    ahead = iter(batches)
    batch = next(ahead, None)
    while batch is not None:
        following = next(ahead, None)
        yield batch, following is None
        batch = following


def in_step(
    engine: ClippingEngine, batches: Iterable[Any], stand_in: Callable[[], Any] | None, ranks: Ranks
) -> Iterator[Any]:
    """Yield as many batches on every rank as on the one that has most; the engine leaves out what stands in.

    Raises:
        DPConfigError: on all ranks, if one needs a batch that stands in and there is none.
    """
    mine = iter(batches)
    while True:
        batch = next(mine, None)
        have = ranks.every(lambda: batch is not None)  # noqa: B023
        if not any(have):
            return
        if not all(have):
            ranks.every(lambda: _check_stands_in(stand_in))
        if batch is not None:
            yield batch
        else:
            assert stand_in is not None
            with engine.leaving_out():
                yield stand_in()


def _check_stands_in(stand_in: Callable[[], Any] | None) -> None:
    if stand_in is None:
        raise DPConfigError(
            "A rank has fewer physical batches than another, and with a model in shards it takes part in each of "
            "them. Pass a batch that is not added: private_step(.., stand_in=lambda: batch)."
        )


def write_gradients(parameters: Mapping[str, torch.nn.Parameter], released: Released) -> None:
    """Assign the gradient of every trained parameter, in its dtype: whatever was there is gone."""
    for name, p in parameters.items():
        p.grad = released[name].to(p.dtype)
