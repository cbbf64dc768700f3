"""The slow, obvious clipped sum: one record, one plain backward at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rows(batch: dict, b: int) -> dict:
    return {k: v[b : b + 1] for k, v in batch.items()}


def own_token_mean_loss(model, row: dict) -> torch.Tensor | None:
    """The loss of one record from its logits, in their own precision (transformers' losses round to float32)."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    labels = row["labels"]
    if (labels == -100).all():
        return None
    if base.config.is_encoder_decoder and labels.dim() > 1:
        logits = model(**row).logits
    else:
        logits = model(**{k: v for k, v in row.items() if k != "labels"}).logits
    if labels.dim() == 1:
        return F.cross_entropy(logits, labels)
    virtual = labels.new_full((logits.size(1) - labels.size(1),), -100)  # prompt tuning: no targets, but they predict
    logits, targets = logits[0], torch.cat([virtual, labels[0]])
    if base.__class__.__name__.endswith(("CausalLM", "LMHeadModel")):
        logits, targets = logits[:-1], targets[1:]
    return F.cross_entropy(logits, targets) if (targets != -100).any() else None


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


def unit_gradients(
    model, batch: dict, *, loss=own_token_mean_loss, divisors=None, sizes=(), weights_B=None
) -> list[dict]:
    """What is clipped: the gradient of each record, or the sum over the rows of each user; weighted, then divided.

    Args:
        divisors: D by parameter, in its shape.
        sizes: rows of each user; none if records are the unit.
        weights_B: factors of the losses.
    """
    rows_B = record_gradients(model, batch, loss)
    if weights_B is not None:
        rows_B = [{n: w * g for n, g in row.items()} for w, row in zip(weights_B.tolist(), rows_B, strict=True)]
    units, rest = [], iter(rows_B)
    for size in sizes or [1] * len(rows_B):
        mine = [next(rest) for _ in range(size)]
        units.append({n: sum(row[n] for row in mine) for n in mine[0]})
    return units if divisors is None else [{n: g.double() / divisors[n] for n, g in unit.items()} for unit in units]


def clipped_sum(
    model, batch: dict, clipping_norm: float, clipping: str = "flat", loss=own_token_mean_loss, **units
) -> dict:
    """The sum of the clipped units; `units` as `unit_gradients` takes them."""
    return sum_of_clipped(unit_gradients(model, batch, loss=loss, **units), clipping_norm, clipping)


def sum_of_clipped(units: list[dict], clipping_norm: float, clipping: str = "flat") -> dict:
    """Clip each and add them up; one that is not finite adds nothing."""
    total: dict[str, torch.Tensor] = {}
    for grads in units:
        whole = norm(grads)
        if not torch.isfinite(whole):
            continue
        layers: dict[str, dict[str, torch.Tensor]] = {}
        for name, g in grads.items():
            layers.setdefault(name.rpartition(".")[0], {})[name] = g
        for layer in layers.values():
            if clipping == "flat":
                factor = min(1.0, clipping_norm / max(whole.item(), 1e-300))
            elif clipping == "automatic":
                factor = clipping_norm / (whole.item() + 0.01)
            else:
                factor = min(1.0, clipping_norm / len(layers) ** 0.5 / max(norm(layer).item(), 1e-300))
            for name, g in layer.items():
                total[name] = total[name] + g * factor if name in total else g * factor
    return total


def relative_error(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    assert got.keys() == want.keys()
    difference = norm({n: got[n].double() - want[n].double() for n in want})
    return (difference / norm(want)).item()
