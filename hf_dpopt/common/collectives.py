"""The processes of a run: sums over them, and agreement between them. With one process all of it is the identity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.sharding import is_sharded
from hf_dpopt.common.types import ClippedSums, Gradients, JointSums

T = TypeVar("T")

BUCKET_ELEMENTS = 2**23  # 32 MB of float32 per collective: few launches, no second copy of a large model


def world_size() -> int:
    """Number of processes of the run."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Number of this process, 0-based."""
    return dist.get_rank() if world_size() > 1 else 0


class Ranks:
    """The processes of a run, and which of them this one is; each has all of the model, or its shards of it.

    Args:
        size: processes.
        rank: number of this one, 0-based.
    """

    def __init__(self, size: int = 1, rank: int = 0):
        self.size, self.rank = size, rank

    def sum(self, sums: ClippedSums) -> JointSums:
        """Add up every tensor over all ranks, in place, in float32; return the same dict.

        The sequence of collectives depends on the shapes alone, never on the data: a rank whose share of the logical
        batch is empty takes part with zeros. Sharded tensors were added up when they were cut, and stay as they are.
        """
        sum_over_ranks(sums)
        return JointSums(sums)

    def same(self, compute: Callable[[], T]) -> T:
        """Compute on rank 0 and give the result to every rank; an error there stops every rank, with the same message.

        It travels in memory only, so secrets may pass.
        """
        if self.size == 1:
            return compute()
        box: list[Any] = [_or_error(compute) if self.rank == 0 else None]
        dist.broadcast_object_list(box, src=0)
        if isinstance(box[0], Exception):
            raise box[0]
        return box[0]

    def every(self, compute: Callable[[], T]) -> list[T]:
        """Compute on every rank and give all results, in the order of ranks, to every rank.

        An error on one rank stops every rank, with the message of the first that has one: for what each has to see
        with its own eyes, such as the disk of its machine.
        """
        if self.size == 1:
            return [compute()]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, _or_error(compute))
        if error := next((one for one in found if isinstance(one, Exception)), None):
            raise error
        return found

    def largest(self, value: int) -> int:
        """The largest value of all ranks, on every rank; it costs one small collective."""
        if self.size == 1:
            return value
        device = _device_of_collectives() if dist.get_backend() == "nccl" else "cpu"
        agreed = torch.tensor(value, device=device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        return int(agreed.item())

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, in their order, of one shape and dtype, contiguous, on this one's device."""
        if self.size == 1:
            return [values]
        device = _device_of_collectives() if dist.get_backend() == "nccl" else values.device
        sent = values.to(device)
        everyone = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(everyone, sent)
        return [theirs.to(values.device) for theirs in everyone]


def _device_of_collectives() -> torch.device:
    """Device whose tensors NCCL takes."""
    return torch.device("cuda", torch.cuda.current_device())


def _or_error(compute: Callable[[], Any]) -> Any:
    try:
        return compute()
    except Exception as error:
        return error


def current_ranks() -> Ranks:
    """The processes there are now."""
    return Ranks(world_size(), rank())


def sum_over_ranks(gradients: Gradients) -> None:
    """Add up every tensor over all ranks, in place: see `Ranks.sum`, which does so to what is secret."""
    if world_size() == 1:
        return
    bucket: list[torch.Tensor] = []
    for name in sorted(gradients):
        if is_sharded(gradients[name]):
            continue
        bucket.append(gradients[name])
        if sum(t.numel() for t in bucket) >= BUCKET_ELEMENTS:
            _reduce(bucket)
            bucket = []
    if bucket:
        _reduce(bucket)


def _reduce(bucket: list[torch.Tensor]) -> None:
    flat = torch.cat([t.flatten() for t in bucket])
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    for t, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
        t.copy_(part.view_as(t))


def reduce_scatter(received: torch.Tensor, whole: torch.Tensor, group: Any = None) -> Any:
    """Begin to add up a tensor over the ranks, of which each receives its part in order; wait for what is returned.

    Args:
        received: memory for the part, as long on every rank.
        whole: this rank's share of the sum: the parts of all ranks, one after the other.
        group: processes; None for all.
    """
    begin = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # its name before 2.13
    return begin(received, whole, group=group, async_op=True)


def broadcast_parameters(model: torch.nn.Module) -> None:
    """Start every rank from the parameters and buffers of rank 0, as DistributedDataParallel would; shards stay."""
    if world_size() == 1:
        return
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            if not is_sharded(tensor):
                dist.broadcast(tensor, src=0)


def check_replicas_agree(model: torch.nn.Module) -> None:
    """Stop the run if the trainable parameters of the ranks have drifted apart.

    Raises:
        DPConfigError: if the checksums of two ranks differ in any bit.
    """
    if world_size() == 1:
        return
    trained = [p.detach() for p in model.parameters() if p.requires_grad and not is_sharded(p)]
    if not trained:
        return  # each shard is there once
    checksum = torch.stack([p.double().sum() for p in trained] + [p.double().square().sum() for p in trained])
    everyone = [torch.empty_like(checksum) for _ in range(world_size())]
    dist.all_gather(everyone, checksum)
    if any(not torch.equal(other, checksum) for other in everyone):
        raise DPConfigError(
            "The replicas of the model differ between ranks: something changes parameters on one rank only (a "
            "callback, an optimizer with its own randomness). Remove it and resume from the last checkpoint."
        )
