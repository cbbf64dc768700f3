"""Comparison of the engine's sum with that of a naive loop over single records.

Shape legend: B = records.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from hf_dpopt.clipping.scaling import Diagonal, Factored, Scale
from hf_dpopt.clipping.thresholds import Clipping, FlatClipping
from hf_dpopt.clipping.units import Units
from hf_dpopt.huggingface.self_check.draws import MIDDLE
from hf_dpopt.huggingface.self_check.made_up import add_padding, rows
from hf_dpopt.huggingface.self_check.probe import Gradient, Probe, check_equal, clipped_by, squared_norm
from hf_dpopt.records.collation import TARGETS
from hf_dpopt.records.losses import base_model

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


def naive_clipped_sum(clipping: Clipping, gradients: list[Gradient]) -> Gradient:
    """Sum of the gradients, clipped record by record."""
    squares = [
        {group: squared_norm({n: g for n, g in one.items() if clipping.group(n) == group}) for group in groups}
        for one, groups in ((one, {clipping.group(n) for n in one}) for one in gradients)
    ]
    factors = clipping.factors({group: torch.stack([s[group] for s in squares]) for group in squares[0]})
    return {
        name: torch.stack([one[name] * factors[clipping.group(name)][b] for b, one in enumerate(gradients)]).sum(0)
        for name in gradients[0]
    }


def clip_half(clipping: Clipping, gradients: list[Gradient]) -> Clipping | None:
    """The rule with a clipping norm at the median of the records' norms; None if all gradients are zero."""
    return clip_half_of(clipping, [squared_norm(one).sqrt().item() for one in gradients])


def clip_half_of(clipping: Clipping, norms: list[float]) -> Clipping | None:
    """The rule with a clipping norm at the median of these norms; None if it is zero."""
    median = sorted(norms)[len(norms) // 2]
    return dataclasses.replace(clipping, clipping_norm=median) if median > 0 else None  # type: ignore[type-var]


def check_sums(probe: Probe, batch: Mapping[str, Any], num: int, *, is_scaled: bool) -> tuple[Gradient, float]:
    """Compare the engine's sum with the loop's; returns the sum without a clip, and the largest error.

    First without a clip, where an error names the tensor it is in; then with one that half of the records meet.
    """
    what, everyone = "the clipped sum differs from a loop over single records", range(num)
    unclipped = probe.engine_sum(batch, UNCLIPPED, everyone)
    alone = [probe.gradient(rows(batch, b), b) for b in everyone]
    error = check_equal(unclipped, naive_clipped_sum(UNCLIPPED, alone), probe.tolerance, what, MIXING)
    clipping = clip_half(probe.engine.clipping, alone)
    if clipping is not None:
        want, got = naive_clipped_sum(clipping, alone), probe.engine_sum(batch, clipping, everyone)
        error = max(error, check_equal(got, want, probe.tolerance, what, MIXING))
    if is_scaled:
        error = max(error, _check_scaled_sums(probe, batch, alone))
    return unclipped, error


def _made_up_scales(parameters: Mapping[str, torch.Tensor]) -> list[Scale]:
    """Make a full and a factored scale over two orders of magnitude."""
    generator = torch.Generator().manual_seed(2)

    def values(*shape: int) -> torch.Tensor:
        return 10.0 ** (2 * torch.rand(*shape, generator=generator) - 1).to(next(iter(parameters.values())).device)

    full: dict[str, Diagonal | Factored] = {n: Diagonal(values(*p.shape)) for n, p in parameters.items()}
    factored = {n: Factored(values(len(p)), values(p[0].numel())) for n, p in parameters.items() if p.dim() > 1}
    return [Scale(full), Scale({**full, **factored})]


def _check_scaled_sums(probe: Probe, batch: Mapping[str, Any], alone: list[Gradient]) -> float:
    """Compare sums clipped in the coordinates of a preconditioner, with a clip that half of the records meet."""
    what, error = "the clipped sum of preconditioned gradients differs from a loop over single records", 0.0
    if probe.draws is not None:
        probe.draws.stop()
    for scale in _made_up_scales(probe.engine.parameters):
        scaled = [{n: g * scale.weights(n, g).view_as(g) for n, g in one.items()} for one in alone]
        clipping = clip_half(probe.engine.clipping, scaled)
        if clipping is not None:
            got = probe.engine_sum(batch, clipping, range(len(alone)), scale=scale)
            error = max(error, check_equal(got, naive_clipped_sum(clipping, scaled), probe.tolerance, what, MIXING))
    return error


def check_units(probe: Probe, batch: Mapping[str, Any], num: int) -> float:
    """Compare units of several records, clipped once, side by side in a batch and added up in parts."""
    alone = [probe.gradient(rows(batch, b), b) for b in range(num)]
    sizes = (num - 1, 1)
    together = [_sum(alone[: sizes[0]]), alone[-1]]
    norm = max(squared_norm(unit).sqrt().item() for unit in together)
    if not norm > 0:
        return 0.0
    engine = probe.engine
    clipping = dataclasses.replace(engine.clipping, clipping_norm=norm / 2)  # type: ignore[type-var]
    want = naive_clipped_sum(clipping, together)
    what = "the clipped sum of users differs from a loop over users"
    with clipped_by(engine, clipping):
        side_by_side, in_parts = engine.empty_sum(), engine.empty_sum()
        engine.add_clipped_sum(side_by_side, lambda: probe.losses_of(batch, range(num)), num, Units(sizes))
        first = [lambda b=b: probe.losses_of(rows(batch, b), [b]) for b in range(sizes[0])]
        for parts in (first, [lambda: probe.losses_of(rows(batch, num - 1), [num - 1])]):
            total = engine.gradient_of(parts)  # type: ignore[arg-type]
            engine.add_clipped(in_parts, {name: gradient.unsqueeze(0) for name, gradient in total.items()})
    return max(
        check_equal(sums.result(), want, probe.tolerance, what, MIXING, added=clipping.clipping_norm)
        for sums in (side_by_side, in_parts)
    )


def _sum(gradients: list[Gradient]) -> Gradient:
    return {name: torch.stack([one[name] for one in gradients]).sum(dim=0) for name in gradients[0]}


def check_padding(
    probe: Probe, batch: Mapping[str, Any], num: int, padding_id: int, padding_side: str, unclipped: Gradient
) -> float:
    """Check that more columns of padding change nothing; without dropout, whose masks depend on the width.

    `unclipped` is the engine's sum under usual draws, which is the same if there are none.
    """
    targets = TARGETS if probe.losses.kind == "ForConditionalGeneration" else ()
    wider = add_padding(batch, padding_id, padding_side, EXTRA_PADDING, targets=targets)
    longest = getattr(getattr(base_model(probe.engine.model), "config", None), "max_position_embeddings", None)
    if longest is not None and wider["input_ids"].size(-1) + 2 > longest:
        return 0.0
    what = "gradients change with the padding, so a record's gradient depends on how long the others are"
    want = unclipped if probe.draws is None else probe.engine_sum(batch, UNCLIPPED, range(num), per_record=MIDDLE)
    got = probe.engine_sum(wider, UNCLIPPED, range(num), per_record=MIDDLE)
    return check_equal(got, want, probe.tolerance, what, PADDING)
