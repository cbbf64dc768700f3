"""Gradients of public records at the current weights, by plain autograd."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from hf_dpopt.clipping.site import Site
from hf_dpopt.common import collectives
from hf_dpopt.common.checks import check_count
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.randomness.framework import secret_randomness
from hf_dpopt.randomness.source import derive_key

Gradients = dict[str, torch.Tensor]
BatchLosses = Callable[[Mapping[str, Any]], torch.Tensor]


class PublicGradients:
    """Gradients of public records with respect to the trainable parameters of a model, which is left as it was.

    Records come in shuffled epochs under a public seed; a draw never holds a record twice, so a rest of an epoch that
    is smaller than a draw is skipped. Dropout is off, `p.grad` is not touched, and a collator's random draws (masking)
    come from the seed too. With several processes each computes a share, and all return the same bits.

    Args:
        model: the model that is trained; its trainable parameters are determined now.
        losses: collated batch -> losses of its records, (B,); usually a `RecordLosses` of the model.
        records: the public records; indexable, with a length.
        collate: list of records -> batch; tensors are moved to the model's device.
        batch_size: number of records in a draw of `mean`, in [1, number of public records].
        seed: public seed of the order, >= 0.

    Raises:
        DPConfigError: for a draw larger than the public dataset or counts below 1; later, for a gradient that is not
            finite.
    """

    def __init__(
        self,
        model: nn.Module,
        losses: BatchLosses,
        records: Sequence[Any],
        collate: Callable[[list[Any]], Mapping[str, Any]],
        *,
        batch_size: int,
        seed: int = 0,
    ):
        check_count("batch_size", batch_size)
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise DPConfigError(f"seed={seed!r} orders nothing. Use an integer >= 0; it is public.")
        self.model, self.losses, self.records, self.collate = model, losses, records, collate
        self.batch_size, self.seed = batch_size, seed
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._key = derive_key(bytes(32), "public gradients", str(seed))
        self._position = 0  # records served or skipped since the first epoch began
        self.check_draw(batch_size)

    def check_draw(self, num_records: int) -> None:
        """Refuse a draw of more records than there are."""
        check_count("num_records", num_records)
        if num_records > len(self.records):
            raise DPConfigError(
                f"A draw of {num_records} public records was asked for, and there are {len(self.records)}. Use a "
                "smaller batch_size or num_public, or more public records: a record twice in a draw adds nothing."
            )

    def mean(self) -> Gradients:
        """Compute the mean gradient of the next `batch_size` records; name -> float32 or wider, in its shape."""
        total = {name: _zeros(p, p.shape) for name, p in self._parameters.items()}
        with self._next(self.batch_size) as rows:
            if rows:
                for name, grad in self._gradient([i for _, i in rows]).items():
                    total[name].add_(grad)
        collectives.sum_over_ranks(total)
        torch._foreach_div_(list(total.values()), self.batch_size)
        check_finite(total)
        return total

    def per_record(self, num_records: int) -> Gradients:
        """Compute gradients of the next m records, by m backwards; name -> (m, *shape): m copies of the parameters."""
        self.check_draw(num_records)
        grads = {name: _zeros(p, (num_records, *p.shape)) for name, p in self._parameters.items()}
        with self._next(num_records) as rows:
            for row, i in rows:
                for name, grad in self._gradient([i]).items():
                    grads[name][row] = grad
        collectives.sum_over_ranks(grads)  # of every row, one process has it and the others zeros
        check_finite(grads)
        return grads

    @contextlib.contextmanager
    def _next(self, num: int) -> Iterator[list[tuple[int, int]]]:
        """(place in the draw, index) of this process's share of the next draw; generators seeded, modules in eval."""
        epoch, offset = divmod(self._position, len(self.records))
        if offset + num > len(self.records):
            epoch, offset = epoch + 1, 0
        self._position = epoch * len(self.records) + offset + num
        order = np.random.Generator(np.random.Philox(key=[self.seed, epoch])).permutation(len(self.records))
        drawn = list(enumerate(order[offset : offset + num].tolist()))
        modules = list(self.model.modules())
        assert not any(isinstance(v, Site) for m in modules for v in vars(m).values()), "inside a private backward"
        modes = [m.training for m in modules]
        self.model.eval()
        try:
            with secret_randomness(self._key, self._position, collectives.rank(), self.device), torch.enable_grad():
                yield drawn[collectives.rank() :: collectives.world_size()]
        finally:
            for module, mode in zip(modules, modes, strict=True):
                module.training = mode

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(iter(self._parameters.values())).device

    def _gradient(self, indices: list[int]) -> Gradients:
        """Gradient of the summed losses of some records; unused parameters are left out."""
        batch = self.collate([self.records[i] for i in indices])
        batch = {k: v.to(self.device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
        losses_B = self.losses(batch)
        if losses_B.shape != (len(indices),):
            raise DPConfigError(
                f"The loss of {len(indices)} public records has shape {tuple(losses_B.shape)}. Return one value per "
                f"record, ({len(indices)},), as RecordLosses does."
            )
        grads = torch.autograd.grad(losses_B.sum(), list(self._parameters.values()), allow_unused=True)
        return {name: g for name, g in zip(self._parameters, grads, strict=True) if g is not None}

    def parameters(self) -> dict[str, Any]:
        """Settings of the public data, for the report."""
        return {"num_public_records": len(self.records), "batch_size": self.batch_size, "seed": self.seed}

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position, "seed": self.seed, "num_records": len(self.records)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state.

        Raises:
            DPConfigError: if the state is that of other records or another seed.
        """
        mine = {"seed": self.seed, "num_records": len(self.records)}
        if any(state[k] != v for k, v in mine.items()):
            raise DPConfigError(
                f"The public data of the checkpoint ({ {k: state[k] for k in mine} }) are not those of this run "
                f"({mine}). Resume with the same public records and seed."
            )
        self._position = state["position"]


def check_finite(grads: Gradients) -> None:
    """Refuse public gradients that are not finite: they would spoil a run whose private records were paid for."""
    bad = [name for name, g in grads.items() if not g.isfinite().all()]
    if bad:
        raise DPConfigError(
            f"The public gradients of {len(bad)} parameters ({bad[0]}, ...) are not finite. Look for public records "
            "without targets or with broken features, and lower the learning rate if the model has diverged."
        )


def _zeros(p: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return torch.zeros(tuple(shape), dtype=torch.promote_types(p.dtype, torch.float32), device=p.device)
