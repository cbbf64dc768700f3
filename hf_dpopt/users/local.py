"""Local training: a user contributes to a round how far SGD on their records moves the weights.

The server treats ``w - w_user``, clipped, summed and noised, as a gradient ("generalised gradient"): SGD with learning
rate 1 adds the mean of the users' moves to the weights. McMahan et al. (2017), arXiv:1602.05629; Reddi et al. (2020),
arXiv:2003.00295; as private rounds in McMahan et al. (2018), arXiv:1710.06963.

Shape legend: U = users trained at once, B = records of a local batch, T = tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from hf_dpopt.clipping import ClippingEngine, UnprivatizedStatistics
from hf_dpopt.clipping.clipped_sum import ClippedSum
from hf_dpopt.clipping.products import wide
from hf_dpopt.plan.local_training import LocalTraining
from hf_dpopt.randomness.cipher import KEY_BYTES
from hf_dpopt.randomness.framework import seed_torch
from hf_dpopt.records.collation import Collation, Collator, length_of
from hf_dpopt.records.losses import RecordLosses
from hf_dpopt.run.batches import LogicalBatch, WholeUnits
from hf_dpopt.users.batches import by_user

LARGEST_MOVE = 100.0  # of one coordinate; a user beyond it has diverged, and gives nothing


@dataclasses.dataclass(frozen=True)
class LocalUser(WholeUnits):
    """One user, trained alone.

    Args:
        batches: collated batches, one for each local step.
        training: settings of the local training.
        seed: the user's own seed of dropout, up to 256 bits; secret.
    """

    batches: Sequence[Mapping[str, Any]]
    training: LocalTraining
    seed: int

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
        with _restoring(parameters) as start, torch.enable_grad():
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
            return {name: wide(start[name] - p.detach()) for name, p in parameters.items()}


@dataclasses.dataclass(frozen=True)
class LocalUsers(WholeUnits):
    """Several users, trained side by side by `torch.func.vmap`, each on weights of their own.

    Args:
        batches: one batch of ``U B`` records for each local step, those of a user side by side.
        weights: one (U, B) for each local step: 1 for a record, 0 for a filler.
        training: settings of the local training.
        seed: seed of dropout, up to 256 bits; secret.
        one_by_one: makes the same users, to be trained one after the other.
    """

    batches: Sequence[Mapping[str, Any]]
    weights: Sequence[torch.Tensor]
    training: LocalTraining
    seed: int
    one_by_one: Callable[[], Sequence[LocalUser]] = tuple

    def add_to(self, sums: ClippedSum, engine: ClippingEngine, losses: RecordLosses) -> UnprivatizedStatistics:
        """Add the distance that every user moved the weights, each clipped."""
        num_users = len(self.weights[0])
        start = {name: p.detach() for name, p in engine.parameters.items()}
        weights = {name: p.expand(num_users, *p.shape).clone() for name, p in start.items()}
        of_users = torch.func.vmap(torch.func.grad(_Losses(losses).of), randomness="different")
        with torch.random.fork_rng(devices=_devices(engine)), _masks_are_always_made():
            seed_torch(self.seed.to_bytes(KEY_BYTES, "little"))
            for batch, weights_UB in zip(self.batches, self.weights, strict=True):
                split = {k: v.unflatten(0, weights_UB.shape) for k, v in batch.items() if isinstance(v, torch.Tensor)}
                grads = of_users(weights, split, weights_UB.to(next(iter(start.values())).device))
                # who has no records in this step stays where they are: what they would do there is not looked at
                trains_U = (weights_UB.sum(dim=1) > 0).to(next(iter(start.values())).device)
                with torch.no_grad():
                    for name, grad in grads.items():
                        moved = weights[name] - self.training.learning_rate * grad
                        weights[name] = torch.where(trains_U.view(-1, *[1] * (grad.dim() - 1)), moved, weights[name])
        moves = {name: wide(start[name].unsqueeze(0) - w.detach()) for name, w in weights.items()}
        return engine.add_clipped(sums, drop_diverged(moves))

    def apart(self) -> list[LocalUser]:
        """Split into one training per user."""
        return list(self.one_by_one())


class _Losses(nn.Module):
    """The mean loss of one user as a function of that user's weights."""

    def __init__(self, losses: RecordLosses):
        super().__init__()
        self.model, self._losses = losses.model, losses

    def forward(self, batch: Mapping[str, torch.Tensor], weights_B: torch.Tensor) -> torch.Tensor:
        losses_B = self._losses(batch)
        return (losses_B * weights_B).sum() / weights_B.sum().clamp(min=1)

    def of(
        self, weights: Mapping[str, torch.Tensor], batch: Mapping[str, torch.Tensor], weights_B: torch.Tensor
    ) -> torch.Tensor:
        named = {f"model.{name}": w for name, w in weights.items()}
        return torch.func.functional_call(self, named, (batch, weights_B))


def drop_diverged(moves: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Replace by NaN, which drops the user, the move of a user with a coordinate beyond `LARGEST_MOVE`; (U, ...) each.

    Zeros would do for the sum, but would count as a short move where the clipping norm follows a quantile.
    """
    largest_U = torch.stack([m.flatten(1).abs().amax(dim=1) for m in moves.values() if m.numel()]).amax(dim=0)
    is_fine_U = largest_U <= LARGEST_MOVE  # false for what is no number
    return {
        name: torch.where(is_fine_U.view(-1, *[1] * (m.dim() - 1)), m, torch.full_like(m, torch.nan))
        for name, m in moves.items()
    }


@contextlib.contextmanager
def _restoring(parameters: Mapping[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Restore the weights on leaving the context; yields copies of them."""
    start = {name: p.detach().clone() for name, p in parameters.items()}
    try:
        yield start
    finally:
        with torch.no_grad():
            for name, p in parameters.items():
                p.copy_(start[name])
                p.grad = None


@contextlib.contextmanager
def _masks_are_always_made() -> Iterator[None]:
    """Make transformers build every padding mask, as it does for a traced model.

    It leaves out masks that hide nothing, and under vmap there is no single answer to that. Where its module of masks
    was never imported, no model makes any.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    if masks is None:
        yield
        return
    before, masks.is_tracing = masks.is_tracing, lambda tensor=None: True
    try:
        yield
    finally:
        masks.is_tracing = before


def _devices(engine: ClippingEngine) -> list[torch.device]:
    device = next(iter(engine.parameters.values())).device
    return [device] if device.type == "cuda" else []


def side_by_side(
    users: Sequence[Sequence[Any]],
    training: LocalTraining,
    collation: Collation,
    seeds: Sequence[int],
) -> LocalUsers | None:
    """Prepare users of different sizes for joint training: short batches repeat one of their records with weight 0.

    That record is evaluated in any case, so the filler computes nothing that the user alone would not. None if a
    record cannot be used, or cannot lie beside the others: these users are trained one after the other.
    """
    rngs = [np.random.default_rng(seed) for seed in seeds]
    plans = [training.batches(len(records), rng) for records, rng in zip(users, rngs, strict=True)]
    num_steps, size = max(map(len, plans)), max(len(some) for plan in plans for some in plan)
    batches, weights = [], []
    for step in range(num_steps):
        chosen = [plan[step] if step < len(plan) else np.array([], int) for plan in plans]
        rows = [
            [*(records[i] for i in some), *[records[some[0] if len(some) else 0]] * (size - len(some))]
            for records, some in zip(users, chosen, strict=True)
        ]
        parts = collation.parts([r for mine in rows for r in mine])
        if len(parts) != 1 or parts[0].places != tuple(range(len(rows) * size)):
            return None
        batches.append(parts[0].batch)
        weights.append(torch.tensor([[1.0] * len(some) + [0.0] * (size - len(some)) for some in chosen]))

    def one_by_one() -> list[LocalUser]:
        return [alone(mine, training, collation, seed) for mine, seed in zip(users, seeds, strict=True)]

    return LocalUsers(batches, weights, training, seeds[0], one_by_one)


def alone(records: Sequence[Any], training: LocalTraining, collation: Collation, seed: int) -> LocalUser:
    """Prepare one user for training alone; a local step whose rows cannot lie in one batch becomes several."""
    steps = training.batches(len(records), np.random.default_rng(seed))
    batches = [part.batch for s in steps for part in collation.parts(_by_length([records[i] for i in s]))]
    return LocalUser(batches, training, seed)


def _by_length(records: list[Any]) -> list[Any]:
    return sorted(records, key=length_of, reverse=True)


def _some_at_once(users: list[Any], num: int) -> Iterator[list[Any]]:
    for first in range(0, len(users), num):
        yield users[first : first + num]


class LocalUserBatch(LogicalBatch):
    """The users of one round on this rank, each to be trained on their records.

    Args:
        records: records of all users, user after user.
        step: number of the round, >= 0.
        sizes: number of records of each user, >= 1.
        seeds: seed of each user, secret.
        training: settings of the local training.
        users_at_once: number of users trained side by side, >= 1; 1 trains them one after the other.
    """

    def __init__(
        self,
        records: list[Any],
        step: int,
        sizes: Sequence[int],
        seeds: Sequence[int],
        training: LocalTraining,
        users_at_once: int,
    ):
        super().__init__(records, step)
        self.sizes, self.seeds, self.training, self.users_at_once = sizes, seeds, training, users_at_once

    def physical(self, size: int, collate: Collation | Collator) -> Iterator[LocalUser | LocalUsers]:
        """Yield the users, large ones first; `size` has no influence, for a batch on the device is a local one."""
        collation = Collation.of(collate)
        users = sorted(zip(by_user(self.records, self.sizes), self.seeds, strict=True), key=lambda u: -len(u[0]))
        for some in _some_at_once(users, self.users_at_once):
            records, seeds = zip(*some, strict=True)
            together = side_by_side(records, self.training, collation, seeds) if len(some) > 1 else None
            if together is None:
                yield from (alone(mine, self.training, collation, seed) for mine, seed in some)
            else:
                yield together
