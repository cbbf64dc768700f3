"""Local training: a user contributes to a round how far SGD on their records moves the weights.

The server treats ``w - w_user``, clipped, summed and noised, as a gradient ("generalised gradient"): SGD with learning
rate 1 adds the mean of the users' moves to the weights. McMahan et al. (2017), arXiv:1602.05629; Reddi et al. (2020),
arXiv:2003.00295; as private rounds in McMahan et al. (2018), arXiv:1710.06963.

Users are trained one after the other. Shape legend: U = users, B = records of a local batch, T = tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from hf_dpopt.clipping import ClippingEngine, UnprivatizedStatistics
from hf_dpopt.clipping.clipped_sum import ClippedSum
from hf_dpopt.clipping.contributions import flat_by_record
from hf_dpopt.clipping.products import wide
from hf_dpopt.common.types import SPOILT
from hf_dpopt.plan.local_training import LocalTraining
from hf_dpopt.randomness.framework import seed_torch
from hf_dpopt.randomness.source import KEY_BYTES
from hf_dpopt.records.collation import Collation, Collator, length_of
from hf_dpopt.records.losses import RecordLosses
from hf_dpopt.run.batches import LogicalBatch, WholeUnits
from hf_dpopt.users.user_batches import by_user

LARGEST_MOVE = 100.0  # of one coordinate; a user beyond it has diverged, and gives nothing


@dataclasses.dataclass(frozen=True)
class LocalMemory:
    """The weights before the local training of each user of a round, and how far it moved those of one, by name."""

    start: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    moved: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class LocalUser(WholeUnits):
    """One user, trained alone.

    Args:
        batches: collated batches, one for each local step.
        training: settings of the local training.
        seed: the user's own seed of dropout, up to 256 bits; secret.
        memory: that users of a round share, one after the other; empty before the first.
    """

    batches: Sequence[Mapping[str, Any]]
    training: LocalTraining
    seed: int
    memory: LocalMemory = dataclasses.field(default_factory=LocalMemory)

    def add_to(self, sums: ClippedSum, engine: ClippingEngine, losses: RecordLosses) -> UnprivatizedStatistics:
        """Add the distance that the user moved the weights, clipped."""
        with torch.random.fork_rng(devices=_devices(engine)):
            seed_torch(self.seed.to_bytes(KEY_BYTES, "little"))
            moved = self._train(engine, losses)
        return engine.add_clipped(sums, drop_diverged({name: delta.unsqueeze(0) for name, delta in moved.items()}))

    def apart(self) -> list[LocalUser]:
        """Split into one training per user: this one."""
        return [self]

    def _train(self, engine: ClippingEngine, losses: RecordLosses) -> dict[str, torch.Tensor]:
        parameters = engine.parameters
        with _restoring(engine.model, parameters, self.memory.start) as start, torch.enable_grad():
            for batch in self.batches:
                for p in parameters.values():
                    p.grad = None
                loss = losses(batch).mean()
                if loss.requires_grad:
                    loss.backward()
                with torch.no_grad():
                    for p in parameters.values():
                        if p.grad is not None:
                            p.sub_(p.grad, alpha=self.training.learning_rate)
                            p.grad = None
                torch.clear_autocast_cache()  # an ambient autocast keeps converted copies of the weights
            moved = self.memory.moved
            for name, p in parameters.items():
                moved[name] = torch.sub(start[name], p.detach(), out=moved.get(name))
            return {name: wide(delta) for name, delta in moved.items()}


def drop_diverged(moves: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Replace by NaN, which drops the user, the move of a user with a coordinate beyond `LARGEST_MOVE`; (U, ...) each.

    Zeros would do for the sum, but would count as a short move where the clipping norm follows a quantile.
    """
    ends = torch.stack([end for m in moves.values() if m.numel() for end in torch.aminmax(m)])
    if (ends.abs() <= LARGEST_MOVE).all():  # false for what is no number
        return dict(moves)
    largest_U = torch.stack([flat_by_record(m).abs().amax(dim=1) for m in moves.values() if m.numel()]).amax(dim=0)
    is_fine_U = largest_U <= LARGEST_MOVE
    return {
        name: torch.where(is_fine_U.view(-1, *[1] * (m.dim() - 1)), m, torch.full_like(m, torch.nan))
        for name, m in moves.items()
    }


@contextlib.contextmanager
def _restoring(
    model: nn.Module, parameters: Mapping[str, torch.Tensor], start: dict[str, torch.Tensor]
) -> Iterator[dict[str, torch.Tensor]]:
    """Restore the weights on leaving the context; yields copies of them: those in `start`, if a user left them there.

    Until all are restored, the model is one that is not saved: an interrupt may come while they are copied.
    """
    for name, p in parameters.items():
        if name not in start:  # the weights of a round change at its end only, and every user gives them back
            start[name] = p.detach().clone()
    mark = f"{next(iter(parameters), 'weights')} (local training)"
    vars(model).setdefault(SPOILT, mark)
    try:
        yield start
    finally:
        with torch.no_grad():
            for name, p in parameters.items():
                p.copy_(start[name])
                p.grad = None
        if vars(model)[SPOILT] == mark:  # else a forward spoilt the model in other ways
            delattr(model, SPOILT)


def _devices(engine: ClippingEngine) -> list[torch.device]:
    device = next(iter(engine.parameters.values())).device
    return [device] if device.type == "cuda" else []


def alone(
    records: Sequence[Any], training: LocalTraining, collation: Collation, seed: int, memory: LocalMemory
) -> LocalUser:
    """Prepare one user for training alone; a local step whose rows cannot lie in one batch becomes several."""
    steps = training.batches(len(records), np.random.default_rng(seed))
    of_steps = [sorted((records[i] for i in step), key=length_of, reverse=True) for step in steps]
    batches = [part.batch for rows in of_steps for part in collation.parts(rows)]
    return LocalUser(batches, training, seed, memory)


class LocalUserBatch(LogicalBatch):
    """The users of one round on this rank, each to be trained on their records.

    Args:
        records: records of all users, user after user.
        step: number of the round, >= 0.
        sizes: number of records of each user, >= 1.
        seeds: seed of each user, secret.
        training: settings of the local training.
    """

    def __init__(
        self,
        records: list[Any],
        step: int,
        sizes: Sequence[int],
        seeds: Sequence[int],
        training: LocalTraining,
    ):
        super().__init__(records, step)
        self.sizes, self.seeds, self.training = sizes, seeds, training

    def physical(self, size: int, collate: Collation | Collator, tokens: int | None = None) -> Iterator[LocalUser]:
        """Yield the users, large ones first; `size` and `tokens` have no influence: batches are local ones."""
        collation, memory = Collation.of(collate), LocalMemory()
        users = sorted(zip(by_user(self.records, self.sizes), self.seeds, strict=True), key=lambda u: -len(u[0]))
        for mine, seed in users:
            yield alone(mine, self.training, collation, seed, memory)
