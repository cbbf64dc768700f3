"""Any other module: per-record gradients by autograd, one vector-Jacobian product per record.

Right for every module whose output for a record depends on that record's inputs alone (the start-up self-check tests
it); costs a second forward of the module and B copies of its gradients. B = records.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from hf_dpopt.clipping.contributions import Dense
from hf_dpopt.clipping.site import Site
from hf_dpopt.common.errors import UnsupportedModuleError

Gradients = dict[str, torch.Tensor]


def check_draws(name: str, module: nn.Module) -> None:
    """Refuse a module that draws at random: a record that is run again would see another draw than the loss did."""
    dropped = [part for part in module.modules() if "Dropout" in type(part).__name__ and getattr(part, "p", 1) > 0]
    shared = [p for kind in ("rank_dropout", "module_dropout") for p in getattr(module, kind, {}).values() if p]
    # these sample their vectors or their choice of skills in every forward
    is_random = type(module).__module__.startswith(("peft.tuners.pvera.", "peft.tuners.poly."))
    if dropped or shared or is_random:
        raise UnsupportedModuleError(
            f"{name or 'The model'} ({type(module).__name__}) draws at random. Its gradients are found by running "
            "each record again, which would draw anew. "
            f"{'Use LoRA or VeRA.' if is_random else 'Set its dropout to 0, or freeze its parameters.'}"
        )


class _Watched(torch.autograd.Function):
    """The identity on a module's outputs; its backward runs the module again, record by record, for its parameters."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, site: Site, spec: Any, leaves: list, rows: set[int], *outputs: torch.Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.site, ctx.spec, ctx.rows = site, spec, rows
        ctx.constants = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        ctx.is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        ctx.save_for_backward(*[leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)])
        ctx.autocast = {d: torch.get_autocast_dtype(d) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)}
        return tuple(out.detach() for out in outputs)  # a view could not be changed in place

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> tuple[Any, ...]:
        saved = iter(ctx.saved_tensors)
        leaves = [next(saved) if t else c for t, c in zip(ctx.is_tensor, ctx.constants, strict=True)]
        with ctx.site.paused(), torch.enable_grad(), contextlib.ExitStack() as autocast:
            for device, dtype in ctx.autocast.items():
                autocast.enter_context(torch.autocast(device, dtype=dtype))
            grads_B = _record_gradients(ctx.site, leaves, ctx.spec, ctx.rows, grad_outputs)
        for name, grad_B in grads_B.items():
            ctx.site.add(name, Dense(grad_B))
        return None, None, None, None, None, *grad_outputs


class _Forward(nn.Module):
    """A module without the hooks around its forward: those of the whole batch have run, or are still to run."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.forward(*args, **kwargs)


def _is_of_records(x: Any, num_records: int) -> bool:
    return isinstance(x, torch.Tensor) and x.dim() > 0 and x.size(0) == num_records


def _with_rows(site: Site, leaves: list, spec: Any) -> set[int]:
    """Places of the arguments that have a row for each record.

    One that had another first dimension in any batch (positions, (T, D)) is the same for all records, also in a batch
    of which it happens to have the size.
    """
    sizes = {i: x.size(0) for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.dim() > 0}
    site.shared |= {(str(spec), i) for i, size in sizes.items() if size not in (1, site.num_records)}
    return {i for i, size in sizes.items() if size == site.num_records and (str(spec), i) not in site.shared}


def _is_cache(x: Any) -> bool:
    """Whether this is a cache of keys and values; it holds those of the batch when a record is run again."""
    return any(cls.__name__ == "Cache" and cls.__module__ == "transformers.cache_utils" for cls in type(x).__mro__)


def _inside(value: Any, depth: int = 2) -> Iterator[Any]:
    """Yield the values in an object and in its lists, dicts and objects; none of a module."""
    held = {} if isinstance(value, nn.Module) else getattr(value, "__dict__", {})
    for x in pytree.tree_leaves(held):
        yield x
        if depth:
            yield from _inside(x, depth - 1)


def _check_plain(site: Site, values: list) -> None:
    """Refuse tensors of records inside of objects: when a record is run again, they would be those of the batch."""
    for value in values:
        if any(_is_of_records(x, site.num_records) for x in _inside(value)):
            raise UnsupportedModuleError(
                f"{site.name} ({type(site.module).__name__}) has tensors inside of a {type(value).__name__}, where "
                "records cannot be told from each other. Freeze its parameters, or use LoRA, DoRA or VeRA."
            )


def _is_watched(output: Any) -> bool:
    return isinstance(output, torch.Tensor) and output.is_floating_point()


def _record_gradients(
    site: Site, leaves: list, spec: Any, rows: set[int], grad_outputs: tuple[torch.Tensor | None, ...]
) -> dict[str, torch.Tensor]:
    parameters = dict(site.module.named_parameters())
    trained = {name: p.detach().requires_grad_() for name, p in parameters.items() if site.trains(name)}
    frozen = {name: p.detach() for name, p in parameters.items() if not site.trains(name)}
    module, values = _Forward(site.module), {f"module.{name}": p for name, p in {**frozen, **trained}.items()}
    num_records = site.num_records
    for grad in grad_outputs:
        if grad is not None and (grad.dim() == 0 or len(grad) != num_records):
            raise UnsupportedModuleError(
                f"{site.name} ({type(site.module).__name__}) returns a tensor of shape {tuple(grad.shape)}, but the "
                f"batch has {num_records} records: one record's gradient cannot be told from another's. It has no "
                "rule of its own: freeze its parameters, or train others with LoRA."
            )

    def record(b: int) -> Gradients:
        one = [x[b : b + 1] if i in rows else x for i, x in enumerate(leaves)]
        args, kwargs = pytree.tree_unflatten(one, spec)
        try:
            out = torch.func.functional_call(module, values, args, kwargs)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except (RuntimeError, ValueError, IndexError, AssertionError) as error:
            raise UnsupportedModuleError(
                f"{site.name} ({type(site.module).__name__}) fails on a record alone ({error}); mostly it keeps state "
                "of its batch. Freeze it, use LoRA, or add a rule under hf_dpopt/clipping/rules."
            ) from error
        outputs = filter(_is_watched, pytree.tree_leaves(out))
        pairs = [(o, g[b : b + 1]) for o, g in zip(outputs, grad_outputs, strict=True) if g is not None]
        pairs = [(o, g) for o, g in pairs if o.requires_grad]  # a branch that a record takes may use no parameter
        if not pairs:
            return {name: torch.zeros_like(p) for name, p in trained.items()}
        outs, grads = zip(*pairs, strict=True)
        found = torch.autograd.grad(outs, list(trained.values()), grads, materialize_grads=True)
        return dict(zip(trained, found, strict=True))

    # a loop, no transform of torch.func: it runs whatever a forward may contain (branches that depend on the data,
    # in-place operations, autograd functions of its own)
    records = [record(b) for b in range(num_records)]
    return {name: torch.stack([r[name] for r in records]) for name in trained}


@contextlib.contextmanager
def _without_gradients(site: Site) -> Iterator[None]:
    """The site's trained parameters as constants for autograd."""
    owners = {a: (site.module.get_submodule(a.rpartition(".")[0]), a.rpartition(".")[2]) for a in site.parameter_names}
    own = {a: owner._parameters[name] for a, (owner, name) in owners.items()}
    try:
        for a, (owner, name) in owners.items():
            owner._parameters[name] = own[a].detach()  # type: ignore[assignment, union-attr]
        yield
    finally:
        for a, (owner, name) in owners.items():
            owner._parameters[name] = own[a]


def _for_each_record(site: Site, output: torch.Tensor) -> torch.Tensor:
    """Repeat what is the same for all records, such as positions: (1, T, ..) becomes (B, T, ..)."""
    if output.dim() < 3 or output.size(0) != 1:
        raise UnsupportedModuleError(
            f"{site.name} ({type(site.module).__name__}) takes no tensor with a row for each record and returns shape "
            f"{tuple(output.shape)}, so the gradients of {site.num_records} records cannot be told from each other. "
            "It has no rule of its own: freeze its parameters, or train others with LoRA."
        )
    return output.expand(site.num_records, *output.shape[1:])


def forward(site: Site, *args: Any, **kwargs: Any) -> Any:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    with _without_gradients(site):
        out = site.original(*args, **kwargs)
    outputs, out_spec = pytree.tree_flatten(out)
    _check_plain(site, [value for value in leaves + outputs if not _is_cache(value)])
    watched, rows = [i for i, output in enumerate(outputs) if _is_watched(output)], _with_rows(site, leaves, spec)
    if not rows:
        for i in watched:
            outputs[i] = _for_each_record(site, outputs[i])
    # autograd runs a Function's backward only if an input wants a gradient; the anchor always does
    anchor = torch.zeros((), requires_grad=True)
    kept = [None if _is_cache(leaf) else leaf for leaf in leaves]
    seen = _Watched.apply(anchor, site, spec, kept, rows, *[outputs[i] for i in watched])
    for i, output in zip(watched, seen, strict=True):
        outputs[i] = output
    return pytree.tree_unflatten(outputs, out_spec)
