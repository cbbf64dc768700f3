"""Comparisons: the engine's sum with a loop over single records, and a record with itself beside others.

Shape legend: B = records, T = tokens.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hf_dpopt.clipping.engine import ClippingEngine
from hf_dpopt.clipping.scaling import Diagonal, Factored, Scale
from hf_dpopt.clipping.thresholds import FlatClipping
from hf_dpopt.clipping.units import Units
from hf_dpopt.common.errors import UnsupportedModuleError
from hf_dpopt.records.collation import TARGETS
from hf_dpopt.records.losses import RecordLosses, base_model, num_records
from hf_dpopt.self_check.draws import MIDDLE
from hf_dpopt.self_check.made_up import Columns, Look, add_padding, rows
from hf_dpopt.self_check.precision import (
    ACCELERATOR,
    FLOORS,
    NARROW_SAME_SHAPES,
    NARROW_TOLERANCE,
    TOLERANCE,
    in_enough_digits,
    tolerance_of_others,
)
from hf_dpopt.self_check.probe import (
    Gradient,
    Probe,
    clipped_by,
    distance,
    length,
    plain_gradient,
    probing,
)

Batch = Mapping[str, Any]

EXTRA_PADDING = 3
UNCLIPPED = FlatClipping(clipping_norm=1e30)
MIXING = (
    "The model mixes records, or one of its layers is not captured right. Freeze that layer, train with LoRA on "
    "others, and report the model; --skip_self_check would make the privacy statement unfounded."
)
PADDING = (
    "Pass attention_mask (use DataCollatorWithPadding); a model that counts positions from the first column needs "
    "padding_side='right', and one that knows no mask needs records of one length (and no processing_class)."
)

# Neighbours of the two records that are watched. A capacity goes to the first record, so an equal one comes first; a
# scale follows the largest record, so that is never a watched one.
BESIDE = (
    (Look(1.0), Look(0.7)),
    (Look(1.0, "constant"), Look(1.0, "large")),
    (Look(0.01), Look(0.01, "large")),
)
BESIDE_ONE = (Look(1.0), Look(1.0, "constant"), Look(1.0, "large"))
WATCHED = (Look(0.15), Look(0.8, "constant"))


# --- the engine, and a loop over single records ----------------------------------------------------------------------


def check_sums(probe: Probe, batch: Batch, num: int, *, is_scaled: bool = False) -> tuple[Gradient, float]:
    """Compare the engine's sum with the loop's; returns the sum without a clip, and the largest error.

    First without a clip, where an error names the tensor it is in; then with one that half of the records meet.
    """
    what, everyone = "the clipped sum differs from a loop over single records", range(num)
    unclipped = probe.engine_sum(batch, UNCLIPPED, everyone)
    alone = [probe.gradient(rows(batch, b), b) for b in everyone]
    error = probe.check_equal(unclipped, probe.clipped_sum(UNCLIPPED, alone), what, MIXING)
    clipping = probe.clip_half(alone)
    if clipping is not None:
        got = probe.engine_sum(batch, clipping, everyone)
        error = max(error, probe.check_equal(got, probe.clipped_sum(clipping, alone), what, MIXING))
    if is_scaled:
        error = max(error, _check_scaled_sums(probe, batch, alone))
    return unclipped, error


def _check_scaled_sums(probe: Probe, batch: Batch, alone: list[Gradient]) -> float:
    """Compare sums clipped in the coordinates of a preconditioner, with a clip that half of the records meet."""
    what, error = "the clipped sum of preconditioned gradients differs from a loop over single records", 0.0
    if probe.draws is not None:
        probe.draws.stop()
    for scale in _made_up_scales(probe.engine.parameters):
        scaled = [{n: g * scale.weights(n, g).view_as(g) for n, g in one.items()} for one in alone]
        clipping = probe.clip_half(scaled)
        if clipping is not None:
            got = probe.engine_sum(batch, clipping, range(len(alone)), scale=scale)
            error = max(error, probe.check_equal(got, probe.clipped_sum(clipping, scaled), what, MIXING))
    return error


def _made_up_scales(parameters: Mapping[str, torch.Tensor]) -> list[Scale]:
    """Make a full and a factored scale over two orders of magnitude."""
    generator = torch.Generator().manual_seed(2)

    def values(*shape: int) -> torch.Tensor:
        return 10.0 ** (2 * torch.rand(*shape, generator=generator) - 1).to(next(iter(parameters.values())).device)

    full: dict[str, Diagonal | Factored] = {n: Diagonal(values(*p.shape)) for n, p in parameters.items()}
    factored = {n: Factored(values(len(p)), values(p[0].numel())) for n, p in parameters.items() if p.dim() > 1}
    return [Scale(full), Scale({**full, **factored})]


def check_units(probe: Probe, batch: Batch, num: int) -> float:
    """Compare units of several records, clipped once, side by side in a batch and added up in parts."""
    alone = [probe.gradient(rows(batch, b), b) for b in range(num)]
    sizes = (num - 1, 1)
    first = {name: torch.stack([one[name] for one in alone[: sizes[0]]]).sum(dim=0) for name in alone[0]}
    together = [first, alone[-1]]
    norm = max(map(length, together))
    if not norm > 0:
        return 0.0
    engine = probe.engine
    clipping = dataclasses.replace(engine.clipping, clipping_norm=norm / 2)  # type: ignore[type-var]
    want = probe.clipped_sum(clipping, together)
    what = "the clipped sum of users differs from a loop over users"
    with clipped_by(engine, clipping):
        side_by_side, in_parts = engine.empty_sum(), engine.empty_sum()
        engine.add_clipped_sum(side_by_side, lambda: probe.losses_of(batch, range(num)), num, Units(sizes))
        each = [lambda b=b: probe.losses_of(rows(batch, b), [b]) for b in range(num)]
        for parts in (each[: sizes[0]], each[sizes[0] :]):
            total = engine.gradient_of(parts)  # type: ignore[arg-type]
            engine.add_clipped(in_parts, {name: gradient.unsqueeze(0) for name, gradient in total.items()})
    return max(
        probe.check_equal(sums.result(), want, what, MIXING, added=clipping.clipping_norm)
        for sums in (side_by_side, in_parts)
    )


def check_influence(engine: ClippingEngine, losses: RecordLosses, together: Batch, alone: Sequence[Batch]) -> float:
    """Compare a collated batch of records of the dataset with the same records collated one by one, or in parts.

    Through the real collator: ``{a, b}`` against ``{a}`` and ``{b}``, each padded to its own length. Runs in training
    mode and in float32 (if that fits), with dropout that keeps everything, for masks of different widths cannot be
    compared. Half of the records are clipped, so an error is seen at any size of gradients.

    Formal guarantee: on return, the clipped sum of the batch is that of its records, up to the tolerance, for these
    records at these weights; so none of them moved it by more than its own clipped gradient.

    Args:
        engine: the engine that training uses.
        losses: the losses that training uses.
        together: collated batch, on the device.
        alone: collated batches that hold the same records, in the same order; on the device.

    Returns:
        The largest relative error of a tensor.

    Raises:
        UnsupportedModuleError: if it is larger than rounding explains.
        DPConfigError: for a packed batch.
    """
    num, sizes = num_records(together), [num_records(batch) for batch in alone]
    assert sum(sizes) == num, (sizes, num)
    what = "the clipped sum of records of the dataset is not the sum of what each gives alone"
    fix = (
        "The collator or the model mixes records, or a record's gradient depends on how long the others are. "
        f"{PADDING}"
    )

    def check(tolerance: float) -> float:
        with probing(engine, losses, together, range(num), tolerance) as probe:
            gradients: list[Gradient] = []
            for batch, size in zip(alone, sizes, strict=True):
                records = range(len(gradients), len(gradients) + size)
                for b in range(size):
                    loss = probe.losses_of(batch, records, per_record=MIDDLE)[b]
                    gradients.append(plain_gradient(loss, engine.parameters))
            clipping = probe.clip_half(gradients)
            if clipping is None:
                return 0.0
            got = probe.engine_sum(together, clipping, range(num), per_record=MIDDLE)
            want, norm = probe.clipped_sum(clipping, gradients), clipping.clipping_norm  # type: ignore[attr-defined]
            return probe.check_equal(got, want, what, fix, added=norm)

    return in_enough_digits(engine, losses, alone, check)


# --- padding ---------------------------------------------------------------------------------------------------------


def check_padding(probe: Probe, batch: Batch, num: int, columns: Columns, unclipped: Gradient) -> float:
    """Check that more columns of padding change nothing; without dropout, whose masks depend on the width.

    `unclipped` is the engine's sum under usual draws, which is the same if there are none.
    """
    targets = TARGETS if probe.losses.kind == "ForConditionalGeneration" else ()
    wider = add_padding(batch, columns, EXTRA_PADDING, targets=targets)
    longest = getattr(getattr(base_model(probe.engine.model), "config", None), "max_position_embeddings", None)
    if longest is not None and wider["input_ids"].size(-1) + 2 > longest:
        return 0.0
    what = "gradients change with the padding, so a record's gradient depends on how long the others are"
    want = unclipped if probe.draws is None else probe.engine_sum(batch, UNCLIPPED, range(num), per_record=MIDDLE)
    got = probe.engine_sum(wider, UNCLIPPED, range(num), per_record=MIDDLE)
    return probe.check_equal(got, want, what, PADDING)


def check_width(
    engine: ClippingEngine, losses: RecordLosses, columns: Columns, num_tokens: int, tolerance: float
) -> float:
    """Compare one short record alone with itself padded to the longest record of the dataset.

    Finds models that depend on the batch's width from some length on (positions that are rescaled, other kernels).
    """
    short = max(1, min(32, num_tokens // 2))
    pair = columns.batch(engine.model, (Look(), Look()), short)
    alone = rows(pair, 0)
    wider = add_padding(alone, columns, num_tokens - short)
    with probing(engine, losses, pair, [0, 1], tolerance) as probe:
        want = probe.gradient(alone, 0, per_record=MIDDLE)
        got = probe.gradient(wider, 0, per_record=MIDDLE)
        what = (
            f"the gradient of a record of {short} tokens changes beside one of {num_tokens}, the longest of the "
            "dataset, so it depends on how long the others are"
        )
        return probe.check_equal(got, want, what, PADDING)


# --- others in the batch ---------------------------------------------------------------------------------------------


def check_others(
    engine: ClippingEngine, losses: RecordLosses, columns: Columns, *, num_tokens: int | None = None, is_wide: bool
) -> float:
    """Compare the gradient of the same records beside others: ordinary, extreme and short ones.

    The batches have the same shapes, so they run through the same kernels with the same masks, as in training, and
    what differs is more than rounding. Records that are routed to experts are the exception: how many rows an expert
    has depends on the others, and with it the rounding.

    Args:
        engine: the engine that training uses.
        losses: the losses that training uses.
        columns: columns of the made-up records.
        num_tokens: width of the batch, in which one record is then watched beside one; None takes the width of the
            usual made-up batch.
        is_wide: whether the model computes in float32 or wider.

    Returns:
        The largest relative difference: how far a record moves another one's clipped gradient in clipping norms, if
        that one is just clipped.

    Raises:
        UnsupportedModuleError: if others move a gradient by more than rounding does.
    """
    several: list[tuple[Look, ...]] = [(one, WATCHED[0], other, WATCHED[1]) for one, other in BESIDE]
    if num_tokens is not None:
        several = [(one, WATCHED[1]) for one in BESIDE_ONE]
    watched = list(range(1, len(several[0]), 2))
    batches = [columns.batch(engine.model, looks, num_tokens) for looks in several]
    gradients = [_gradient_of(engine, losses, batch, watched) for batch in batches]
    size = length(gradients[0])
    if size == 0:
        return 0.0
    worst = max((distance(g, gradients[0]) / size for g in gradients[1:]), key=lambda x: x if x == x else float("inf"))
    allowed = tolerance_of_others(engine, is_wide)
    if worst <= allowed:
        return worst
    floor = distance(_gradient_of(engine, losses, batches[0], watched), gradients[0]) / size
    allowed = min(max(allowed, FLOORS * floor), NARROW_TOLERANCE)
    if not worst <= allowed:
        raise UnsupportedModuleError(
            "Self-check failed before training: the gradient of a record changes with what stands beside it in the "
            f"batch; another record moves it by {worst:.2g} clipping norms (allowed {allowed:.2g}, rounding). {MIXING}"
        )
    return worst


def _gradient_of(engine: ClippingEngine, losses: RecordLosses, batch: Batch, watched: list[int]) -> Gradient:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    return plain_gradient(losses(batch)[watched].sum(), engine.parameters)


def check_memory(compute: Callable[[Batch], torch.Tensor], batches: Sequence[Batch]) -> None:
    """Compare the output for a batch with that for the same batch after others.

    Raises:
        UnsupportedModuleError: if it is another one: the model or the loss function remembers what it saw.
    """
    first, _, again = compute(batches[0]), [compute(batch) for batch in batches[1:]], compute(batches[0])
    tolerance = 0.0 if next(iter(batches[0].values())).device.type == "cpu" else NARROW_SAME_SHAPES * ACCELERATOR
    if not (again - first).abs().max() <= tolerance * first.abs().max():
        raise UnsupportedModuleError(
            "The output for a made-up record changes after other records: the model or the loss function remembers "
            "them, so one record would change what is computed of the next. Take that memory out of it."
        )


def check_outputs(compute: Callable[[Batch], torch.Tensor], batches: Sequence[Batch]) -> None:
    """Compare the output for the first record of each batch, which is the same in all, with that for it alone.

    Args:
        compute: batch -> one output for each record, (B, ...).
        batches: made-up batches, all of one shape.

    Raises:
        UnsupportedModuleError: if the others change it by more than rounding does, or are remembered.
    """
    alone = rows(batches[0], 0)
    check_memory(compute, [alone, *batches])
    want, found = compute(alone)[0], [compute(batch)[0] for batch in batches]
    moved = torch.stack([(one - want).abs().max() for one in found]).max() / want.abs().max().clamp(min=1e-12)
    if not moved <= TOLERANCE[torch.float32]:
        raise UnsupportedModuleError(
            f"The output for a made-up record changes by {moved:.2g} of its size with the other records of a batch: "
            "the model mixes records in evaluation mode. Replace the layer that does."
        )
