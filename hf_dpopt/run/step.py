"""The private step on one page: charge, clip, sum, noise, release. Nothing else may stand between the stages.

Below it: the query that a preconditioner may ask before the first step, and a step that is taken again from the
journal of a killed run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hf_dpopt.clipping import ClippingEngine, UnprivatizedStatistics
from hf_dpopt.clipping.measures import Measures
from hf_dpopt.clipping.scaling import Scale
from hf_dpopt.common.collectives import Ranks
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.log import logger
from hf_dpopt.common.reduction import Reduction
from hf_dpopt.common.sharding import cut_like, whole_of
from hf_dpopt.common.types import ClippedSums, Released
from hf_dpopt.postprocess import Postprocess
from hf_dpopt.preclip import queries
from hf_dpopt.records.losses import RecordLosses
from hf_dpopt.run.batches import add_batch
from hf_dpopt.run.run import PrivateRun


def private_step(
    engine: ClippingEngine,
    losses: RecordLosses,
    physical_batches: Iterable[Any],
    *,
    run: PrivateRun,
    step: int,
    after_noise: Sequence[Postprocess] = (),
    everything: Iterable[Any] | None = None,
    stand_in: Any = None,
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
            the unit, `hf_dpopt.users.user_batches` of whole users.
        run: keys, ledger and plan of the run, and the preconditioner D that `run.start_preclip(engine)` made, if the
            plan has one.
        step: optimizer step, 1-based; every step of a run once, in order.
        after_noise: maps of the released mean gradient.
        everything: this rank's shard of the dataset once, in physical batches, for preconditioners with an initial
            query, the only ones that read it. None if there is no such query.
        stand_in: a batch whose records are not added, for a model in shards: every forward is a collective, so a rank
            that has fewer physical batches takes part with that. None where every rank has as many.

    Returns:
        What the step saw before the noise, on this rank. Secret.

    Raises:
        DPConfigError: before the step is charged, for an engine or scales that the plan's noise was not made for, and
            for a preconditioner that was not started; for a step beyond the plan, whose steps alone are affordable.
    """
    if everything is not None and run.preclip.awaits_opening:
        ask(engine, losses, everything, run=run, step=step)
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
    for stage in after_noise:
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


def in_step(engine: ClippingEngine, batches: Iterable[Any], stand_in: Any, ranks: Ranks) -> Iterator[Any]:
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
            with engine.leaving_out():
                yield stand_in


def _check_stands_in(stand_in: Any) -> None:
    if stand_in is None:
        raise DPConfigError(
            "A rank has fewer physical batches than another, and with a model in shards it takes part in each of "
            "them. Pass a batch that is not added: private_step(.., stand_in=batch)."
        )


def write_gradients(parameters: Mapping[str, torch.nn.Parameter], released: Released) -> None:
    """Assign the gradient of every trained parameter, in its dtype: whatever was there is gone."""
    for name, p in parameters.items():
        p.grad = released[name].to(p.dtype)


# --- the query before the first step ---


def ask(
    engine: ClippingEngine, losses: RecordLosses, everything: Iterable[Any], *, run: PrivateRun, step: int
) -> None:
    """Ask the query of the preconditioner over all units, and give it the answer.

    Formal guarantee: if `everything` of all ranks together holds each unit once, the answer is one release of the
    query that `run.plan` composes with the steps, and it was charged before any record was looked at.

    Args:
        engine: made once for the model, with the clipping rule of the plan.
        losses: the model's per-record losses.
        everything: this rank's share of all units, as physical batches.
        run: run of the plan, which awaits the answer.
        step: the first step of its chain.

    Raises:
        DPConfigError: see `PrivateRun.begin_opening`.
    """
    query = run.begin_opening(step, engine)
    if run.ranks.rank == 0:
        logger.info(f"Query before the first step: one pass over all {run.plan.num_examples:,} units.")
    # private from here
    for batch in everything:
        add_batch(query, engine, losses, batch, sums_users=run.plan.sums_users)
    joint = run.ranks.sum(query.result())
    released = run.release(joint, step, is_opening=True)
    # released from here
    run.preclip.receive_opening(released)


# --- taken again: post-processing of what was released; no record is read, nothing is charged, no noise is drawn ---


def replay_step(
    engine: ClippingEngine, *, run: PrivateRun, step: int, after_noise: Sequence[Postprocess] = ()
) -> bool:
    """Leave in `p.grad` what a step left there before the run was killed, bit for bit.

    Call it in place of `private_step` for every step that `run.recovery` covers, in order, then `optimizer.step()`
    where it returns True.

    Args:
        engine: the one that the step would be clipped with.
        run: run that was continued.
        step: optimizer step, 1-based.
        after_noise: maps of the released mean gradient.

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
    _check_fits(engine, released, step)
    released = run.metrics.receive(_on_device_of(engine, released))
    released = run.preclip.receive(released)
    for stage in after_noise:
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


def _check_fits(engine: ClippingEngine, released: Released, step: int) -> None:
    """Refuse an entry of another model's tensors, as somebody may write who can write to `output_dir`."""
    found = {queries.parameter_of(name): tuple(value.shape) for name, value in released.items()}
    differing = [name for name, p in engine.parameters.items() if found.get(name) != tuple(p.shape)]
    if differing:
        raise DPConfigError(
            f"What the journal has of step {step} does not fit the model: {', '.join(differing[:3])}. Remove the "
            "folder _journal: the run then goes on from its last checkpoint, and the steps since are paid for again."
        )


def _on_device_of(engine: ClippingEngine, released: Released) -> Released:
    def placed(name: str, value: torch.Tensor) -> torch.Tensor:
        p = engine.parameters.get(queries.parameter_of(name))
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
