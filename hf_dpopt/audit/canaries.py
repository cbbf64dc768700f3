"""Records whose gradients are known, and the model that has them: each moves one coordinate that no other one moves.

A canary's gradient is a Dirac that is much longer than the clip, so its clipped gradient is the clip itself in its own
coordinate. It is made of inputs and a loss alone; nothing of the code that is audited knows of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

ROWS, QUIET = "rows.weight", "quiet.weight"  # the parameters of the model
WIDTH = 4  # columns of the embedding: the first one holds the canaries, the others are nobody's
LENGTH = 1e3  # of a canary's gradient, in gradient units; any clip below it is met exactly


class Canaries(nn.Module):
    """A model with a row of an embedding for each canary, and a linear layer that no record moves.

    Args:
        num_canaries: m, one row of the embedding for each.
        num_quiet: entries of the linear layer, which get noise alone.
    """

    def __init__(self, num_canaries: int, num_quiet: int):
        super().__init__()
        self.rows = nn.Embedding(num_canaries, WIDTH)
        self.quiet = nn.Linear(8, max(1, num_quiet // 8), bias=False)
        nn.init.zeros_(self.rows.weight)
        nn.init.zeros_(self.quiet.weight)

    def forward(
        self, canary: torch.Tensor, length: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """Losses of the records, (B,), under `logits`: ``length`` times the first entry of the canary's row.

        Args:
            canary: its number, (B, 1), int64.
            length: norm of its gradient, (B,), float; 0 for one that is left out.
            labels: not used; the trainer takes a task to have them.
        """
        rows_BTD = self.rows(canary)
        zeros_BI = rows_BTD.new_zeros(len(canary), self.quiet.in_features)
        losses_B = length * rows_BTD[:, 0, 0] + self.quiet(zeros_BI).sum(dim=-1)
        return {"loss": losses_B.mean(), "logits": losses_B}


def losses(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """The loss of each record, (B,), as `DPTrainer` takes it."""
    values: torch.Tensor = outputs["logits"]
    return values


def records(included: Sequence[bool], *, per_user: int | None = None) -> list[dict[str, Any]]:
    """One record for each canary, with no gradient where it is left out; or `per_user` of them, with the user's id."""
    return [
        {"canary": [j], "length": LENGTH if is_in else 0.0, "labels": 0}
        | ({} if per_user is None else {"user": f"user {j}"})
        for j, is_in in enumerate(included)
        for _ in range(per_user or 1)
    ]


def collate(rows: Sequence[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Tensors of some records."""
    return {
        "canary": torch.tensor([row["canary"] for row in rows]),
        "length": torch.tensor([row["length"] for row in rows]),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }
