"""Any other leaf module: per-record gradients by autograd, one vector-Jacobian product per record.

Right for every module whose output for a record depends on that record's inputs alone (the start-up self-check tests
it); costs a second forward of the module and B copies of its gradients. B = records.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hf_dpopt.clipping.contributions import Dense
from hf_dpopt.clipping.site import Site
from hf_dpopt.common.errors import UnsupportedModuleError


def _call(module: nn.Module, parameters: dict[str, torch.Tensor], args: tuple, kwargs: dict) -> torch.Tensor:
    return torch.func.functional_call(module, parameters, args, kwargs)


class _PerRecord(torch.autograd.Function):
    """The module's own forward; a backward with input gradients at once and parameter gradients record by record."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, site: Site, spec: Any, *leaves: Any) -> torch.Tensor:
        ctx.site, ctx.spec = site, spec
        ctx.is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        ctx.constants = [None if is_tensor else leaf for leaf, is_tensor in zip(leaves, ctx.is_tensor, strict=True)]
        ctx.save_for_backward(*[leaf for leaf, is_tensor in zip(leaves, ctx.is_tensor, strict=True) if is_tensor])
        ctx.autocast = {d: torch.get_autocast_dtype(d) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)}
        args, kwargs = pytree.tree_unflatten(list(leaves), spec)
        out = site.original(*args, **kwargs)
        if not isinstance(out, torch.Tensor):
            raise UnsupportedModuleError(
                f"{site.name} ({type(site.module).__name__}) returns {type(out).__name__}, not a tensor, and has no "
                "rule of its own. Freeze it (requires_grad_(False)) or add a rule under hf_dpopt/clipping/rules."
            )
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[Any, ...]:
        (grad_output,) = grad_outputs
        site, saved = ctx.site, iter(ctx.saved_tensors)
        leaves = [next(saved) if t else c for t, c in zip(ctx.is_tensor, ctx.constants, strict=True)]
        parameters = dict(site.module.named_parameters())
        with site.original_forward(), torch.enable_grad(), _Autocast(ctx.autocast):
            grads_B = _record_gradients(site, parameters, leaves, ctx.spec, grad_output)
            grad_leaves = _input_gradients(site, parameters, leaves, ctx.spec, grad_output)
        for name, grad_B in grads_B.items():
            site.add(name, Dense(grad_B))
        return None, None, None, *grad_leaves


class _Autocast:
    """The forward's autocast state, for its recomputation in the backward."""

    def __init__(self, dtypes: dict[str, torch.dtype]):
        self.contexts = [torch.autocast(device, dtype=dtype) for device, dtype in dtypes.items()]

    def __enter__(self) -> None:
        for context in self.contexts:
            context.__enter__()

    def __exit__(self, *exc: Any) -> None:
        for context in reversed(self.contexts):
            context.__exit__(*exc)


def _input_gradients(site: Site, parameters: dict, leaves: list, spec: Any, grad_output: torch.Tensor) -> list:
    wanted = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.requires_grad]
    if not wanted:
        return [None] * len(leaves)
    fresh = [
        x.detach().requires_grad_(i in wanted) if isinstance(x, torch.Tensor) else x for i, x in enumerate(leaves)
    ]
    args, kwargs = pytree.tree_unflatten(fresh, spec)
    out = _call(site.module, {n: p.detach() for n, p in parameters.items()}, args, kwargs)
    if not out.requires_grad:  # the branches that these records took use no input
        return [None] * len(leaves)
    grads = iter(torch.autograd.grad(out, [fresh[i] for i in wanted], grad_output, allow_unused=True))
    return [next(grads) if i in wanted else None for i in range(len(leaves))]


def _record_gradients(
    site: Site, parameters: dict, leaves: list, spec: Any, grad_output: torch.Tensor
) -> dict[str, torch.Tensor]:
    trained = {name: p.detach().requires_grad_() for name, p in parameters.items() if site.trains(name)}
    frozen = {name: p.detach() for name, p in parameters.items() if not site.trains(name)}
    num_records = site.num_records
    batched = [isinstance(x, torch.Tensor) and x.dim() > 0 and x.size(0) == num_records for x in leaves]

    def record(b: int) -> dict[str, torch.Tensor]:
        one = [x[b : b + 1].detach() if is_batched else x for x, is_batched in zip(leaves, batched, strict=True)]
        args, kwargs = pytree.tree_unflatten(one, spec)
        try:
            out = _call(site.module, {**frozen, **trained}, args, kwargs)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except (RuntimeError, ValueError, IndexError, AssertionError) as error:
            raise UnsupportedModuleError(
                f"{site.name} ({type(site.module).__name__}) fails on a record alone ({error}); mostly it keeps state "
                "of its batch. It has no rule of its own: freeze its parameters, finetune with LoRA, or add one "
                "under hf_dpopt/clipping/rules."
            ) from error
        if not out.requires_grad:  # a branch that this record took uses no parameter
            return {name: torch.zeros_like(p) for name, p in trained.items()}
        grads = torch.autograd.grad(out, list(trained.values()), grad_output[b : b + 1], materialize_grads=True)
        return dict(zip(trained, grads, strict=True))

    # a loop, no transform of torch.func: it runs whatever a forward may contain (branches that depend on the data,
    # in-place operations, autograd functions of its own)
    records = [record(b) for b in range(num_records)]
    return {name: torch.stack([r[name] for r in records]) for name in trained}


def forward(site: Site, *args: Any, **kwargs: Any) -> torch.Tensor:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    # autograd runs a Function's backward only if an input wants a gradient; the anchor always does
    anchor = torch.zeros((), requires_grad=True)
    return _PerRecord.apply(anchor, site, spec, *leaves)
