"""Distances of two runs of the same cells: relative, of gradients and weights; bytes per rank.

python -m tests.sharded.compare ONE TWO
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch


def distance(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> float:
    """Largest difference of a tensor over its largest entry; infinite for other names or shapes."""
    if {n: t.shape for n, t in one.items()} != {n: t.shape for n, t in two.items()}:
        return float("inf")
    return max(
        (one[n].double() - two[n].double()).abs().max().item() / max(one[n].double().abs().max().item(), 1e-12)
        for n in one
    )


def compare(one: dict[str, Any], two: dict[str, Any]) -> tuple[float, float]:
    """Distances of the gradients of the first step, and of the weights at the end."""
    return distance(one["gradients"][0], two["gradients"][0]), distance(one["weights"], two["weights"])


def main(one: Path, two: Path) -> None:
    for path in sorted(two.glob("*.pt")):
        a, b = torch.load(one / path.name), torch.load(path)
        if "error" in a or "error" in b:
            print(f"{path.stem:45} {a.get('error', 'runs')[:60]} | {b.get('error', 'runs')[:160]}")
            continue
        gradients, weights = compare(a, b)
        shares = {part: f"{b['parts'][part] / a['parts'][part]:.2f}" for part in a["parts"] if a["parts"][part]}
        print(f"{path.stem:45} {gradients:.1e} {weights:.1e} {shares}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
