"""Before the first step: is the clipped sum of this model, in this environment, what a naive loop computes?

Runs on made-up records of the shape the collator produces. Catches layers the capture does not cover, losses and models
in which records influence each other, layouts that are not batch-first, padding that leaks, and upstream changes.

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

from hf_dpopt.errors import UnsupportedModuleError
from hf_dpopt.grads.engine import ClippingEngine
from hf_dpopt.losses import IGNORED, RecordLosses, base_model

NUM_RECORDS = 3
MAX_TOKENS = 32
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2}


@dataclasses.dataclass(frozen=True)
class SelfCheck:
    """A passed check: the largest relative error found and what it cost."""

    relative_error: float
    seconds: float


def synthetic_batch(like: Mapping[str, Any], model: nn.Module, padding_id: int | None) -> dict[str, Any]:
    """Made-up records with the keys, dtypes and dimensions of a collated batch, and lengths that differ.

    No value of `like` survives, except in tensors of a kind not known here, where its first rows are repeated.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)  # made-up values: nothing secret, and failures can be repeated
    num_tokens = min([MAX_TOKENS, *(v.size(1) for v in like.values() if isinstance(v, torch.Tensor) and v.dim() > 1)])
    lengths_B = torch.tensor([num_tokens, max(1, num_tokens // 2), max(1, num_tokens - 1)])
    present_BT = torch.arange(num_tokens) < lengths_B.unsqueeze(1)
    config = base_model(model).config
    vocabulary = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    batch: dict[str, Any] = {}
    for key, value in like.items():
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            batch[key] = value
            continue
        shape = (NUM_RECORDS, num_tokens, *value.shape[2:])[: value.dim()]
        if key in ("input_ids", "decoder_input_ids"):
            ids_BT = torch.randint(0, vocabulary, shape, generator=generator)
            if padding_id is not None:
                ids_BT[ids_BT == padding_id] = (padding_id + 1) % vocabulary
            fill = padding_id if padding_id is not None and "attention_mask" in like else None
            batch[key] = ids_BT if fill is None else ids_BT.masked_fill(~present_BT, fill)
        elif key.endswith("attention_mask"):
            batch[key] = present_BT.to(value.dtype)
        elif key == "labels" and value.dim() > 1 and not value.is_floating_point():
            labels_BT = torch.randint(0, vocabulary, shape, generator=generator)
            if getattr(config, "num_labels", None) and base_model(model).__class__.__name__.endswith("TokenClassification"):
                labels_BT = labels_BT % config.num_labels
            batch[key] = labels_BT.masked_fill(~present_BT, IGNORED)
        elif key in ("labels", "start_positions", "end_positions") and not value.is_floating_point():
            high = num_tokens if key != "labels" else max(int(getattr(config, "num_labels", 2)), 1)
            batch[key] = torch.randint(0, high, shape, generator=generator)
        elif value.is_floating_point():
            batch[key] = torch.randn(shape, generator=generator).to(value.dtype)
        elif key == "token_type_ids":
            batch[key] = torch.zeros(shape, dtype=value.dtype)
        else:
            batch[key] = value[:1].expand(NUM_RECORDS, *value.shape[1:])[:, :num_tokens].clone()
        batch[key] = batch[key].to(device=device, dtype=value.dtype)
    return batch


def _padded(batch: Mapping[str, Any], padding_id: int, extra: int) -> dict[str, Any]:
    """The same records behind `extra` more columns of padding."""
    fill = {"input_ids": padding_id, "labels": IGNORED}
    length = batch["input_ids"].size(1)
    return {
        k: torch.nn.functional.pad(v, (0, extra), value=fill.get(k, 0))
        if isinstance(v, torch.Tensor) and v.dim() == 2 and v.size(1) == length
        else v
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
        name: torch.zeros_like(p, dtype=torch.float32) if g is None else g.float()
        for name, p, g in zip(names, parameters, grads, strict=True)
    }


@contextlib.contextmanager
def _evaluation_mode(model: nn.Module, parameters: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Dropout off; parameters that are all zero (a fresh LoRA B) filled, for a zero gradient would match anything."""
    training = {module: module.training for module in model.modules()}
    zeros = [p for p in parameters.values() if p.numel() and not p.detach().any()]
    generator = torch.Generator().manual_seed(1)
    model.eval()
    with torch.no_grad():
        for p in zeros:
            p.copy_(torch.randn(p.shape, generator=generator).mul_(0.02).to(p.dtype))
    try:
        yield
    finally:
        with torch.no_grad():
            for p in zeros:
                p.zero_()
        for module, was_training in training.items():
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


def _check_buffers_unchanged(model: nn.Module, losses: RecordLosses, batch: Mapping[str, Any]) -> None:
    before = {name: b.detach().clone() for name, b in model.named_buffers()}
    was_training = model.training
    model.train()
    try:
        with torch.no_grad():
            losses(batch)
    finally:
        model.train(was_training)
    changed = [n for n, b in model.named_buffers() if n not in before or not torch.equal(b, before[n])]
    with torch.no_grad():
        for name, b in model.named_buffers():
            if name in changed and name in before:
                b.copy_(before[name])
    if changed:
        raise UnsupportedModuleError(
            f"Self-check failed before training: a forward in training mode changes buffers ({', '.join(changed)}), which "
            "would be released without noise. Replace these layers or put them in evaluation mode for good."
        )


def self_check(
    engine: ClippingEngine, losses: RecordLosses, like: Mapping[str, Any], *, padding_id: int | None
) -> SelfCheck:
    """Compares the engine with a loop over single records on made-up inputs.

    Formal guarantee: on return, for these inputs, the clipped sum equals that of one plain backward per record, and
    does not change with padding; so no record's gradient depended on another record or on its length.

    Args:
        engine: as used in training.
        losses: as used in training.
        like: one collated batch, for keys, dtypes and dimensions.
        padding_id: the tokenizer's padding token, or None if the collator does not pad.

    Raises:
        UnsupportedModuleError: naming the tensor that differs, the buffer that changed or the mixing that was found.
    """
    start = time.perf_counter()
    model = engine.model
    batch = synthetic_batch(like, model, padding_id)
    dtype = next(iter(engine.parameters.values())).dtype
    sample = batch.get("input_ids")
    device = sample.device.type if isinstance(sample, torch.Tensor) else "cpu"
    low = torch.bfloat16 if torch.is_autocast_enabled(device) or _runs_in_bfloat16(model) else dtype
    tolerance = TOLERANCE.get(low, 1e-4)
    mend = (
        "The model mixes records, or one of its layers is not captured right. Freeze that layer, train with LoRA on "
        "others, and report the model; --skip_self_check would make the privacy statement unfounded."
    )
    with _evaluation_mode(model, engine.parameters):
        rows = [_naive_gradients(engine, losses, _rows(batch, b)) for b in range(NUM_RECORDS)]
        groups: list[dict[str, torch.Tensor]] = []
        for row in rows:
            squares: dict[str, torch.Tensor] = {}
            for name, g in row.items():
                group = engine.clipping.group(name)
                squares[group] = squares.get(group, torch.zeros((), device=g.device)) + g.square().sum()
            groups.append(squares)
        factors = engine.clipping.factors({g: torch.stack([s[g] for s in groups]) for g in groups[0]})
        want = {
            name: torch.stack([row[name] * factors[engine.clipping.group(name)][b] for b, row in enumerate(rows)]).sum(0)
            for name in rows[0]
        }
        got = engine.zeros()
        engine.add_clipped_sum(got, lambda: losses(batch), NUM_RECORDS)
        error = _check_equal(got, want, tolerance, "the clipped sum differs from a loop over single records", mend)
        if padding_id is not None and "attention_mask" in batch and "decoder_input_ids" not in batch:
            error = max(error, _check_padding(engine, losses, batch, got, padding_id, tolerance))
    _check_buffers_unchanged(model, losses, batch)
    for p in engine.parameters.values():
        p.grad = None
    return SelfCheck(relative_error=error, seconds=time.perf_counter() - start)


def _runs_in_bfloat16(model: nn.Module) -> bool:
    # accelerate puts autocast inside the forward it installs on the model
    return hasattr(model, "_original_forward") or any(p.dtype == torch.bfloat16 for p in model.parameters())


def _check_padding(
    engine: ClippingEngine, losses: RecordLosses, batch: dict[str, Any], want: dict, padding_id: int, tolerance: float
) -> float:
    longest = getattr(base_model(engine.model).config, "max_position_embeddings", None)
    extra = 3
    if longest is not None and batch["input_ids"].size(1) + extra + 2 > longest:
        return 0.0
    padded = _padded(batch, padding_id, extra)
    got = engine.zeros()
    engine.add_clipped_sum(got, lambda: losses(padded), NUM_RECORDS)
    return _check_equal(
        got, want, tolerance, "gradients change with the padding, so a record's gradient depends on how long the others are",
        "Pass attention_mask (use DataCollatorWithPadding), or pad every record to the same length.",
    )  # fmt: skip
