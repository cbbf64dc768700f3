"""Parameters that a layer multiplies with or adds to every token: RMSNorm weights, learned scales.

The forward is run as it is, with the parameter replaced by one copy per record, (B, 1, .., 1, D); autograd then sums
over the tokens of a record and no further. Which layers are of this kind is found by trying, not by class name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_dpopt.clipping.contributions import Dense
from hf_dpopt.clipping.site import Site
from hf_dpopt.common.errors import UnsupportedModuleError


class _CopyPerRecord(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, site: Site, attribute: str, num_dims: int) -> torch.Tensor:
        ctx.site, ctx.attribute, ctx.shape = site, attribute, parameter.shape
        copies = parameter.detach().flatten().expand(site.num_records, -1)
        return copies.view(site.num_records, *[1] * (num_dims - 2), -1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[None, None, None, None]:
        (grad_B1D,) = grad_outputs
        ctx.site.add(ctx.attribute, Dense(grad_B1D.reshape(grad_B1D.size(0), *ctx.shape)))
        return None, None, None, None


def copy_per_record(site: Site, attribute: str, like: torch.Tensor) -> torch.Tensor:
    """The vector `attribute` of the site's module as (B, 1, .., 1, D), to broadcast against `like`, (B, .., D)."""
    parameter = site.module.get_parameter(attribute)
    if not site.trains(attribute):
        return parameter.flatten()
    if like.dim() < 2 or like.size(0) != site.num_records:
        raise UnsupportedModuleError(
            f"{site.name} ({type(site.module).__name__}) sees an input of shape {tuple(like.shape)}, but the batch "
            f"has {site.num_records} records: the layer mixes or flattens records. Freeze its parameters."
        )
    return _CopyPerRecord.apply(parameter, site, attribute, like.dim())


def forward(site: Site, *args: Any, **kwargs: Any) -> Any:
    module, own = site.module, dict(site.module.named_parameters(recurse=False))
    x = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
    try:
        for name in own:
            module._parameters[name] = copy_per_record(site, name, x)  # type: ignore[assignment]
        return site.original(*args, **kwargs)
    finally:
        module._parameters.update(own)


def broadcasts(module: nn.Module) -> bool:
    """Whether the layer broadcasts all of its parameters over (B, T, D), tried on made-up inputs.

    With a copy of its own, made up as well, each of two records must come out as if the layer had that copy alone.
    """
    own = dict(module.named_parameters(recurse=False))
    sizes = {p.numel() for p in own.values() if p.dim() == 1}
    if len(sizes) != 1 or any(p.dim() != 1 or p.is_meta for p in own.values()):
        return False
    if next(module.buffers(), None) is not None:  # a try must not leave traces in running statistics
        return False
    (width,) = sizes
    generator = torch.Generator().manual_seed(0)
    like = next(iter(own.values()))

    def made_up(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device=like.device, dtype=like.dtype)

    try:
        with torch.no_grad():
            return all(
                _keeps_records_apart(
                    module, {name: scale * made_up(2, width) for name in own}, made_up(2, tokens, width)
                )
                for tokens, scale in ((3, 1), (3, 10), (5, 1), (1, -10))
            )
    except Exception:  # a layer that cannot be run this way is not of this kind, whatever it raises
        return False


def _keeps_records_apart(module: nn.Module, copies_2D: dict[str, torch.Tensor], x_2TD: torch.Tensor) -> bool:
    together = _run(module, {name: c.unsqueeze(1) for name, c in copies_2D.items()}, x_2TD)
    alone = [_run(module, {name: c[b] for name, c in copies_2D.items()}, x_2TD) for b in range(2)]
    if not all(isinstance(out, torch.Tensor) and out.shape == x_2TD.shape for out in (together, *alone)):
        return False
    tolerance = 1e-2 if x_2TD.dtype == torch.bfloat16 else 1e-4
    is_right = all(torch.allclose(together[b], alone[b][b], rtol=tolerance, atol=tolerance) for b in range(2))
    return is_right and not torch.equal(alone[0], alone[1])


def _run(module: nn.Module, parameters: dict[str, Any], x: torch.Tensor) -> Any:
    before = dict(module._parameters)
    try:
        module._parameters.update(parameters)
        return module.forward(x)
    finally:
        module._parameters.update(before)
