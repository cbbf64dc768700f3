"""The checks of a model and its engine on made-up records, in order."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hf_dpopt.clipping.engine import ClippingEngine
from hf_dpopt.common.errors import DPConfigError, UnsupportedModuleError
from hf_dpopt.huggingface.kept_state import kept_buffers
from hf_dpopt.huggingface.self_check import conditions
from hf_dpopt.huggingface.self_check.equality import check_padding, check_sums, check_units
from hf_dpopt.huggingface.self_check.influence import (
    Columns,
    check_others,
    check_width,
    in_enough_digits,
    training_conditions,
)
from hf_dpopt.huggingface.self_check.made_up import LOOKS, MAX_TOKENS, padding_side_of, rows, synthetic_batch
from hf_dpopt.huggingface.self_check.probe import NARROW_TOLERANCE, probing
from hf_dpopt.huggingface.self_check.shared import check_shared_draws
from hf_dpopt.records.limits import Limits, padding_id_of
from hf_dpopt.records.losses import RecordLosses, base_model, num_records

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


@contextlib.contextmanager
def _unchanged_buffers(model: nn.Module) -> Iterator[None]:
    """Refuse changes of buffers inside the context; the buffers are restored in any case."""
    with kept_buffers(model) as start:
        yield
        changed = start.changed()
    if changed:
        raise UnsupportedModuleError(
            f"Self-check failed before training: a forward in training mode changes buffers ({', '.join(changed)}), "
            "which would be released without noise. Replace these layers or put them in evaluation mode for good."
        )


def _check_padding_token(losses: RecordLosses, like: Mapping[str, Any], padding_id: int | None) -> None:
    """Refuse padding that the model cannot look up: every record that is padded would be left out of its step."""
    allowed = Limits.of(losses.model, losses.kind).ranges.get("input_ids")
    if padding_id is not None and "input_ids" in like and allowed is not None and not allowed.holds(padding_id):
        raise DPConfigError(f"The padding token is none of the model's: {allowed.says('input_ids', padding_id)}")


def _forward_in_training_mode(losses: RecordLosses, batch: Mapping[str, Any]) -> None:
    model = losses.model
    with (
        conditions.keep_generators(conditions.device_of(model)),
        torch.no_grad(),
        conditions.in_mode(model, training=True),
        _unchanged_buffers(model),
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
    num_records(like)  # refuses packed batches
    model, notes = engine.model, list[str]()
    if padding_id is None and "attention_mask" in like:
        padding_id = padding_id_of(model)
    _check_padding_token(losses, like, padding_id)
    columns = Columns(like, padding_id, padding_side or padding_side_of(like))
    batch = synthetic_batch(like, model, padding_id, padding_side=columns.padding_side)
    is_padded = padding_id is not None and "input_ids" in batch
    _forward_in_training_mode(losses, batch)
    num_tokens = max(longest or 0, like["input_ids"].size(-1)) if is_padded else 0
    is_longer = num_tokens > MAX_TOKENS
    is_narrow, num = conditions.is_narrow(model), len(LOOKS)
    is_wide = not is_narrow or conditions.fits(model)
    if not is_wide:
        notes.append(_too_large(model))

    def check_made_up(tolerance: float) -> float:
        with probing(engine, losses, batch, range(num), tolerance) as probe:
            check_shared_draws(probe, batch, num)
            unclipped, error = check_sums(probe, batch, num, is_scaled=is_scaled)
            if is_padded:
                assert padding_id is not None
                side = columns.padding_side
                error = max(error, check_padding(probe, batch, num, padding_id, side, unclipped))
            if has_units:
                error = max(error, check_units(probe, batch, num))
        _check_is_the_models_own_loss(losses, rows(batch, 0), tolerance)
        return error

    error = in_enough_digits(engine, losses, [batch], check_made_up)
    # at the longest length instead, if there is one and that is the precision of the run
    is_later, influence = is_longer and not is_narrow, 0.0
    if not is_later:
        with training_conditions(engine, wide=True):
            influence = check_others(engine, losses, columns, is_wide=is_wide)
    if is_narrow and is_wide:  # once more in the precision of the run
        with training_conditions(engine, wide=False):
            influence = max(influence, check_others(engine, losses, columns, is_wide=False))
    if is_longer:
        try:
            found = _check_longest(engine, losses, columns, num_tokens)
            error, influence = max(error, found[0]), max(influence, found[1])
        except torch.OutOfMemoryError:
            notes.append(f"records of {num_tokens} tokens did not fit into memory, so shorter ones were checked only")
            with training_conditions(engine, wide=False):
                influence = max(influence, check_others(engine, losses, columns, is_wide=not is_narrow))
    return SelfCheck(error, influence, time.perf_counter() - start, max(num_tokens, MAX_TOKENS), tuple(notes))


def _check_longest(
    engine: ClippingEngine, losses: RecordLosses, columns: Columns, num_tokens: int
) -> tuple[float, float]:
    """The relative error and the influence at the longest length."""
    model = engine.model
    error = in_enough_digits(
        engine, losses, [columns.like], lambda tolerance: check_width(engine, losses, columns, num_tokens, tolerance)
    )
    with training_conditions(engine, wide=False), _unchanged_buffers(model):
        is_wide = not conditions.is_narrow(model)
        return error, check_others(engine, losses, columns, num_tokens=num_tokens, is_wide=is_wide)


def _too_large(model: nn.Module) -> str:
    return (
        f"there is no room for a float32 copy of the weights ({conditions.bytes_to_widen(model) / 2**30:.1f} GiB), so "
        f"the engine was compared in the precision of the run, with a tolerance of {NARROW_TOLERANCE:.0%}"
    )
