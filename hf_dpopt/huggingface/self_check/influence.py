"""Influence of other records on the gradient of one record, in clipping norms.

Shape legend: B = records, T = tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from hf_dpopt.clipping.capture import in_mixture
from hf_dpopt.clipping.engine import ClippingEngine
from hf_dpopt.common.errors import UnsupportedModuleError
from hf_dpopt.huggingface.kept_state import kept_buffers
from hf_dpopt.huggingface.self_check import conditions
from hf_dpopt.huggingface.self_check.draws import MIDDLE
from hf_dpopt.huggingface.self_check.equality import MIXING, PADDING
from hf_dpopt.huggingface.self_check.made_up import Look, add_padding, rows, synthetic_batch
from hf_dpopt.huggingface.self_check.probe import (
    NARROW_TOLERANCE,
    TOLERANCE,
    Gradient,
    Probe,
    check_equal,
    clipped_by,
    distance,
    length,
    plain_gradient,
    probing,
)
from hf_dpopt.records.losses import RecordLosses, num_records

SAME_SHAPES = {torch.float64: 1e-12, torch.float32: 1e-6}  # the same kernels: on a CPU, not one bit differs
NARROW_SAME_SHAPES = 1e-5
ACCELERATOR = 100.0  # times as much where sums may be added up in any order
FLOORS = (
    4.0  # times what two equal runs differ by on devices that add up in any order, or the last digits of layers change
)
MOST_BY_ROUNDING = 1e-2  # clipping norms; a record that others reach moves by more

Result = TypeVar("Result")

# Neighbours of the two records that are watched. A capacity goes to the first record, so an equal one comes first; a
# scale follows the largest record, so that is never a watched one.
BESIDE = (
    (Look(1.0), Look(0.7)),
    (Look(1.0, "constant"), Look(1.0, "large")),
    (Look(0.01), Look(0.01, "large")),
)
BESIDE_ONE = (Look(1.0), Look(1.0, "constant"), Look(1.0, "large"))
WATCHED = (Look(0.15), Look(0.8, "constant"))


@dataclasses.dataclass(frozen=True)
class Columns:
    """Columns of made-up records.

    Args:
        like: one collated batch, for keys, dtypes and dimensions.
        padding_id: token of padding; None if nothing is padded.
        padding_side: "left" or "right".
    """

    like: Mapping[str, Any]
    padding_id: int | None
    padding_side: str


def _at_fixed_seeds(losses: RecordLosses, batch: Mapping[str, Any]) -> torch.Tensor:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    return losses(batch)


def _gradient_of(
    engine: ClippingEngine, losses: RecordLosses, batch: Mapping[str, Any], watched: list[int]
) -> Gradient:
    losses_B = _at_fixed_seeds(losses, batch)
    return plain_gradient(losses_B[watched].sum(), engine.parameters)


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
    if num_tokens is None:
        several = [(one, WATCHED[0], other, WATCHED[1]) for one, other in BESIDE]
        watched = [1, 3]
    else:
        several, watched = [(one, WATCHED[1]) for one in BESIDE_ONE], [1]  # type: ignore[misc]
    batches = [
        synthetic_batch(
            columns.like, engine.model, columns.padding_id, padding_side=columns.padding_side, looks=looks,
            num_tokens=num_tokens,
        )
        for looks in several
    ]  # fmt: skip
    gradients = [_gradient_of(engine, losses, batch, watched) for batch in batches]
    size = length(gradients[0])
    if size == 0:
        return 0.0
    worst = max((distance(g, gradients[0]) / size for g in gradients[1:]), key=lambda x: x if x == x else float("inf"))
    allowed = _tolerance(engine, is_wide)
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


def check_memory(compute: Callable[[Mapping[str, Any]], torch.Tensor], batches: Sequence[Mapping[str, Any]]) -> None:
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


def check_outputs(compute: Callable[[Mapping[str, Any]], torch.Tensor], batches: Sequence[Mapping[str, Any]]) -> None:
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


def _tolerance(engine: ClippingEngine, is_wide: bool) -> float:
    model, p = engine.model, next(iter(engine.parameters.values()))
    if in_mixture(model, [name for name, _ in model.named_parameters()]):
        return TOLERANCE.get(p.dtype, 1e-4) if is_wide else NARROW_TOLERANCE
    allowed = SAME_SHAPES.get(p.dtype, NARROW_SAME_SHAPES) if is_wide else NARROW_SAME_SHAPES
    return allowed * (1.0 if p.device.type == "cpu" else ACCELERATOR)


def check_width(
    engine: ClippingEngine, losses: RecordLosses, columns: Columns, num_tokens: int, tolerance: float
) -> float:
    """Compare one short record alone with itself padded to the longest record of the dataset.

    Finds models that depend on the batch's width from some length on (positions that are rescaled, other kernels).
    """
    assert columns.padding_id is not None
    short = max(1, min(32, num_tokens // 2))
    pair = synthetic_batch(
        columns.like, engine.model, columns.padding_id, padding_side=columns.padding_side,
        looks=(Look(), Look()), num_tokens=short,
    )  # fmt: skip
    alone = rows(pair, 0)
    wider = add_padding(alone, columns.padding_id, columns.padding_side, num_tokens - short)
    with probing(engine, losses, pair, [0, 1], tolerance) as probe:
        want = probe.gradient(alone, 0, per_record=MIDDLE)
        got = probe.gradient(wider, 0, per_record=MIDDLE)
    what = (
        f"the gradient of a record of {short} tokens changes beside one of {num_tokens}, the longest of the dataset, "
        "so it depends on how long the others are"
    )
    return check_equal(got, want, tolerance, what, PADDING)


@contextlib.contextmanager
def training_conditions(engine: ClippingEngine, *, wide: bool, dtype: torch.dtype = torch.float32) -> Iterator[float]:
    """Put the model in training mode, in `dtype` if asked for and if that fits; yields the tolerance of equal sums.

    Parameters, buffers, modes and generators are restored after the context.
    """
    model = engine.model
    is_widened = wide and conditions.fits(model, dtype)
    with contextlib.ExitStack() as stack:
        stack.enter_context(conditions.keep_generators(conditions.device_of(model)))
        stack.enter_context(kept_buffers(model))
        stack.enter_context(conditions.in_mode(model, training=True))
        if is_widened:
            stack.enter_context(conditions.compute_wide(model, dtype))
        stack.enter_context(conditions.fill_zero_parameters(engine.parameters))
        dtype = next(iter(engine.parameters.values())).dtype
        try:
            yield NARROW_TOLERANCE if not is_widened and conditions.is_narrow(model) else TOLERANCE.get(dtype, 1e-4)
        finally:
            for p in engine.parameters.values():
                p.grad = None


def in_enough_digits(
    engine: ClippingEngine,
    losses: RecordLosses,
    batches: Sequence[Mapping[str, Any]],
    check: Callable[[float], Result],
) -> Result:
    """Run a check in float32 or wider; where it fails in float32, once more in float64, with the same tolerance.

    Deep models with large activations round by more than the tolerance in float32; records that mix do so in float64,
    too. Where float64 does not fit, the tolerance grows with what the last digits of the model's layers change in the
    gradients of single batches, to `MOST_BY_ROUNDING` at most.

    Args:
        engine: the engine that training uses.
        losses: the losses that training uses.
        batches: the batches to change the last digits in.
        check: takes the tolerance of equal sums; raises `UnsupportedModuleError` if a sum differs by more.

    Raises:
        UnsupportedModuleError: from the last check.
    """
    with training_conditions(engine, wide=True) as tolerance:
        try:
            return check(tolerance)
        except UnsupportedModuleError:
            if tolerance != TOLERANCE[torch.float32]:
                raise
    if conditions.fits(engine.model, torch.float64):
        try:
            with training_conditions(engine, wide=True, dtype=torch.float64):
                return check(tolerance)
        except (RuntimeError, TypeError, NotImplementedError):  # float32 inside the model, devices without float64
            pass
    with training_conditions(engine, wide=True):
        rounding = FLOORS * _last_digits(engine, losses, batches)
        return check(min(max(tolerance, rounding), MOST_BY_ROUNDING))


def check_influence(
    engine: ClippingEngine,
    losses: RecordLosses,
    together: Mapping[str, Any],
    alone: Sequence[Mapping[str, Any]],
    *,
    what: str = "the clipped sum of records of the dataset",
) -> float:
    """Compare a collated batch with the same records collated one by one, or in other parts.

    For records of the dataset, through the real collator: ``{a, b}`` against ``{a}`` and ``{b}``, each padded to its
    own length. Runs in training mode and in float32 (if that fits), with dropout that keeps everything, for masks of
    different widths cannot be compared. Half of the parts are clipped, so an error is seen at any size of gradients.

    Formal guarantee: on return, the clipped sum of the batch is that of its parts, up to the tolerance, for these
    records at these weights; so none of them moved it by more than its own clipped gradient.

    Args:
        engine: the engine that training uses.
        losses: the losses that training uses.
        together: collated batch, on the device.
        alone: collated batches that hold the same records, in the same order; on the device.
        what: name of the records, for the message.

    Returns:
        The distance of the two sums in clipping norms.

    Raises:
        UnsupportedModuleError: if it is larger than rounding explains.
        DPConfigError: for a packed batch.
    """

    def check(tolerance: float) -> float:
        ratio = _distance_from_parts(engine, losses, together, alone)
        if not ratio <= tolerance:
            raise UnsupportedModuleError(
                f"Self-check failed before training: {what} is not the sum of what each gives alone; they differ by "
                f"{ratio:.2g} clipping norms (allowed {tolerance:.2g}). The collator or the model mixes records, or a "
                f"record's gradient depends on how long the others are. {PADDING}"
            )
        return ratio

    return in_enough_digits(engine, losses, alone, check)


def _distance_from_parts(
    engine: ClippingEngine, losses: RecordLosses, together: Mapping[str, Any], alone: Sequence[Mapping[str, Any]]
) -> float:
    """Distance of the clipped sum of a batch from that of its parts, in clipping norms; 0 if most give nothing."""
    sizes = [num_records(batch) for batch in alone]
    num = num_records(together)
    assert sum(sizes) == num, (sizes, num)
    tolerance = TOLERANCE[torch.float32]
    with probing(engine, losses, together, range(num), tolerance) as probe:
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        parts = [
            plain_gradient(
                probe.losses_of(batch, range(start, start + size), per_record=MIDDLE).sum(), engine.parameters
            )
            for batch, start, size in zip(alone, starts, sizes, strict=True)
        ]
        norm = sorted(length(part) for part in parts)[len(parts) // 2]
        if not norm > 0:
            return 0.0
        clipping = dataclasses.replace(engine.clipping, clipping_norm=norm)  # type: ignore[type-var]
        got = probe.engine_sum(together, clipping, range(num), per_record=MIDDLE)
        sums = engine.empty_sum()
        with clipped_by(engine, clipping):
            for batch, start, size in zip(alone, starts, sizes, strict=True):
                run = functools.partial(probe.losses_of, batch, range(start, start + size), per_record=MIDDLE)
                engine.add_clipped_sum(sums, run, size)
        return distance(got, sums.result()) / norm


def _last_digits(engine: ClippingEngine, losses: RecordLosses, batches: Sequence[Mapping[str, Any]]) -> float:
    """Change of the gradients of these batches by one unit in the last place of every layer, in clipping norms."""

    def next_number(module: Any, inputs: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return output
        found = output.detach()
        return output + (torch.nextafter(found, torch.full_like(found, torch.inf)) - found)

    def gradients(probe: Probe) -> list[Gradient]:
        each = (probe.losses_of(batch, range(num_records(batch)), per_record=MIDDLE) for batch in batches)
        return [plain_gradient(losses_B.sum(), engine.parameters) for losses_B in each]

    leaves = [module for module in engine.model.modules() if not list(module.children())]
    with probing(engine, losses, batches[0], range(num_records(batches[0])), TOLERANCE[torch.float32]) as probe:
        before, hooks = gradients(probe), [module.register_forward_hook(next_number) for module in leaves]
        try:
            after = gradients(probe)
        finally:
            for hook in hooks:
                hook.remove()
    norm = sorted(length(gradient) for gradient in before)[len(before) // 2]
    return sum(distance(x, y) for x, y in zip(before, after, strict=True)) / max(norm, 1e-12)
