"""The slow, obvious clipped sum: one record, one plain backward at a time."""

from __future__ import annotations

import torch


def rows(batch: dict, b: int) -> dict:
    return {k: v[b : b + 1] for k, v in batch.items()}


def own_token_mean_loss(model, row: dict) -> torch.Tensor | None:
    """transformers' own loss on one record: with one record, its batch mean is the own-token mean."""
    if (row["labels"] == -100).all():
        return None
    return model(**row).loss


def record_gradients(model, batch: dict, loss=own_token_mean_loss) -> list[dict[str, torch.Tensor]]:
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    params = [p for p in model.parameters() if p.requires_grad]
    out = []
    for b in range(next(iter(batch.values())).size(0)):
        value = loss(model, rows(batch, b))
        grads = [None] * len(params) if value is None else torch.autograd.grad(value, params, allow_unused=True)
        out.append({n: torch.zeros_like(p) if g is None else g for n, p, g in zip(names, params, grads, strict=True)})
    return out


def norm(grads: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.stack([g.double().square().sum() for g in grads.values()]).sum().sqrt()


def clipped_sum(model, batch: dict, clipping_norm: float, clipping: str = "flat", loss=own_token_mean_loss) -> dict:
    total: dict[str, torch.Tensor] = {}
    for grads in record_gradients(model, batch, loss):
        layers = sorted({n.rpartition(".")[0] for n in grads})
        for name, g in grads.items():
            if clipping == "flat":
                factor = min(1.0, clipping_norm / max(norm(grads).item(), 1e-300))
            elif clipping == "automatic":
                factor = clipping_norm / (norm(grads).item() + 0.01)
            else:
                mine = {n: x for n, x in grads.items() if n.rpartition(".")[0] == name.rpartition(".")[0]}
                factor = min(1.0, clipping_norm / len(layers) ** 0.5 / max(norm(mine).item(), 1e-300))
            if not torch.isfinite(norm(grads)):
                continue
            total[name] = total.get(name, torch.zeros_like(g)) + g * factor
    return total


def relative_error(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    assert got.keys() == want.keys()
    difference = norm({n: got[n].double() - want[n].double() for n in want})
    return (difference / norm(want)).item()
