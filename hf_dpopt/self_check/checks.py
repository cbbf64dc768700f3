"""The checks of a model and its engine on made-up records, in order."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sized
from typing import Any

import torch
from torch import nn

from hf_dpopt.clipping.engine import ClippingEngine
from hf_dpopt.common.collectives import current_ranks
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.sharding import give_back
from hf_dpopt.records.limits import Limits
from hf_dpopt.records.losses import RecordLosses, base_model
from hf_dpopt.self_check import conditions
from hf_dpopt.self_check.comparisons import (
    check_others,
    check_padding,
    check_sums,
    check_units,
    check_width,
)
from hf_dpopt.self_check.made_up import LOOKS, MAX_TOKENS, Columns, rows
from hf_dpopt.self_check.precision import (
    NARROW_TOLERANCE,
    TOLERANCE,
    in_enough_digits,
    training_conditions,
)
from hf_dpopt.self_check.probe import ProbeOfShards, probing
from hf_dpopt.self_check.shared import check_shared_draws

LOSS_TOLERANCE = 1e-5  # the logits are the same; transformers rounds what follows to float32


@dataclasses.dataclass(frozen=True)
class SelfCheck:
    """Result of a passed check.

    Args:
        relative_error: largest relative error found between engine and loop.
        influence: largest relative change of a record's gradient by others in a batch of the same shape.
        seconds: duration of the check, in seconds.
        num_tokens: number of tokens of the longest made-up record.
        notes: parts that could not be checked as thoroughly as usual, in words for the user.
    """

    relative_error: float
    influence: float
    seconds: float
    num_tokens: int
    notes: tuple[str, ...] = ()


def _check_is_the_models_own_loss(losses: RecordLosses, row: Mapping[str, Any], tolerance: float) -> None:
    """Refuse heads whose loss differs from what their name says: labels that are not shifted, further terms."""
    if losses.kind == "custom":
        return
    config = base_model(losses.model).config
    problem_type = getattr(config, "problem_type", None)  # the model writes what it infers into its config
    with torch.no_grad(), conditions.in_mode(losses.model, training=False):  # two forwards: without dropout
        own = losses.model(**row, return_dict=True).loss
        ours = RecordLosses(losses.model)(row)[0]  # label smoothing is the Trainer's, not the model's
    config.problem_type = problem_type
    allowed = max(LOSS_TOLERANCE, tolerance if tolerance == NARROW_TOLERANCE else 0.0)
    if own is not None and own.isfinite() and (own - ours).abs() > allowed * own.abs().clamp(min=1):
        raise DPConfigError(
            f"{type(base_model(losses.model)).__name__} computes another loss than {losses.kind} models do: {own:.4g} "
            f"on a made-up record, not {ours:.4g}. Pass per_example_loss_func=f with f(outputs, labels) -> tensor of "
            "shape (batch,), one loss per record."
        )


def _check_padding_token(losses: RecordLosses, columns: Columns) -> None:
    """Refuse padding that the model cannot look up: every record that is padded would be left out of its step."""
    allowed, padding_id = Limits.of(losses.model, losses.kind).ranges.get("input_ids"), columns.padding_id
    if padding_id is not None and columns.is_padded and allowed is not None and not allowed.holds(padding_id):
        raise DPConfigError(f"The padding token is none of the model's: {allowed.says('input_ids', padding_id)}")


def _forward_in_training_mode(losses: RecordLosses, batch: Mapping[str, Any]) -> None:
    model = losses.model
    with (
        conditions.keep_generators(conditions.device_of(model)),
        torch.no_grad(),
        conditions.in_mode(model, training=True),
        conditions.unchanged_buffers(model),
    ):
        losses(batch)


def self_check(
    engine: ClippingEngine,
    losses: RecordLosses,
    like: Mapping[str, Any],
    *,
    padding_id: int | None,
    padding_side: str | None = None,
    longest: int | None = None,
    is_scaled: bool = False,
    has_units: bool = False,
) -> SelfCheck:
    """Compare the engine with a loop over single records on made-up inputs, in training mode.

    First in float32 or wider, whatever the run's precision, with random draws that belong to records: the clipped sum
    must equal that of one plain backward per record. Then in the run's own precision, with its kernels: a record's
    gradient must not change with the content of the others.

    Formal guarantee: on return, for these inputs, the clipped sum equals that of one plain backward per record, does
    not change with padding, with what stands beside a record, or with random numbers that records share; so no
    record's gradient depended on another record or on its length.

    A model in shards, whose ranks call this together, is compared without dropout and without the rest.

    Args:
        engine: the engine that training uses.
        losses: the losses that training uses.
        like: one collated batch, for keys, dtypes and dimensions.
        padding_id: the tokenizer's padding token; None takes the model's where the batch has an attention_mask.
        padding_side: the tokenizer's, "left" or "right"; None takes the side that the mask of `like` shows.
        longest: tokens of the longest training record; None takes the width of `like`.
        is_scaled: also check a scale of records before the clip, as preconditioners apply.
        has_units: also check units of privacy with several records.

    Raises:
        UnsupportedModuleError: names the tensor that differs, the buffer that changed, the module that draws for the
            whole batch, or how records are mixed.
        DPConfigError: for a packed batch, or a model whose loss is not the one of its kind.
    """
    start = time.perf_counter()
    model, notes, num = engine.model, list[str](), len(LOOKS)
    columns = Columns.of(like, model, padding_id, padding_side)
    if engine.is_collective:
        return _check_shards(engine, losses, columns)
    _check_padding_token(losses, columns)
    batch = columns.batch(model)
    _forward_in_training_mode(losses, batch)
    num_tokens = max(longest or 0, like["input_ids"].size(-1)) if columns.is_padded else 0
    is_longer, is_narrow = num_tokens > MAX_TOKENS, conditions.is_narrow(model)
    is_wide = not is_narrow or conditions.fits(model)
    if not is_wide:
        notes.append(_too_large(model))

    def check_made_up(tolerance: float) -> float:
        with probing(engine, losses, batch, range(num), tolerance) as probe:
            check_shared_draws(probe, batch, num)
            unclipped, error = check_sums(probe, batch, num, is_scaled=is_scaled)
            if columns.is_padded:
                error = max(error, check_padding(probe, batch, num, columns, unclipped))
            if has_units:
                error = max(error, check_units(probe, batch, num))
        _check_is_the_models_own_loss(losses, rows(batch, 0), tolerance)
        return error

    def check_beside_others(*, wide: bool, is_wide: bool, num_tokens: int | None = None) -> float:
        with training_conditions(engine, wide=wide):
            return check_others(engine, losses, columns, num_tokens=num_tokens, is_wide=is_wide)

    error, influence = in_enough_digits(engine, losses, [batch], check_made_up), 0.0
    if is_narrow or not is_longer:  # else at the longest length instead, in the precision of the run
        influence = check_beside_others(wide=True, is_wide=is_wide)
    if is_narrow and is_wide:  # once more in the precision of the run
        influence = max(influence, check_beside_others(wide=False, is_wide=False))
    if is_longer:
        try:
            at_length = in_enough_digits(
                engine, losses, [like], lambda tolerance: check_width(engine, losses, columns, num_tokens, tolerance)
            )
            moved = check_beside_others(wide=False, is_wide=not is_narrow, num_tokens=num_tokens)
            error, influence = max(error, at_length), max(influence, moved)
        except torch.OutOfMemoryError:
            notes.append(f"records of {num_tokens} tokens did not fit into memory, so shorter ones were checked only")
            influence = max(influence, check_beside_others(wide=False, is_wide=not is_narrow))
    return SelfCheck(error, influence, time.perf_counter() - start, max(num_tokens, MAX_TOKENS), tuple(notes))


def _too_large(model: nn.Module) -> str:
    return (
        f"there is no room for a float32 copy of the weights ({conditions.bytes_to_widen(model) / 2**30:.1f} GiB), so "
        f"the engine was compared in the precision of the run, with a tolerance of {NARROW_TOLERANCE:.0%}"
    )


def _check_shards(engine: ClippingEngine, losses: RecordLosses, columns: Columns) -> SelfCheck:
    """Compare the engine's sum over the ranks with a loop over single records, without dropout.

    Formal guarantee: on return, for these made-up inputs and without dropout, the clipped sum that the ranks hold in
    shards is that of one plain backward per record, so no record's gradient depended on another record.
    """
    start, model, device = time.perf_counter(), engine.model, conditions.device_of(engine.model)
    made_up = columns.batch(model)
    batch = _on(device, current_ranks().same(lambda: _on(torch.device("cpu"), made_up)))
    dtypes = {p.dtype for p in model.parameters()}
    tolerance = NARROW_TOLERANCE if dtypes & set(conditions.NARROW) else TOLERANCE.get(next(iter(dtypes)), 1e-4)
    with conditions.keep_generators(device), conditions.in_mode(model, training=False):
        _, error = check_sums(ProbeOfShards(engine, losses, tolerance), batch, len(LOOKS))
    give_back(model)
    note = "the model lies in shards, so it was checked without dropout, and not searched for draws that records share"
    return SelfCheck(error, 0.0, time.perf_counter() - start, MAX_TOKENS, (note,))


def _on(device: torch.device, batch: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


def longest_record(dataset: Any) -> int | None:
    """Tokens of the longest record in a stored column of input_ids or a list; None if records are made on request."""
    if isinstance(dataset, list):
        rows = (row.get("input_ids") for row in dataset if isinstance(row, Mapping))
        return max((len(row) for row in rows if isinstance(row, Sized)), default=None)
    names, form = getattr(dataset, "column_names", None), getattr(dataset, "format", None)
    if (
        not (isinstance(names, list) and "input_ids" in names and isinstance(form, dict))
        or form.get("type") == "custom"
    ):
        return None
    import pyarrow.compute as pc

    longest = 0
    for batch in dataset.with_format("arrow", columns=["input_ids"]).iter(10_000):
        try:
            longest = max(longest, pc.max(pc.list_value_length(batch.column("input_ids"))).as_py() or 0)
        except NotImplementedError:  # no lists (ArrowNotImplementedError is one)
            return None
    return longest or None
