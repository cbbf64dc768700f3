"""Before the first step: is the clipped sum of this model, in this environment, what a naive loop computes?

Runs on made-up records of the shape the collator produces. Catches layers the capture does not cover, losses and
models in which records influence each other, layouts that are not batch-first, padding that leaks, upstream changes.

Shape legend: B = records, T = tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hf_dpopt.clipping import Clipping, FlatClipping
from hf_dpopt.errors import DPConfigError, UnsupportedModuleError
from hf_dpopt.grads.engine import ClippingEngine
from hf_dpopt.grads.products import wide
from hf_dpopt.grads.rules import flattening
from hf_dpopt.grads.scaling import Diagonal, Factored, Scale
from hf_dpopt.grads.units import Units
from hf_dpopt.losses import IGNORED, RecordLosses, base_model, num_records

NUM_RECORDS = 3
LENGTHS = (1.0, 0.5, 0.9)  # of the records, as shares of the longest
MAX_TOKENS = 32
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2}
LOSS_TOLERANCE = 1e-5  # the logits are the same; transformers rounds what follows to float32
EXTRA_PADDING = 3
NUM_CODES = 64  # of the made-up tokens where no table says how many there are
UNCLIPPED = FlatClipping(clipping_norm=1e30)
MIXING = (
    "The model mixes records, or one of its layers is not captured right. Freeze that layer, train with LoRA on "
    "others, and report the model; --skip_self_check would make the privacy statement unfounded."
)
PADDING = (
    "Pass attention_mask (use DataCollatorWithPadding); a model that counts positions from the first column needs "
    "padding_side='right', and one that knows no mask needs records of one length (and no processing_class)."
)


@dataclasses.dataclass(frozen=True)
class SelfCheck:
    """A passed check: the largest relative error found and what it cost."""

    relative_error: float
    seconds: float


def _is_per_token(value: Any, like: Mapping[str, Any]) -> bool:
    """Whether the second dimension counts input tokens; what else there is (targets, features) has its own width."""
    ids = like.get("input_ids")
    if not isinstance(value, torch.Tensor) or not isinstance(ids, torch.Tensor) or value.is_floating_point():
        return False
    return value.dim() > 1 and value.size(1) == ids.size(1)


def _embeddings(model: Any, getter: str) -> Any:
    """A table of the model; None where there is none: sound (Wav2Vec2), or tokens that are hashed (Canine)."""
    try:
        return getattr(model, getter, lambda: None)()
    except NotImplementedError:
        return None


class _MadeUp:
    """Values for the columns of a batch. The generator is seeded: nothing is secret, and failures can be repeated."""

    def __init__(self, model: nn.Module, padding_id: int | None, padding_side: str, is_masked: bool):
        self.padding_id, self.padding_side, self.is_masked = padding_id, padding_side, is_masked
        self.generator = torch.Generator().manual_seed(0)
        base = base_model(model)
        self.num_labels = max(int(getattr(getattr(base, "config", None), "num_labels", 2)), 1)
        table = _embeddings(base, "get_input_embeddings")
        self.vocabulary = NUM_CODES if table is None else getattr(table, "num_embeddings", 2)
        self.predicts_tokens = _embeddings(base, "get_output_embeddings") is not None
        config: Any = getattr(base, "config", None)
        classifies = type(base).__name__.endswith("ForSequenceClassification")
        # BART and T5 classify at the end token, and want one in every record
        self.end_id = config.eos_token_id if classifies and getattr(config, "is_encoder_decoder", False) else None

    def below(self, high: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=self.generator)

    def padding(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Where the records are padded: each has a length of its own."""
        lengths_B = torch.tensor([max(1, int(share * shape[1])) for share in LENGTHS])
        padding_BT = torch.arange(shape[1]) >= lengths_B.unsqueeze(1)
        return padding_BT.flip(1) if self.padding_side == "left" else padding_BT

    def ids(self, shape: tuple[int, ...]) -> torch.Tensor:
        ids_BT = self.below(self.vocabulary, shape)
        special = {self.padding_id, self.end_id} - {None}
        ordinary = next(i for i in range(self.vocabulary) if i not in special)
        for i in special:
            ids_BT[ids_BT == i] = ordinary
        padding_BT = self.padding(shape) if self.padding_id is not None and self.is_masked else None
        if self.end_id is not None:
            is_padded_right = padding_BT is not None and self.padding_side == "right"
            last_B = (~padding_BT).sum(1) - 1 if is_padded_right else torch.full((shape[0],), shape[1] - 1)  # type: ignore[operator]
            ids_BT[torch.arange(shape[0]), last_B] = self.end_id
        return ids_BT if padding_BT is None else ids_BT.masked_fill(padding_BT, self.padding_id)  # type: ignore[arg-type]

    def labels(self, shape: tuple[int, ...], is_per_token: bool) -> torch.Tensor:
        if len(shape) == 1 or not (is_per_token or self.predicts_tokens):
            return self.below(self.num_labels, shape)
        labels_BT = self.below(self.vocabulary if self.predicts_tokens else self.num_labels, shape)
        if self.predicts_tokens and self.padding_id is not None:  # the padding token is no target
            labels_BT[labels_BT == self.padding_id] = (self.padding_id + 1) % self.vocabulary
        return labels_BT.masked_fill(self.padding(shape), IGNORED)


def synthetic_batch(
    like: Mapping[str, Any], model: nn.Module, padding_id: int | None, *, padding_side: str = "right"
) -> dict[str, Any]:
    """Made-up records with the keys, dtypes and dimensions of a collated batch, and lengths that differ.

    No value of `like` survives, except in tensors of a kind not known here, where its first row is repeated.
    """
    made_up = _MadeUp(model, padding_id, padding_side, "attention_mask" in like)
    device = next(model.parameters()).device
    if not flattening.chooses(model):
        return _made_up_records(like, made_up, device)
    by_choice = {k: v[:, 0] for k, v in like.items() if isinstance(v, torch.Tensor) and v.dim() > 2}
    made_up.num_labels = num_choices = next(like[k].size(1) for k in by_choice)
    rows = [_made_up_records(by_choice, made_up, device) for _ in range(num_choices)]
    choices = {k: torch.stack([row[k] for row in rows], dim=1) for k in by_choice}
    rest = {k: v for k, v in like.items() if k not in by_choice}
    return choices | _made_up_records(rest, made_up, device)


def _made_up_records(like: Mapping[str, Any], made_up: _MadeUp, device: torch.device) -> dict[str, Any]:
    """`synthetic_batch` of one row per record."""
    num_tokens = min([MAX_TOKENS, *(v.size(1) for v in like.values() if _is_per_token(v, like))])
    batch: dict[str, Any] = {}
    for key, value in like.items():
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            batch[key] = value
            continue
        is_per_token = _is_per_token(value, like)
        shape = (NUM_RECORDS, num_tokens, *value.shape[2:]) if is_per_token else (NUM_RECORDS, *value.shape[1:])
        if value.is_floating_point():
            made = torch.randn(shape, generator=made_up.generator)
        elif key in ("input_ids", "decoder_input_ids"):
            made = made_up.ids(shape)
        elif key.endswith("attention_mask"):
            made = ~made_up.padding(shape)
        elif key == "labels":
            made = made_up.labels(shape, is_per_token)
        elif key in ("start_positions", "end_positions"):
            made = made_up.below(num_tokens, shape)
        elif key == "token_type_ids":
            made = torch.zeros(shape)
        else:
            made = value[:1].expand(NUM_RECORDS, *value.shape[1:])
            made = made[:, :num_tokens] if is_per_token else made
        batch[key] = made.to(device=device, dtype=value.dtype, copy=True)
    return batch


def _padding_side(like: Mapping[str, Any]) -> str:
    """The side a collated batch is padded on, as far as its mask shows."""
    mask_BT = like.get("attention_mask")
    return "left" if isinstance(mask_BT, torch.Tensor) and bool((mask_BT[..., 0] == 0).any()) else "right"


def _padded(batch: Mapping[str, Any], padding_id: int, padding_side: str) -> dict[str, Any]:
    """The same records beside more columns of padding."""
    fill = {"input_ids": padding_id, "decoder_input_ids": padding_id, "labels": IGNORED}
    columns = (EXTRA_PADDING, 0) if padding_side == "left" else (0, EXTRA_PADDING)
    return {
        k: torch.nn.functional.pad(v, columns, value=fill.get(k, 0)) if _is_per_token(v, batch) else v
        for k, v in batch.items()
    }


def _rows(batch: Mapping[str, Any], b: int) -> dict[str, Any]:
    return {k: v[b : b + 1] if isinstance(v, torch.Tensor) and v.dim() > 0 else v for k, v in batch.items()}


def _naive_gradients(engine: ClippingEngine, losses: RecordLosses, row: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """One record alone, by plain autograd."""
    names, parameters = zip(*engine.parameters.items(), strict=True)
    loss = losses(row)[0]
    grads = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {
        name: wide(torch.zeros_like(p) if g is None else g)
        for name, p, g in zip(names, parameters, grads, strict=True)
    }


def _naive_clipped_sum(clipping: Clipping, rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Clipped record by record."""
    squares = [
        {group: _squared_norm({n: g for n, g in row.items() if clipping.group(n) == group}) for group in groups}
        for row, groups in ((row, {clipping.group(n) for n in row}) for row in rows)
    ]
    factors = clipping.factors({group: torch.stack([s[group] for s in squares]) for group in squares[0]})
    return {
        name: torch.stack([row[name] * factors[clipping.group(name)][b] for b, row in enumerate(rows)]).sum(0)
        for name in rows[0]
    }


def _squared_norm(grads: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.stack([g.square().sum() for g in grads.values()]).sum()


@contextlib.contextmanager
def _clipping(engine: ClippingEngine, clipping: Clipping) -> Iterator[None]:
    before, engine.clipping = engine.clipping, clipping
    try:
        yield
    finally:
        engine.clipping = before


def _engine_sum(
    engine: ClippingEngine,
    losses: RecordLosses,
    batch: Mapping[str, Any],
    clipping: Clipping,
    scale: Scale | None = None,
) -> dict[str, torch.Tensor]:
    sums = engine.empty_sum(scale)
    with _clipping(engine, clipping):
        engine.add_clipped_sum(sums, lambda: losses(batch), NUM_RECORDS)
    return sums.result()


@contextlib.contextmanager
def _evaluation_mode(model: nn.Module, parameters: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Dropout off; parameters that are all zero (a fresh LoRA B) filled, for a zero gradient would match anything."""
    zeros = [p for p in parameters.values() if p.numel() and not p.detach().any()]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in zeros:
            p.copy_(torch.randn(p.shape, generator=generator).mul_(0.02).to(p.dtype))
    try:
        with _mode(model, training=False):
            yield
    finally:
        with torch.no_grad():
            for p in zeros:
                p.zero_()


@contextlib.contextmanager
def _mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Every module in one mode, and each back in its own afterwards."""
    before = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, was_training in before.items():
            module.training = was_training


def _check_equal(
    got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tolerance: float, what: str, mend: str
) -> float:
    scale = torch.stack([w.double().square().sum() for w in want.values()]).sum().sqrt().clamp(min=1e-12)
    errors = {n: ((got[n].double() - want[n].double()).norm() / scale).item() for n in want}
    worst = max(errors, key=lambda n: errors[n] if errors[n] == errors[n] else float("inf"))
    if not errors[worst] <= tolerance:
        raise UnsupportedModuleError(
            f"Self-check failed before training: {what}. Worst tensor: {worst}, relative error {errors[worst]:.2g} "
            f"(allowed {tolerance:g}). {mend}"
        )
    return errors[worst]


def _made_up_scales(parameters: Mapping[str, torch.Tensor]) -> list[Scale]:
    """A full and a factored scale over two orders of magnitude."""
    generator = torch.Generator().manual_seed(2)

    def values(*shape: int) -> torch.Tensor:
        return 10.0 ** (2 * torch.rand(*shape, generator=generator) - 1).to(next(iter(parameters.values())).device)

    full: dict[str, Diagonal | Factored] = {n: Diagonal(values(*p.shape)) for n, p in parameters.items()}
    factored = {n: Factored(values(len(p)), values(p[0].numel())) for n, p in parameters.items() if p.dim() > 1}
    return [Scale(full), Scale({**full, **factored})]


def _check_scaled_sums(
    engine: ClippingEngine,
    losses: RecordLosses,
    batch: Mapping[str, Any],
    rows: list[dict[str, torch.Tensor]],
    tolerance: float,
) -> float:
    """The clip in the coordinates of a preconditioner, with one that half of the records meet."""
    what, error = "the clipped sum of preconditioned gradients differs from a loop over single records", 0.0
    for scale in _made_up_scales(engine.parameters):
        scaled = [{n: g * scale.weights(n, g).view_as(g) for n, g in row.items()} for row in rows]
        median = sorted(_squared_norm(row).sqrt().item() for row in scaled)[NUM_RECORDS // 2]
        if median > 0:
            clipping = dataclasses.replace(engine.clipping, clipping_norm=median)
            got = _engine_sum(engine, losses, batch, clipping, scale)
            error = max(error, _check_equal(got, _naive_clipped_sum(clipping, scaled), tolerance, what, MIXING))
    return error


def _check_units(engine: ClippingEngine, losses: RecordLosses, batch: Mapping[str, Any], tolerance: float) -> float:
    """Records that belong together: their sum is clipped once, side by side in a batch and added up in parts."""
    rows = [_naive_gradients(engine, losses, _rows(batch, b)) for b in range(NUM_RECORDS)]
    sizes = (NUM_RECORDS - 1, 1)
    together = [_added(rows[: sizes[0]]), rows[-1]]
    norm = max(_squared_norm(unit).sqrt().item() for unit in together)
    if not norm > 0:
        return 0.0
    clipping = dataclasses.replace(engine.clipping, clipping_norm=norm / 2)
    want = _naive_clipped_sum(clipping, together)
    what = "the clipped sum of users differs from a loop over users"
    with _clipping(engine, clipping):
        side_by_side, in_parts = engine.empty_sum(), engine.empty_sum()
        engine.add_clipped_sum(side_by_side, lambda: losses(batch), NUM_RECORDS, Units(sizes))
        first = [lambda b=b: losses(_rows(batch, b)) for b in range(sizes[0])]
        for parts in (first, [lambda: losses(_rows(batch, NUM_RECORDS - 1))]):
            total = engine.gradient_of(parts)  # type: ignore[arg-type]
            engine.add_clipped(in_parts, {name: gradient.unsqueeze(0) for name, gradient in total.items()})
    return max(
        _check_equal(sums.result(), want, tolerance, what, MIXING) for sums in (side_by_side, in_parts)
    )  # fmt: skip


def _added(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([row[name] for row in rows]).sum(dim=0) for name in rows[0]}


def _check_sums(
    engine: ClippingEngine, losses: RecordLosses, batch: Mapping[str, Any], tolerance: float, *, is_scaled: bool
) -> tuple[dict[str, torch.Tensor], float]:
    """First without a clip, where an error names the tensor it is in; then with one that half of the records meet."""
    unclipped = _engine_sum(engine, losses, batch, UNCLIPPED)
    rows = [_naive_gradients(engine, losses, _rows(batch, b)) for b in range(NUM_RECORDS)]
    what = "the clipped sum differs from a loop over single records"
    error = _check_equal(unclipped, _naive_clipped_sum(UNCLIPPED, rows), tolerance, what, MIXING)
    median = sorted(_squared_norm(row).sqrt().item() for row in rows)[NUM_RECORDS // 2]
    if median > 0:
        clipping = dataclasses.replace(engine.clipping, clipping_norm=median)
        want = _naive_clipped_sum(clipping, rows)
        error = max(error, _check_equal(_engine_sum(engine, losses, batch, clipping), want, tolerance, what, MIXING))
    if is_scaled:
        error = max(error, _check_scaled_sums(engine, losses, batch, rows, tolerance))
    return unclipped, error


def _check_padding(
    engine: ClippingEngine, losses: RecordLosses, batch: dict[str, Any], want: dict, padded: Mapping, tolerance: float
) -> float:
    longest = getattr(getattr(base_model(engine.model), "config", None), "max_position_embeddings", None)
    if longest is not None and padded["input_ids"].size(-1) + 2 > longest:
        return 0.0
    what = "gradients change with the padding, so a record's gradient depends on how long the others are"
    return _check_equal(_engine_sum(engine, losses, padded, UNCLIPPED), want, tolerance, what, PADDING)


def _check_is_the_models_own_loss(losses: RecordLosses, row: Mapping[str, Any], tolerance: float) -> None:
    """Finds heads whose loss is another one than their name tells: labels that are not shifted, further terms."""
    if losses.kind == "custom":
        return
    config = base_model(losses.model).config
    problem_type = getattr(config, "problem_type", None)  # the model writes what it infers into its config
    with torch.no_grad():
        own = losses.model(**row, return_dict=True).loss
        ours = RecordLosses(losses.model)(row)[0]  # label smoothing is the Trainer's, not the model's
    config.problem_type = problem_type
    allowed = max(LOSS_TOLERANCE, tolerance if tolerance == TOLERANCE[torch.bfloat16] else 0.0)
    if own is not None and own.isfinite() and (own - ours).abs() > allowed * own.abs().clamp(min=1):
        raise DPConfigError(
            f"{type(base_model(losses.model)).__name__} computes another loss than {losses.kind} models do: {own:.4g} "
            f"on a made-up record, not {ours:.4g}. Pass per_example_loss_func=f with f(outputs, labels) -> tensor of "
            "shape (batch,), one loss per record."
        )


def _check_buffers_unchanged(model: nn.Module, losses: RecordLosses, batch: Mapping[str, Any]) -> None:
    before = {name: b.detach().clone() for name, b in model.named_buffers()}
    with torch.no_grad(), _mode(model, training=True):
        losses(batch)
    changed = [n for n, b in model.named_buffers() if n not in before or not torch.equal(b, before[n])]
    with torch.no_grad():
        for name, b in model.named_buffers():
            if name in changed and name in before:
                b.copy_(before[name])
    if changed:
        raise UnsupportedModuleError(
            f"Self-check failed before training: a forward in training mode changes buffers ({', '.join(changed)}), "
            "which would be released without noise. Replace these layers or put them in evaluation mode for good."
        )


def self_check(
    engine: ClippingEngine,
    losses: RecordLosses,
    like: Mapping[str, Any],
    *,
    padding_id: int | None,
    padding_side: str | None = None,
    is_scaled: bool = False,
    has_units: bool = False,
) -> SelfCheck:
    """Compares the engine with a loop over single records on made-up inputs.

    Formal guarantee: on return, for these inputs, the clipped sum equals that of one plain backward per record, and
    does not change with padding; so no record's gradient depended on another record or on its length.

    Args:
        engine: as used in training.
        losses: as used in training.
        like: one collated batch, for keys, dtypes and dimensions.
        padding_id: the tokenizer's padding token; None takes the model's where the batch has an attention_mask.
        padding_side: the tokenizer's, "left" or "right"; None takes what the mask of `like` shows.
        is_scaled: a preconditioner divides records before the clip, so that is checked, too.
        has_units: several records may belong to one unit of privacy, so that is checked, too.

    Raises:
        UnsupportedModuleError: naming the tensor that differs, the buffer that changed or the mixing that was found.
        DPConfigError: for a packed batch, or a model whose loss is not the one of its kind.
    """
    start = time.perf_counter()
    num_records(like)  # refuses packed batches
    model = engine.model
    if padding_id is None and "attention_mask" in like:
        padding_id = getattr(getattr(base_model(model), "config", None), "pad_token_id", None) or 0
    padding_side = padding_side or _padding_side(like)
    batch = synthetic_batch(like, model, padding_id, padding_side=padding_side)
    tolerance = _tolerance(engine, batch)
    with _evaluation_mode(model, engine.parameters):
        unclipped, error = _check_sums(engine, losses, batch, tolerance, is_scaled=is_scaled)
        if padding_id is not None and "input_ids" in batch:
            padded = _padded(batch, padding_id, padding_side)
            error = max(error, _check_padding(engine, losses, batch, unclipped, padded, tolerance))
        if has_units:
            error = max(error, _check_units(engine, losses, batch, tolerance))
        _check_is_the_models_own_loss(losses, _rows(batch, 0), tolerance)
    _check_buffers_unchanged(model, losses, batch)
    for p in engine.parameters.values():
        p.grad = None
    return SelfCheck(relative_error=error, seconds=time.perf_counter() - start)


def _tolerance(engine: ClippingEngine, batch: Mapping[str, Any]) -> float:
    sample = batch.get("input_ids")
    device = sample.device.type if isinstance(sample, torch.Tensor) else "cpu"
    # accelerate puts autocast inside the forward it installs on the model
    autocast = torch.is_autocast_enabled(device) or hasattr(engine.model, "_original_forward")
    if autocast or any(p.dtype == torch.bfloat16 for p in engine.model.parameters()):
        return TOLERANCE[torch.bfloat16]
    return TOLERANCE.get(next(iter(engine.parameters.values())).dtype, 1e-4)
