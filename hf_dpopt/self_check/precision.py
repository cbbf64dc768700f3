"""The precision that a check runs in: float32 or wider where that fits, and how much rounding may differ.

Shape legend: B = records.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch

from hf_dpopt.clipping.capture import in_mixture
from hf_dpopt.clipping.engine import ClippingEngine
from hf_dpopt.common.errors import UnsupportedModuleError
from hf_dpopt.records.losses import RecordLosses, num_records
from hf_dpopt.self_check import conditions
from hf_dpopt.self_check.draws import MIDDLE
from hf_dpopt.self_check.probe import Gradient, Probe, distance, length, plain_gradient, probing

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
NARROW_TOLERANCE = 5e-2
SAME_SHAPES = {torch.float64: 1e-12, torch.float32: 1e-6}  # the same kernels: on a CPU, not one bit differs
NARROW_SAME_SHAPES = 1e-5
ACCELERATOR = 100.0  # times as much where sums may be added up in any order
FLOORS = 4.0  # times what two equal runs differ by, or what the last digits of layers change
MOST_BY_ROUNDING = 1e-2  # clipping norms; a record that others reach moves by more

Result = TypeVar("Result")


def tolerance_of_others(engine: ClippingEngine, is_wide: bool) -> float:
    """Relative difference that rounding may make in a gradient beside other records of the same shapes."""
    model, p = engine.model, next(iter(engine.parameters.values()))
    if in_mixture(model, [name for name, _ in model.named_parameters()]):
        return TOLERANCE.get(p.dtype, 1e-4) if is_wide else NARROW_TOLERANCE
    allowed = SAME_SHAPES.get(p.dtype, NARROW_SAME_SHAPES) if is_wide else NARROW_SAME_SHAPES
    return allowed * (1.0 if p.device.type == "cpu" else ACCELERATOR)


@contextlib.contextmanager
def training_conditions(engine: ClippingEngine, *, wide: bool, dtype: torch.dtype = torch.float32) -> Iterator[float]:
    """Put the model in training mode, in `dtype` if asked for and if that fits; yields the tolerance of equal sums.

    Parameters, buffers, modes and generators are restored after the context.

    Raises:
        UnsupportedModuleError: if a buffer changes inside the context.
    """
    model = engine.model
    is_widened = wide and conditions.fits(model, dtype)
    with contextlib.ExitStack() as stack:
        stack.enter_context(conditions.keep_generators(conditions.device_of(model)))
        stack.enter_context(conditions.unchanged_buffers(model))
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
    try:
        with training_conditions(engine, wide=True) as tolerance:
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
