"""Parameters that lie in shards on the ranks (FSDP2): tensors that are cut and put together like them.

`torch.distributed.fsdp.fully_shard` makes every parameter a DTensor whose rows (its first dimension) are dealt to the
ranks, as `torch.chunk` would cut them. What is made of its gradient is a DTensor of the same layout: the sums, what is
released, second moments, filters. So a value tells by its type where it lies, and elementwise mathematics need not
know. This module holds the few places that must: reductions, the elements that noise is drawn for, and files.

Shape legend: P = rows of a parameter, p = those that lie on this rank.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hf_dpopt.common.errors import DPConfigError

WHOLE = "whole tensor of shards"  # the key of a tensor in a file that lay in shards
SHARD_THE_USUAL_WAY = (
    "Shard with FSDP2 over all processes (accelerate launch --use_fsdp --fsdp_version 2, or "
    "DistributedConfig(fsdp_size=<number of processes>)), or start plain data parallel."
)


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor lies in parts on several ranks; costs no import where nobody has sharded anything."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def any_sharded(tensors: Iterable[Any]) -> bool:
    """Whether one of them does."""
    return any(map(is_sharded, tensors))


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The part that lies on this rank, which shares its memory; a whole tensor is its own."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def check_layout(model: nn.Module) -> None:
    """Refuse shards that FSDP2 did not make of rows dealt to all ranks: activations, sums and noise are cut that way.

    Raises:
        DPConfigError: naming a parameter, and what its layout is.
    """
    shards = {name: p for name, p in model.named_parameters() if is_sharded(p)}
    if shards and not any(map(is_fsdp, model.modules())):
        raise DPConfigError(
            f"{next(iter(shards))} is sharded by something else than FSDP2 (tensor parallel, say), which is not "
            f"supported yet: norms would be those of a part of the layer. {SHARD_THE_USUAL_WAY}"
        )
    for name, p in shards.items():
        mesh, placements = p.device_mesh, p.placements  # type: ignore[attr-defined]
        if mesh.ndim != 1 or mesh.size() != dist.get_world_size():
            raise DPConfigError(
                f"{name} is sharded over a mesh of {tuple(mesh.shape)} of {dist.get_world_size()} processes "
                f"({placements}): replicas of shards (HSDP) and tensor parallel are not supported yet. "
                f"{SHARD_THE_USUAL_WAY}"
            )
        if not (placements[0].is_shard() and type(placements[0]).__name__ == "Shard" and placements[0].dim == 0):
            raise DPConfigError(
                f"{name} is sharded as {placements}, and sums are cut by rows (dimension 0). {SHARD_THE_USUAL_WAY}"
            )
        if len(local_of(p)) != rows_of(p)[1]:
            raise DPConfigError(
                f"{name} has {len(local_of(p))} rows on process {dist.get_rank()}, where {rows_of(p)[1]} of its "
                f"{len(p)} are expected. {SHARD_THE_USUAL_WAY}"
            )
        if local_of(p).device.type != mesh.device_type:
            raise DPConfigError(
                f"{name} is offloaded to {local_of(p).device}, where gradients do not come. Switch CPU offload off "
                "(fsdp_offload_params, fsdp_cpu_offload)."
            )


def rows_of(tensor: torch.Tensor, num_rows: int | None = None) -> tuple[int, int]:
    """The first row that lies on this rank, and how many do: those of `torch.chunk`, which may be none.

    Args:
        tensor: sharded tensor.
        num_rows: rows of another tensor that is dealt to the same ranks; those of this one by default.
    """
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    num_rows = tensor.shape[0] if num_rows is None else num_rows
    each = -(-num_rows // mesh.size())
    first = min(num_rows, mesh.get_local_rank() * each)
    return first, min(num_rows, first + each) - first


def elements_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The first element of the flattened, unsharded tensor that lies on this rank, and how many do."""
    if not is_sharded(tensor):
        return 0, tensor.numel()
    first, num = rows_of(tensor)
    row = tensor.shape[1:].numel()
    return first * row, num * row


def sum_to_shard(like: torch.Tensor, partial: torch.Tensor) -> torch.Tensor:
    """Add up a tensor over the ranks, of which each receives the part that it has of a parameter: a reduce-scatter.

    Args:
        like: sharded parameter.
        partial: this rank's share of the sum, of the whole parameter's shape.

    Returns:
        The rows of the sum that lie here, (p, ...), in the dtype of `partial`.
    """
    group = like.device_mesh.get_group()  # type: ignore[attr-defined]
    size = dist.get_world_size(group)
    each, num_rows = -(-len(partial) // size), len(partial)
    if each * size != num_rows:
        padding = partial.new_zeros(each * size - num_rows, *partial.shape[1:])
        partial = torch.cat([partial, padding])
    mine = partial.new_empty(each, *partial.shape[1:])
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # its name before 2.13
    reduce_scatter(mine, partial.contiguous(), group=group)
    return mine[: rows_of(like)[1]]


def sharded_like(like: torch.Tensor, mine: torch.Tensor, shape: torch.Size | None = None) -> torch.Tensor:
    """The sharded tensor whose part on this rank is `mine`, which it shares the memory of; with no communication.

    Args:
        like: sharded tensor of the same layout, of any dtype.
        mine: (p, ...).
        shape: shape of the whole; that of `like` by default.
    """
    dtensor, shape = sys.modules["torch.distributed.tensor"].DTensor, like.shape if shape is None else shape
    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    stride = torch.empty(shape, device="meta").stride()
    return dtensor.from_local(mine, mesh, placements, run_check=False, shape=shape, stride=stride)


def cut_like(like: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """A whole tensor that every rank has, sharded as `like` is and on its device; `whole` itself if `like` is whole.

    Raises:
        DPConfigError: for another shape.
    """
    if not is_sharded(like):
        return whole.to(like.device)
    if whole.shape != like.shape:
        raise DPConfigError(f"A tensor of shape {tuple(whole.shape)} cannot be cut like one of {tuple(like.shape)}.")
    return _cut(like, whole)


def _cut(like: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    first, num = rows_of(like, len(whole))
    return sharded_like(like, whole[first : first + num].to(like.device, copy=True), whole.shape)


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a sharded tensor, on every rank: all ranks ask together. A whole tensor is returned as it is."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def gathered(tree: Any, *, keeps: bool = True) -> Any:
    """A copy of a state in which every sharded tensor stands whole, in the host's memory and marked as such.

    All ranks call it together, with states of one structure.

    Args:
        tree: the state.
        keeps: whether this rank wants the copy; where it only takes part, no more than one tensor is ever whole.
    """
    if is_sharded(tree):
        mesh_device = tree.device_mesh.device_type
        mine = tree.detach().to_local().to(mesh_device)  # a filter may keep its buffers in the host's memory
        whole = whole_of(sharded_like(tree, mine))
        return {WHOLE: whole.cpu() if keeps else None}
    if isinstance(tree, dict):
        return {key: gathered(value, keeps=keeps) for key, value in tree.items()}
    return type(tree)(gathered(value, keeps=keeps) for value in tree) if isinstance(tree, (list, tuple)) else tree


def scattered(tree: Any, like: torch.Tensor) -> Any:
    """The state that `gathered` copied, with sharded tensors again: over these ranks, however many there were.

    Args:
        tree: the copy, which every rank has.
        like: any sharded parameter, for the ranks.
    """
    if isinstance(tree, dict) and tree.keys() == {WHOLE}:
        return _cut(like, tree[WHOLE])
    if isinstance(tree, dict):
        return {key: scattered(value, like) for key, value in tree.items()}
    return type(tree)(scattered(value, like) for value in tree) if isinstance(tree, (list, tuple)) else tree


def has_shards(tree: Any) -> bool:
    """Whether a state has tensors that lay in shards when `gathered` copied it."""
    if isinstance(tree, dict):
        return WHOLE in tree or any(map(has_shards, tree.values()))
    return isinstance(tree, (list, tuple)) and any(map(has_shards, tree))


def class_of(module: nn.Module) -> type:
    """The class of a module as it was before `fully_shard` put its own in front of it."""
    return type(module).__mro__[2] if is_fsdp(module) else type(module)


def is_fsdp(module: nn.Module) -> bool:
    """Whether `fully_shard` was called for a module itself."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def give_back(model: nn.Module) -> None:
    """Free the whole weights that a forward without a backward has left, so that parameters are shards again."""
    for module in filter(is_fsdp, model.modules()):
        module.reshard()  # type: ignore[operator]
