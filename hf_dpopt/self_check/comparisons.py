"""Comparisons: the engine's sum with a loop over single records, and a record with itself beside others.

Shape legend: B = records.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from hf_dpopt.clipping.engine import ClippingEngine
from hf_dpopt.clipping.scaling import Diagonal, Factored, Scale
from hf_dpopt.clipping.thresholds import Clipping, FlatClipping
from hf_dpopt.clipping.units import Units
from hf_dpopt.common.collectives import current_ranks
from hf_dpopt.common.errors import UnsupportedModuleError
from hf_dpopt.common.sharding import is_sharded, local_of
from hf_dpopt.records.collation import TARGETS, row_of
from hf_dpopt.records.losses import RecordLosses, num_records
from hf_dpopt.records.settings import settings
from hf_dpopt.self_check.conditions import (
    ACCELERATOR,
    NARROW_SAME_SHAPES,
    NARROW_TOLERANCE,
    TOLERANCE,
    fits,
    in_mode,
    single_operations,
    tolerance_of_others,
    training_conditions,
    unchanged_buffers,
    uncompiled,
)
from hf_dpopt.self_check.draws import MIDDLE, RecordDraws, others_were_used, seed_others
from hf_dpopt.self_check.made_up import Columns, Look, add_padding

Batch = Mapping[str, Any]
Gradient = dict[str, torch.Tensor]

FLOORS = 4.0  # times what two equal runs differ by, or what the last digits of layers change
MOST_BY_ROUNDING = 1e-2  # clipping norms; a record that others reach moves by more
EXTRA_PADDING = 3
UNCLIPPED = FlatClipping(clipping_norm=1e30)
MIXING = (
    "The model mixes records, or one of its layers is not captured right. Freeze that layer, train with LoRA on "
    "others, and report the model; --skip_self_check would make the privacy statement unfounded."
)
PADDING = (
    "Pass attention_mask (use DataCollatorWithPadding); a model that counts positions from the first column needs "
    "padding_side='right', and one that ignores the mask needs records of one length."
)
BOTH_WAYS = (
    "It attends in both directions, and so exactly where no record of a batch is padded: use_bidirectional_attention. "
    "Give its batches token_type_ids, as PaliGemma's processor does (suffix=..): 0 for the prompt, 1 for the answer."
)

# Neighbours of the two records that are watched. A capacity goes to the first record, so an equal one comes first; a
# scale follows the largest record, so that is never a watched one.
BESIDE = (
    (Look(1.0), Look(0.7)),
    (Look(1.0, "constant"), Look(1.0, "large")),
    (Look(0.01), Look(0.01, "large")),
)
WATCHED = (Look(0.15), Look(0.8, "constant"))


@dataclasses.dataclass
class Probe:
    """An engine with its losses, whose random draws are under control.

    Of a model in shards (FSDP2), every tensor is this rank's shard, and all ranks take part in each call: every rank
    computes the same record by itself, so the mean of the gradients is its gradient. The engine meets a batch on rank
    0 alone, and the others take part without records: a mistake in how shards are cut, summed or skipped shows.

    Args:
        engine: the engine that training uses.
        losses: the losses that training uses.
        tolerance: relative error that rounding may cause.
        draws: mode that makes draws per record; None if nothing is drawn.
        uses_others: whether Python's or numpy's generator is drawn from, too.
    """

    engine: ClippingEngine
    losses: RecordLosses
    tolerance: float
    draws: RecordDraws | None = None
    uses_others: bool = False

    def losses_of(self, batch: Batch, first: int = 0, **how: Any) -> torch.Tensor:
        """The losses of a batch, (B,), whose records count from `first`; `how` as for `RecordDraws.start`."""
        seed_others(how.get("shared", 0))
        if self.draws is not None:
            self.draws.start(range(first, first + num_records(batch)), **how)
        return self.losses(batch)

    def gradient(self, batch: Batch, first: int = 0, **how: Any) -> Gradient:
        """Compute the gradient of the sum of the losses of a batch, by a plain backward."""
        return self.total([lambda: self.losses_of(batch, first, **how)])

    def total(self, parts: Sequence[Any]) -> Gradient:
        """Compute the gradient of a sum of losses that several forwards return."""
        return {name: local_of(g) for name, g in self.engine.gradient_of(parts).items()}

    def engine_sum(
        self, batch: Batch, *, scale: Scale | None = None, units: Units | None = None, **how: Any
    ) -> Gradient:
        """Compute the engine's clipped sum of a batch."""
        engine, ranks, sums = self.engine, current_ranks(), self.engine.empty_sum(scale)
        with engine.leaving_out() if engine.is_collective and ranks.rank > 0 else contextlib.nullcontext():
            engine.add_clipped_sum(sums, lambda: self.losses_of(batch, **how), num_records(batch), units)
        result = ranks.sum(sums.result()) if engine.is_collective else sums.result()
        return {name: local_of(g) for name, g in result.items()}

    def norms(self, gradient: Gradient) -> dict[str, torch.Tensor]:
        """L2 norm of each tensor, over all shards, float64."""
        norms = {name: torch.linalg.vector_norm(g).double() for name, g in gradient.items()}
        if not self.engine.is_collective:
            return norms
        ranks, whole = current_ranks(), {n for n, p in self.engine.parameters.items() if not is_sharded(p)}
        mine = [norm.square() / (ranks.size if name in whole else 1) for name, norm in norms.items()]
        return dict(zip(norms, torch.stack(ranks.gather(torch.stack(mine))).sum(0).sqrt(), strict=True))

    def length(self, gradient: Gradient) -> float:
        """L2 norm over all tensors together; NaN if one holds NaN."""
        return float(torch.linalg.vector_norm(torch.stack(list(self.norms(gradient).values()))))

    def distance(self, one: Gradient, other: Gradient) -> float:
        """L2 distance of two gradients; NaN if either holds NaN."""
        return self.length({name: one[name] - other[name] for name in other})

    def _subtract_clipped_(self, total: Gradient, clipping: Clipping, alone: Sequence[Gradient]) -> None:
        """Subtract the gradients of single records from `total`, clipped record by record in a loop."""
        squares: dict[str, list[Any]] = {clipping.group(name): [0.0] * len(alone) for name in alone[0]}
        for b, one in enumerate(alone):
            for name, norm in self.norms(one).items():
                squares[clipping.group(name)][b] += norm.square()
        factors = clipping.factors({group: torch.stack(squares_B) for group, squares_B in squares.items()})
        for b, one in enumerate(alone):
            for name, g in one.items():
                total[name].sub_(g, alpha=float(factors[clipping.group(name)][b]))

    def check_sum(
        self,
        compute: Callable[[], Gradient],
        alone: Sequence[Gradient],
        what: str,
        fix: str,
        *,
        clipping: Clipping | None = None,
    ) -> None:
        """Compare a clipped sum with these gradients clipped one by one.

        Args:
            compute: gives the sum, clipped as the engine clips.
            alone: the gradients of the records, or of users.
            what: the first part of the message of the error.
            fix: the last part, with the way out.
            clipping: the rule; None takes the engine's, with a clipping norm at the median of the gradients.
        """
        lengths = sorted(map(self.length, alone))
        if clipping is None:
            median = next((x for x in lengths[(len(alone) - 1) // 2 :] if x > 0), 1.0)
            clipping = dataclasses.replace(self.engine.clipping, clipping_norm=median)
        before, self.engine.clipping = self.engine.clipping, clipping
        try:
            sums = compute()
        finally:
            self.engine.clipping = before
        got = {name: sums[name] for name in alone[0]}
        # where gradients cancel, what is left of the sum is rounding
        size = max(self.length(got), min(lengths[-1], clipping.clipping_norm))
        self._subtract_clipped_(got, clipping, alone)
        self._check_small(got, size, what, fix)

    def check_equal(self, got: Gradient, want: Gradient, what: str, fix: str) -> None:
        """Refuse gradients that differ by more than the tolerance, naming the worst tensor; `got` is overwritten."""
        size = self.length(want)
        for name, g in want.items():
            got[name].sub_(g)
        self._check_small(got, size, what, fix)

    def _check_small(self, apart: Gradient, size: float, what: str, fix: str) -> None:
        """Refuse a difference beyond the tolerance times `size`.

        It is made in place: another copy of all weights would be more than some trainings have room for.
        """
        errors = {name: float(norm) / max(size, 1e-12) for name, norm in self.norms(apart).items()}
        worst = max(errors, key=lambda n: errors[n] if errors[n] == errors[n] else float("inf"))
        if not errors[worst] <= self.tolerance:
            raise UnsupportedModuleError(
                f"Self-check failed before training: {what}. Worst tensor: {worst}, relative error "
                f"{errors[worst]:.2g} (allowed {self.tolerance:g}). {fix}"
            )


@contextlib.contextmanager
def probing(engine: ClippingEngine, losses: RecordLosses, batch: Batch, tolerance: float) -> Iterator[Probe]:
    """Make a probe for a model, after trying it on a batch; it controls random draws if there are any.

    Raises:
        UnsupportedModuleError: if the operations cannot be seen one by one.
    """
    with uncompiled(engine.model), contextlib.ExitStack() as watched:
        watched.enter_context(single_operations())
        draws = RecordDraws(engine.model)
        probe = Probe(engine, losses, tolerance, draws)
        try:
            with torch.no_grad(), draws:
                probe.losses_of(batch)
                probe.uses_others, of_all = others_were_used(), draws.shapes
                if of_all and num_records(batch) > 1:
                    probe.losses_of(row_of(batch, 0))
                    draws.learn(of_all, num_records(batch), draws.shapes)
        except NotImplementedError as error:  # of an operation that does not run under a dispatch mode
            reason = str(error).split("\n", 1)[0]
            raise UnsupportedModuleError(
                f"Self-check failed before training: what the model draws cannot be seen ({reason:.120}), so records "
                "cannot be compared with themselves alone. Load it with attn_implementation='sdpa' or 'eager'."
            ) from error
        if of_all:
            watched.enter_context(draws)
        else:  # watching costs time and memory
            watched.close()
            probe.draws = None
        yield probe


def in_enough_digits(
    engine: ClippingEngine, losses: RecordLosses, batches: Sequence[Batch], check: Callable[[float], None]
) -> None:
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
    try:
        with training_conditions(engine, torch.float32) as tolerance:
            return check(tolerance)
    except UnsupportedModuleError:
        if tolerance != TOLERANCE[torch.float32]:
            raise
    if fits(engine.model, torch.float64):
        try:
            with training_conditions(engine, torch.float64):
                return check(tolerance)
        except (RuntimeError, TypeError, NotImplementedError):  # float32 inside the model, devices without float64
            pass
    with training_conditions(engine, torch.float32):
        return check(min(max(tolerance, FLOORS * _last_digits(engine, losses, batches)), MOST_BY_ROUNDING))


def _last_digits(engine: ClippingEngine, losses: RecordLosses, batches: Sequence[Batch]) -> float:
    """Change of the gradients of these batches by one unit in the last place of every layer, in clipping norms."""

    def next_number(module: Any, inputs: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return output
        found = output.detach()
        return output + (torch.nextafter(found, torch.full_like(found, torch.inf)) - found)

    probe = Probe(engine, losses, 0.0)
    with in_mode(engine.model, training=False), contextlib.ExitStack() as hooks:  # without dropout
        before = [probe.gradient(batch) for batch in batches]
        for module in engine.model.modules():
            if not list(module.children()):
                hooks.callback(module.register_forward_hook(next_number).remove)
        changes = [probe.distance(probe.gradient(batch), g) for batch, g in zip(batches, before, strict=True)]
    return sum(changes) / max(sorted(map(probe.length, before))[len(before) // 2], 1e-12)


# --- the engine, and a loop over single records ----------------------------------------------------------------------


def check_sums(probe: Probe, batch: Batch, *, is_scaled: bool = False, has_units: bool = False) -> None:
    """Compare the engine's sums with the loop's, with a clip that half of the records meet.

    Sums that differ are compared again without a clip, where an error names the tensor it is in.

    Args:
        probe: the model and its engine.
        batch: made-up records.
        is_scaled: also in the coordinates of a preconditioner, full and factored.
        has_units: also with units of several records, clipped once: side by side in a batch, and added up in parts.
    """
    num, what = num_records(batch), "the clipped sum differs from a loop over single records"
    alone = [probe.gradient(row_of(batch, b), b) for b in range(num)]
    together = functools.partial(probe.engine_sum, batch)
    is_both_ways = any(name == "use_bidirectional_attention" and on for _, name, on in settings(probe.engine.model))
    fix = BOTH_WAYS if is_both_ways and "token_type_ids" not in batch else MIXING
    try:
        probe.check_sum(together, alone, what, fix)
    except UnsupportedModuleError:
        probe.check_sum(together, alone, what, fix, clipping=UNCLIPPED)
        raise
    for scale in _made_up_scales(probe.engine.parameters) if is_scaled else ():
        what = "the clipped sum of preconditioned gradients differs from a loop over single records"
        _scale_(alone, scale, torch.Tensor.mul_)
        probe.check_sum(functools.partial(together, scale=scale), alone, what, MIXING)
        _scale_(alone, scale, torch.Tensor.div_)
    if has_units:
        alone.clear()
        what, sizes = "the clipped sum of users differs from a loop over users", (num - 1, 1)
        each = [lambda b=b: probe.losses_of(row_of(batch, b), b) for b in range(num)]
        users = [probe.total(each[: sizes[0]]), probe.total(each[sizes[0] :])]
        side_by_side = functools.partial(together, units=Units(sizes))
        for compute in (side_by_side, lambda: _sum_of(probe.engine, users)):
            probe.check_sum(compute, users, what, MIXING)


def _scale_(gradients: Sequence[Gradient], scale: Scale, operation: Callable[..., Any]) -> None:
    """Multiply gradients by the scale or divide them by it, in place: there are as many as records."""
    for one in gradients:
        for name, g in one.items():
            operation(g, scale.weights(name, g).view_as(g))


def _sum_of(engine: ClippingEngine, users: Sequence[Gradient]) -> Gradient:
    """The engine's clipped sum of gradients that were added up in parts."""
    sums = engine.empty_sum()
    for user in users:
        engine.add_clipped(sums, {name: gradient.unsqueeze(0) for name, gradient in user.items()})
    return dict(sums.result())


def _made_up_scales(parameters: Mapping[str, torch.Tensor]) -> list[Scale]:
    """Make a full and a factored scale over two orders of magnitude."""
    generator = torch.Generator().manual_seed(2)

    def values(*shape: int) -> torch.Tensor:
        return 10.0 ** (2 * torch.rand(*shape, generator=generator) - 1).to(next(iter(parameters.values())).device)

    full: dict[str, Diagonal | Factored] = {n: Diagonal(values(*p.shape)) for n, p in parameters.items()}
    factored = {n: Factored(values(len(p)), values(p[0].numel())) for n, p in parameters.items() if p.dim() > 1}
    return [Scale(full), Scale({**full, **factored})]


def check_influence(engine: ClippingEngine, losses: RecordLosses, together: Batch, alone: Sequence[Batch]) -> None:
    """Compare a collated batch of records of the dataset with the same records collated one by one.

    Through the real collator: ``{a, b}`` against ``{a}`` and ``{b}``, each padded to its own length. Runs in training
    mode and in float32 (if that fits), with dropout that keeps everything, for masks of different widths cannot be
    compared. Half of the records are clipped, so an error is seen at any size of gradients.

    Formal guarantee: on return, the clipped sum of the batch is that of its records, up to the tolerance, for these
    records at these weights; so none of them moved it by more than its own clipped gradient.

    Args:
        engine: the engine that training uses.
        losses: the losses that training uses.
        together: collated batch, on the device.
        alone: a collated batch of each of these records, in the same order; on the device.

    Raises:
        UnsupportedModuleError: if a tensor differs by more than rounding explains.
        DPConfigError: for a packed batch.
    """
    assert [num_records(batch) for batch in alone] == [1] * num_records(together)
    # where records are in what the model draws, two copies of a short one tell as well as long ones
    shortest = min(alone, key=lambda row: sum(v.numel() for v in row.values() if isinstance(v, torch.Tensor)))
    trial = {k: torch.cat([v, v]) if isinstance(v, torch.Tensor) and v.dim() else v for k, v in shortest.items()}
    what = "the clipped sum of records of the dataset is not the sum of what each gives alone"
    fix = f"The collator or the model mixes records, or a record's gradient depends on the length of others. {PADDING}"

    def check(tolerance: float) -> None:
        with probing(engine, losses, trial, tolerance) as probe:
            gradients = [probe.gradient(batch, b, per_record=MIDDLE) for b, batch in enumerate(alone)]
            compute = functools.partial(probe.engine_sum, together, per_record=MIDDLE)
            probe.check_sum(compute, gradients, what, fix)

    with unchanged_buffers(engine.model):
        in_enough_digits(engine, losses, alone, check)


# --- padding ---------------------------------------------------------------------------------------------------------


def check_padding(probe: Probe, batch: Batch, columns: Columns, num_more: int) -> None:
    """Check that more columns of padding change no gradient; without dropout, whose masks depend on the width."""
    width = batch["input_ids"].size(-1) + num_more
    what = f"gradients change with the padding to {width} tokens, so they depend on the lengths of other records"
    targets = TARGETS if probe.losses.kind == "ForConditionalGeneration" else ()
    wider = add_padding(batch, columns, num_more, targets=targets)
    want, got = (probe.gradient(each, per_record=MIDDLE) for each in (batch, wider))
    probe.check_equal(got, want, what, PADDING)


# --- others in the batch ---------------------------------------------------------------------------------------------


def check_others(engine: ClippingEngine, losses: RecordLosses, columns: Columns) -> None:
    """Compare the gradient of the same records beside others: ordinary, extreme and short ones.

    The batches have the same shapes, so they run through the same kernels with the same masks, as in training, and
    what differs is more than rounding. Records that are routed to experts are the exception: how many rows an expert
    has depends on the others, and with it the rounding.

    Args:
        engine: the engine that training uses.
        losses: the losses that training uses.
        columns: columns of the made-up records.

    Raises:
        UnsupportedModuleError: if others move a gradient by more than rounding does.
    """
    batches = [columns.batch(engine.model, (one, WATCHED[0], other, WATCHED[1])) for one, other in BESIDE]
    probe = Probe(engine, losses, tolerance_of_others(engine))

    def gradient_of(batch: Batch) -> Gradient:
        torch.manual_seed(0)
        return probe.total([lambda: probe.losses_of(batch)[1::2]])

    first = gradient_of(batches[0])
    size = max(probe.length(first), 1e-12)
    moved = [probe.distance(gradient_of(batch), first) / size for batch in batches[1:]]
    worst = max(moved, key=lambda x: x if x == x else float("inf"))
    if not worst <= probe.tolerance:
        floor = probe.distance(gradient_of(batches[0]), first) / size
        allowed = min(max(probe.tolerance, FLOORS * floor), NARROW_TOLERANCE)
        if not worst <= allowed:
            raise UnsupportedModuleError(
                "Self-check failed before training: the gradient of a record changes with what stands beside it in "
                f"the batch; another record moves it by {worst:.2g} clipping norms (allowed {allowed:.2g}, rounding). "
                f"{MIXING}"
            )


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
    alone = row_of(batches[0], 0)
    check_memory(compute, [alone, *batches])
    want, found = compute(alone)[0], [compute(batch)[0] for batch in batches]
    moved = torch.stack([(one - want).abs().max() for one in found]).max() / want.abs().max().clamp(min=1e-12)
    if not moved <= TOLERANCE[torch.float32]:
        raise UnsupportedModuleError(
            f"The output for a made-up record changes by {moved:.2g} of its size with the other records of a batch: "
            "the model mixes records in evaluation mode. Replace the layer that does."
        )
