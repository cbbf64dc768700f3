"""Self-check of a model in shards: is the clipped sum over the ranks that of a naive loop of plain backwards?

A plain backward of FSDP2 leaves the mean of the ranks' gradients. So every rank computes the same made-up record, and
the mean is its gradient. The engine meets the batch on rank 0 alone, the others take part without records: a mistake
in how shards are cut, summed or skipped shows. Dropout is off, for masks cannot be drawn record by record here.

Shape legend: B = records.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from hf_dpopt.clipping.engine import ClippingEngine
from hf_dpopt.clipping.thresholds import Clipping, FlatClipping
from hf_dpopt.common.collectives import Ranks, current_ranks
from hf_dpopt.common.errors import UnsupportedModuleError
from hf_dpopt.common.sharding import give_back, is_sharded, local_of
from hf_dpopt.common.types import Gradients
from hf_dpopt.huggingface.self_check import conditions
from hf_dpopt.huggingface.self_check.checks import SelfCheck
from hf_dpopt.huggingface.self_check.equality import MIXING, clip_half_of
from hf_dpopt.huggingface.self_check.made_up import LOOKS, MAX_TOKENS, padding_side_of, rows, synthetic_batch
from hf_dpopt.huggingface.self_check.probe import NARROW_TOLERANCE, TOLERANCE, clipped_by
from hf_dpopt.records.limits import padding_id_of
from hf_dpopt.records.losses import RecordLosses, num_records

UNCLIPPED = FlatClipping(clipping_norm=1e30)
NOTE = "the model lies in shards, so it was checked without dropout, and not searched for draws that records share"


def self_check_of_shards(
    engine: ClippingEngine,
    losses: RecordLosses,
    like: Mapping[str, Any],
    *,
    padding_id: int | None,
    padding_side: str | None = None,
) -> SelfCheck:
    """Compare the engine's sum over the ranks with a loop over single records; all ranks call it together.

    Formal guarantee: on return, for these made-up inputs and without dropout, the clipped sum that the ranks hold in
    shards is that of one plain backward per record, so no record's gradient depended on another record.

    Args:
        engine: the engine that training uses.
        losses: the losses that training uses.
        like: one collated batch, for keys, dtypes and dimensions.
        padding_id: the tokenizer's padding token; None takes the model's where the batch has an attention_mask.
        padding_side: "left" or "right"; None takes the side that the mask of `like` shows.

    Raises:
        UnsupportedModuleError: naming the tensor that differs.
    """
    start, ranks = time.perf_counter(), current_ranks()
    num_records(like)  # refuses packed batches
    model = engine.model
    if padding_id is None and "attention_mask" in like:
        padding_id = padding_id_of(model)
    made_up = synthetic_batch(like, model, padding_id, padding_side=padding_side or padding_side_of(like))
    device = conditions.device_of(model)
    batch = _on(device, ranks.same(lambda: _on(torch.device("cpu"), made_up)))
    dtypes = {p.dtype for p in model.parameters()}
    tolerance = NARROW_TOLERANCE if dtypes & set(conditions.NARROW) else TOLERANCE.get(next(iter(dtypes)), 1e-4)
    with conditions.keep_generators(device), conditions.in_mode(model, training=False):
        alone = [_gradient(engine, losses, rows(batch, b)) for b in range(len(LOOKS))]
        squares = [_squares(engine.clipping, one, ranks) for one in alone]
        clippings: list[Clipping] = [UNCLIPPED]
        norms = [torch.stack(list(one.values())).sum().sqrt().item() for one in squares]
        half = clip_half_of(engine.clipping, norms)
        clippings += [] if half is None else [half]
        error = max(_compare(engine, losses, batch, clipping, alone, ranks, tolerance) for clipping in clippings)
    give_back(model)
    return SelfCheck(error, 0.0, time.perf_counter() - start, MAX_TOKENS, (NOTE,))


def _on(device: torch.device, batch: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


def _gradient(engine: ClippingEngine, losses: RecordLosses, record: Mapping[str, Any]) -> Gradients:
    """The gradient of a record that every rank has, in shards: the mean of equal gradients is each of them."""
    losses(record).sum().backward()
    found = {}
    for name, p in engine.parameters.items():
        found[name] = torch.zeros_like(p, requires_grad=False) if p.grad is None else p.grad.detach().clone()
        p.grad = None
    return found


def _squares(clipping: Clipping, gradient: Gradients, ranks: Ranks) -> dict[str, torch.Tensor]:
    """Group -> squared norm over all shards, float64, one element."""
    squares: dict[str, torch.Tensor] = {}
    for name, g in gradient.items():
        mine = local_of(g).double().square().sum().reshape(1)
        share = mine if is_sharded(g) else mine / ranks.size
        group = clipping.group(name)
        squares[group] = squares[group] + share if group in squares else share
    return {group: torch.stack(ranks.gather(square)).sum(0) for group, square in sorted(squares.items())}


def _compare(
    engine: ClippingEngine,
    losses: RecordLosses,
    batch: Mapping[str, Any],
    clipping: Clipping,
    alone: list[Gradients],
    ranks: Ranks,
    tolerance: float,
) -> float:
    """The largest relative error of a tensor of the engine's sum.

    Raises:
        UnsupportedModuleError: on all ranks, if it is larger than the tolerance.
    """
    got = _engine_sum(engine, losses, batch, clipping, len(alone), ranks)
    squares = [_squares(clipping, one, ranks) for one in alone]
    factors = clipping.factors({group: torch.cat([s[group] for s in squares]) for group in squares[0]})
    names, mine = sorted(got), []
    for name in names:
        weights_B = factors[clipping.group(name)].tolist()
        want = torch.stack([w * local_of(one[name]).double() for w, one in zip(weights_B, alone, strict=True)]).sum(0)
        difference = local_of(got[name]).double() - want
        share = 1.0 if is_sharded(got[name]) else 1 / ranks.size
        mine.append(torch.stack([difference.square().sum(), want.square().sum()]) * share)
    squares_N2 = torch.stack(ranks.gather(torch.stack(mine))).sum(0)
    length = squares_N2[:, 1].sum().sqrt().clamp(min=1e-12)
    errors = dict(zip(names, (squares_N2[:, 0].sqrt() / length).tolist(), strict=True))
    where = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    worst = errors[where]
    if not worst <= tolerance:
        raise UnsupportedModuleError(
            "Self-check failed before training: the clipped sum over the processes differs from a loop over single "
            f"records in {where} by {worst:.2g} (allowed {tolerance:g}). {MIXING}"
        )
    return worst


def _engine_sum(
    engine: ClippingEngine,
    losses: RecordLosses,
    batch: Mapping[str, Any],
    clipping: Clipping,
    num: int,
    ranks: Ranks,
) -> Gradients:
    """The clipped sum of a batch that rank 0 alone has."""
    sums = engine.empty_sum()
    with clipped_by(engine, clipping):
        if ranks.rank == 0:
            engine.add_clipped_sum(sums, lambda: losses(batch), num)
        else:
            with engine.leaving_out():
                engine.add_clipped_sum(sums, lambda: losses(batch), num)
    return ranks.sum(sums.result())
