"""The checks of a model and its engine on made-up records, in order."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from hf_dpopt.clipping.engine import ClippingEngine
from hf_dpopt.common.collectives import current_ranks
from hf_dpopt.common.errors import DPConfigError, UnsupportedModuleError
from hf_dpopt.common.sharding import give_back
from hf_dpopt.randomness.framework import keep_generators
from hf_dpopt.records.collation import length_of, row_of
from hf_dpopt.records.losses import RecordLosses, base_model, problem_type
from hf_dpopt.records.rows import is_stored
from hf_dpopt.records.settings import settings
from hf_dpopt.self_check.comparisons import (
    EXTRA_PADDING,
    Batch,
    Probe,
    check_others,
    check_padding,
    check_sums,
    in_enough_digits,
    probing,
)
from hf_dpopt.self_check.conditions import (
    NARROW,
    NARROW_TOLERANCE,
    TOLERANCE,
    device_of,
    fits,
    in_mode,
    tolerance_of_others,
    training_conditions,
    unchanged_buffers,
)
from hf_dpopt.self_check.draws import HIGH, LOW
from hf_dpopt.self_check.made_up import Columns

OPTIONS = re.compile(r"layer_?drop|drop_?path|jitter|stochastic|spec_augment|mask_(time|feature)_prob|^survival")
FORCED: tuple[float | int, ...] = (LOW, HIGH, *range(1, 9))  # quantiles, so that rare events happen, and other seeds
MAX_NAMED = 5
PREDICTS_NUMBERS = ("regression", "multi_label_classification")  # of which integers are a way to write them
LOSS_TOLERANCE = 1e-5  # the logits are the same; transformers rounds what follows to float32
IN_SHARDS = (
    "the model lies in shards, so it was checked without dropout, and not searched for draws that records share"
)


def _check_is_the_models_own_loss(losses: RecordLosses, row: Batch, tolerance: float) -> None:
    """Refuse heads whose loss differs from what their name says: labels that are not shifted, further terms."""
    if losses.kind == "custom":
        return
    config = base_model(losses.model).config
    labels: Any = row.get("labels")
    before = getattr(config, "problem_type", None)  # the model writes what it infers into its config
    if losses.kind == "ForSequenceClassification" and problem_type(losses.model, labels) in PREDICTS_NUMBERS:
        row = {**row, "labels": labels.to(next(losses.model.parameters()).dtype)}
    with torch.no_grad(), in_mode(losses.model, training=False):  # two forwards: without dropout
        own = losses.model(**row, return_dict=True).loss
        ours = RecordLosses(losses.model)(row)[0]  # label smoothing is the Trainer's, not the model's
    config.problem_type = before
    allowed = NARROW_TOLERANCE if tolerance == NARROW_TOLERANCE else LOSS_TOLERANCE
    if own is not None and own.isfinite() and (own - ours).abs() > allowed * own.abs().clamp(min=1):
        raise DPConfigError(
            f"{type(base_model(losses.model)).__name__} computes another loss than {losses.kind} models do: {own:.4g} "
            f"on a made-up record, not {ours:.4g}. Pass per_example_loss_func=f with f(outputs, labels) -> tensor of "
            "shape (batch,), one loss per record."
        )


def self_check(
    engine: ClippingEngine,
    losses: RecordLosses,
    like: Mapping[str, Any],
    *,
    longest: int | None = None,
    is_scaled: bool = False,
    has_units: bool = False,
) -> tuple[str, ...]:
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
        like: one collated batch, for keys, dtypes, dimensions and, where one of its records is padded, the padding.
        longest: tokens of the longest training record; None takes the width of `like`.
        is_scaled: also check a scale of records before the clip, as preconditioners apply.
        has_units: also check units of privacy with several records.

    Returns:
        Parts that could not be checked as thoroughly as usual, in words for the user.

    Raises:
        UnsupportedModuleError: names the tensor that differs, the buffer that changed, the module that draws for the
            whole batch, or how records are mixed.
        DPConfigError: for a packed batch, or a model whose loss is not the one of its kind.
    """
    model, notes = engine.model, list[str]()
    columns = Columns.of(like, model)
    batch = columns.batch(model)
    if engine.is_collective:
        _check_shards(engine, losses, batch)
        return (IN_SHARDS,)
    if not fits(model):
        notes.append(
            "there is no room for a float32 copy of the weights, so the engine was compared in the precision of the "
            f"run, with a tolerance of {NARROW_TOLERANCE:.0%}"
        )

    def check_made_up(tolerance: float) -> None:
        with probing(engine, losses, batch, tolerance) as probe:
            _check_shared_draws(probe, batch)
            check_sums(probe, batch, is_scaled=is_scaled, has_units=has_units)
        _check_is_the_models_own_loss(losses, alone, tolerance)

    def check_longer(tolerance: float) -> None:
        with probing(engine, losses, alone, tolerance) as probe:
            check_padding(probe, alone, columns, num_more)

    alone, num_more = row_of(batch, 0), 0
    if columns.is_padded:
        num_more = max(longest or 0, like["input_ids"].size(-1)) - batch["input_ids"].size(-1)
        num_more = max(num_more, EXTRA_PADDING if _has_positions_for_padding(losses, batch) else 0)
    with unchanged_buffers(model):
        in_enough_digits(engine, losses, [batch], check_made_up)
        try:
            if num_more:
                in_enough_digits(engine, losses, [alone], check_longer)
        except torch.OutOfMemoryError:
            notes.append(
                "a record padded to the length of the longest one did not fit into memory: padding was not checked"
            )
        with training_conditions(engine):
            check_others(engine, losses, columns)
    return tuple(notes)


def _has_positions_for_padding(losses: RecordLosses, batch: Batch) -> bool:
    most = getattr(getattr(base_model(losses.model), "config", None), "max_position_embeddings", None)
    return most is None or batch["input_ids"].size(-1) + EXTRA_PADDING + 2 <= most


def _check_shared_draws(probe: Probe, batch: Batch) -> None:
    """Refuse a model whose gradients depend on a draw that all records of a batch share.

    Records that share a draw are not independent given the batches: removing one regroups who shares what with whom,
    and the sum moves by more than a record's clipped gradient.

    Raises:
        UnsupportedModuleError: naming the modules that draw, and the option to set to 0.
    """
    if not probe.uses_others and (probe.draws is None or not probe.draws.has_shared):
        return
    first = probe.gradient(batch)
    allowed = tolerance_of_others(probe.engine) * max(probe.length(first), 1e-12)
    others = (probe.gradient(batch, shared=how) for how in FORCED)
    if all(probe.distance(other, first) <= allowed for other in others):  # differs, too, if either is no number
        return
    found = {} if probe.draws is None else dict(probe.draws.shared)
    found |= {"": "random or numpy.random"} if probe.uses_others else {}
    places = [f"{module or 'the model'} ({operation})" for module, operation in found.items()]
    named = ", ".join(places[:MAX_NAMED]) + (f" and {len(places) - MAX_NAMED} more" if len(places) > MAX_NAMED else "")
    raise UnsupportedModuleError(
        f"Self-check failed before training: {named} draws random numbers once for the whole batch, so records share "
        f"draws, and who shares them changes with one record more. {_way_out(probe.engine.model, found)}"
    )


def _way_out(model: nn.Module, names: Iterable[str]) -> str:
    """Say which options look responsible for the draws of these modules, and where they are."""
    options = [
        f"config.{path}{name} = {False if isinstance(value, bool) else 0.0}"
        for path, name, value in settings(model)
        if OPTIONS.search(name) and isinstance(value, int | float) and value
    ]
    dropouts = [name for name in names if isinstance(getattr(model.get_submodule(name), "p", None), float)]
    fixes = []
    if options and set(names) - set(dropouts):
        named = ", ".join(dict.fromkeys(options))
        fixes.append(f"Set {named} before the model is made (from_pretrained takes them as arguments, too).")
    if dropouts:
        named = ", ".join(map(repr, dropouts[:MAX_NAMED]))
        fixes.append(f"Set p = 0 there: for name in [{named}]: model.get_submodule(name).p = 0.0.")
    return (
        " ".join(fixes) or "Turn that off, or draw one number for each record (a tensor whose first dimension is B)."
    )


def _check_shards(engine: ClippingEngine, losses: RecordLosses, made_up: Batch) -> None:
    """Compare the engine's sum over the ranks with a loop over single records, without dropout.

    Formal guarantee: on return, for these made-up inputs and without dropout, the clipped sum that the ranks hold in
    shards is that of one plain backward per record, so no record's gradient depended on another record.
    """
    model, device = engine.model, device_of(engine.model)
    batch = _on(device, current_ranks().same(lambda: _on(torch.device("cpu"), made_up)))
    dtypes = {p.dtype for p in model.parameters()}
    tolerance = NARROW_TOLERANCE if dtypes & set(NARROW) else TOLERANCE.get(next(iter(dtypes)), 1e-4)
    with keep_generators(device), in_mode(model, training=False):
        check_sums(Probe(engine, losses, tolerance), batch)
    give_back(model)


def _on(device: torch.device, batch: Batch) -> dict[str, Any]:
    return {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


def longest_record(dataset: Any) -> int | None:
    """Tokens of the longest record in a stored column of input_ids or a list; None if records are made on request."""
    if isinstance(dataset, list):
        rows = (row for row in dataset if isinstance(row, Mapping) and "input_ids" in row)
        return max(map(length_of, rows), default=None)
    if not is_stored(dataset) or "input_ids" not in dataset.column_names:
        return None
    import pyarrow as pa
    import pyarrow.compute as pc

    def longest(column: Any) -> int:
        if pa.types.is_nested(getattr(column.type, "value_type", pa.null())):  # choices, of whatever kind of list
            column = pc.list_flatten(column)
        return pc.max(pc.list_value_length(column)).as_py() or 0

    batches = dataset.with_format("arrow", columns=["input_ids"]).iter(10_000)
    try:
        return max((longest(batch.column(0)) for batch in batches), default=0) or None
    except NotImplementedError:  # no lists (ArrowNotImplementedError is one)
        return None
