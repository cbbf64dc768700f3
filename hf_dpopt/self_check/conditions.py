"""Conditions of a check: training mode, float32 or wider, plain operations; and how much rounding may differ."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_dpopt.clipping.capture import in_mixture, is_compiled
from hf_dpopt.clipping.engine import ClippingEngine, full_precision
from hf_dpopt.common.errors import UnsupportedModuleError
from hf_dpopt.randomness.framework import keep_generators
from hf_dpopt.run.kept_state import kept_buffers

NARROW = (torch.bfloat16, torch.float16)
SHARE_OF_MEMORY = 0.5  # of what is free, that copies in float32 may take

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}  # of equal sums
NARROW_TOLERANCE = 5e-2
SAME_SHAPES = {torch.float64: 1e-12, torch.float32: 1e-6}  # the same kernels: on a CPU, not one bit differs
NARROW_SAME_SHAPES = 1e-5
ACCELERATOR = 100.0  # times as much where sums may be added up in any order


def device_of(model: nn.Module) -> torch.device:
    """Device of the model."""
    return next(model.parameters()).device


@contextlib.contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Put every module in one mode inside the context; restore each module's own mode after it."""
    before = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, was_training in before.items():
            module.training = was_training


@contextlib.contextmanager
def fill_zero_parameters(parameters: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Fill parameters that are all zero (a fresh LoRA B), inside the context: zero gradients would match anything."""
    zeros = [(p, p.detach().clone()) for p in parameters.values() if p.numel() and not p.detach().any()]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p, _ in zeros:
            p.copy_(torch.randn(p.shape, generator=generator).mul_(0.02).to(p.dtype))
    try:
        yield
    finally:
        with torch.no_grad():
            for p, before in zeros:
                p.copy_(before)


def single_operations() -> contextlib.AbstractContextManager[None]:
    """Attention as single operations, so that its dropout is visible; each takes memory for tokens x tokens."""
    return sdpa_kernel(SDPBackend.MATH)


def uncompiled(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Run compiled parts of a model as they are written."""
    is_any = any(is_compiled(module) for module in model.modules())
    return torch.compiler.set_stance("force_eager") if is_any else contextlib.nullcontext()


# --- precision -------------------------------------------------------------------------------------------------------


def free_bytes(device: torch.device) -> int:
    """Return the memory of a device that is free, in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0


def _narrow_tensors(model: nn.Module, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Parameters and buffers of fewer digits than `dtype`, which is float32 or float64."""
    narrow = NARROW if dtype == torch.float32 else (*NARROW, torch.float32)
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return [t for t in tensors.values() if t.dtype in narrow]


def _computing_narrowly(model: nn.Module) -> list[nn.Module]:
    """Quantised layers that convert what they multiply."""
    return [m for m in model.modules() if getattr(m, "compute_dtype", None) in NARROW]


def is_narrow(model: nn.Module) -> bool:
    """Whether the run computes in fewer digits than float32."""
    # accelerate puts autocast inside the forward it installs on the model
    has_autocast = torch.is_autocast_enabled(device_of(model).type) or hasattr(model, "_original_forward")
    return has_autocast or bool(_narrow_tensors(model)) or bool(_computing_narrowly(model))


def fits(model: nn.Module, dtype: torch.dtype = torch.float32) -> bool:
    """Whether there is memory for `compute_wide`."""
    needed = dtype.itemsize * sum(t.numel() for t in _narrow_tensors(model, dtype))
    return needed <= SHARE_OF_MEMORY * free_bytes(device_of(model))


@contextlib.contextmanager
def compute_wide(model: nn.Module, dtype: torch.dtype = torch.float32) -> Iterator[None]:
    """Compute in `dtype` or wider: autocast and TF32 off, narrower parameters and buffers replaced by wide copies.

    Parameters keep their identity, and get their own memory back after the context. Quantised weights stay quantised.
    In float64, inputs of the model that are floats become float64, too.
    """
    narrow = [(t, t.data) for t in _narrow_tensors(model, dtype)]
    changed: list[tuple[nn.Module, str, Any]]
    changed = [(layer, "compute_dtype", torch.float32) for layer in _computing_narrowly(model)]
    changed += [(m, "forward", m._original_forward) for m in model.modules() if "_original_forward" in m.__dict__]
    before = [getattr(module, name) for module, name, _ in changed]
    hook = model.register_forward_pre_hook(_floats_in_float64, with_kwargs=True) if dtype == torch.float64 else None
    with full_precision(device_of(model).type):
        for module, name, value in changed:
            setattr(module, name, value)
        for tensor, data in narrow:
            tensor.data = data.to(dtype)
        try:
            yield
        finally:
            if hook is not None:
                hook.remove()
            for tensor, data in narrow:
                tensor.data = data
            for (module, name, _), value in zip(changed, before, strict=True):
                setattr(module, name, value)


def _floats_in_float64(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {
        k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in kwargs.items()
    }


def tolerance_of_others(engine: ClippingEngine) -> float:
    """Relative difference that rounding may make in a gradient beside other records of the same shapes."""
    model, p = engine.model, next(iter(engine.parameters.values()))
    narrow = is_narrow(model)
    if in_mixture(model, [name for name, _ in model.named_parameters()]):
        return NARROW_TOLERANCE if narrow else TOLERANCE[p.dtype]
    return (NARROW_SAME_SHAPES if narrow else SAME_SHAPES[p.dtype]) * (1.0 if p.device.type == "cpu" else ACCELERATOR)


@contextlib.contextmanager
def training_conditions(engine: ClippingEngine, dtype: torch.dtype | None = None) -> Iterator[float]:
    """Put the model in training mode, and in `dtype` if that is given and fits; yields the tolerance of equal sums.

    Parameters, modes and generators are restored after the context.
    """
    model, own = engine.model, next(iter(engine.parameters.values()))
    with contextlib.ExitStack() as stack:
        stack.enter_context(keep_generators(device_of(model)))
        stack.enter_context(in_mode(model, training=True))
        is_widened = dtype is not None and fits(model, dtype)
        if is_widened:
            stack.enter_context(compute_wide(model, dtype))  # type: ignore[arg-type]
        stack.enter_context(fill_zero_parameters(engine.parameters))
        yield NARROW_TOLERANCE if not is_widened and is_narrow(model) else TOLERANCE.get(own.dtype, 1e-4)


@contextlib.contextmanager
def unchanged_buffers(model: nn.Module) -> Iterator[None]:
    """Restore buffers after the checks inside the context, and refuse the model that changed one.

    Raises:
        UnsupportedModuleError: naming the buffers.
    """
    with kept_buffers(model) as start:
        yield
        changed = start.changed()
    if changed:
        raise UnsupportedModuleError(
            f"Self-check failed before training: a forward in training mode changes buffers ({', '.join(changed)}), "
            "which would be released without noise. Replace these layers or put them in evaluation mode for good."
        )
