"""What denoising and orthogonalising do to a released matrix: how near it comes to the one without noise.

Along one run of DP-AdamW: the cosine between the mean gradient before the noise and what is made of the released one,
for single steps and for averages of steps (of both), and how many singular values stand above the edge of the noise;
means over the steps.

    python -m recipes.paper.matrix_optimizers.alignment --sst2 FOLDER --ag_news FOLDER --model ENCODER \\
        --output_dir docs/reproductions
"""

from __future__ import annotations

import collections
import json
import math
from typing import Any

import numpy as np
import torch

from hf_dpopt.common.types import ClippedSums, Released
from hf_dpopt.optim.muon import newton_schulz, without_bias
from hf_dpopt.postprocess.spectral import denoise
from recipes.paper.dp2.output import versions
from recipes.paper.matrix_optimizers import compare
from recipes.paper.matrix_optimizers.task import Task
from recipes.paper.matrix_optimizers.training import MOMENTUM, Run, train

SHOWN = {"topics": ("hidden.weight", "head.weight"), "phrases": ("hidden.weight", "head.weight")}
RATE = {"topics": 0.016, "phrases": 0.032}
MUON = {"iterations": 5, "degree": 2}


def cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    """Cosine of the angle between two tensors; 0 if one of them is nothing."""
    return float(torch.nn.functional.cosine_similarity(one.flatten(), other.flatten(), dim=0))


class Watch:
    """Averages of gradients with and without their noise, and what is made of them, step by step."""

    def __init__(self, names: tuple[str, ...]):
        self._names = names
        self._clean: dict[str, torch.Tensor] = {}
        self._noisy: dict[str, torch.Tensor] = {}
        self._variance = 0.0
        self.found: dict[str, dict[str, list[float]]] = {name: collections.defaultdict(list) for name in names}

    def __call__(self, step: int, before: ClippedSums, released: Released, variance: float) -> None:
        self._variance = MOMENTUM**2 * self._variance + variance
        for name in self._names:
            clean, noisy = before[name], released[name].clone()
            seen, m, n = self.found[name], min(clean.shape), max(clean.shape)
            singular = torch.linalg.svdvals(noisy)
            edge = math.sqrt(variance) * (math.sqrt(m) + math.sqrt(n))
            denoised = denoise(noisy, variance)
            seen["above the edge"].append(float((singular > edge).sum()))
            seen["released"].append(cosine(clean, noisy))
            seen["denoised"].append(cosine(clean, denoised))
            seen["signal to noise"].append(float(clean.norm()) / math.sqrt(variance * clean.numel()))  # there is noise
            for kept, value in ((self._clean, clean), (self._noisy, noisy)):
                kept[name] = MOMENTUM * kept.get(name, torch.zeros_like(value)) + value
            clean, noisy = self._clean[name], self._noisy[name]
            seen["average"].append(cosine(clean, noisy))
            seen["average, denoised"].append(cosine(clean, denoise(noisy, self._variance)))
            turned = newton_schulz(clean, **MUON)
            seen["turned"].append(cosine(turned, newton_schulz(noisy, **MUON)))
            seen["turned, less its bias"].append(cosine(turned, without_bias(noisy, self._variance, **MUON)))


def measure(tasks: dict[str, Task], task: str, epsilon: float, num_steps: int, batch: int) -> list[dict[str, Any]]:
    """Means over the steps, for every matrix that is shown."""
    watch = Watch(SHOWN[task])
    run = Run(task=task, method="DP-AdamW", epsilon=epsilon, rate=RATE[task], seed=0, num_steps=num_steps, batch=batch)
    train(tasks, run, watch)
    return [
        {"task": task, "epsilon": epsilon, "matrix": name, **{key: float(np.mean(x)) for key, x in seen.items()}}
        for name, seen in watch.found.items()
    ]


def main() -> None:
    given = compare.parser(__doc__).parse_args()
    tasks = compare.kept_tasks(given.sst2, given.ag_news, given.model, given.states)
    rows = [
        row
        for task in SHOWN
        for epsilon in sorted(given.epsilons)
        for row in measure(tasks, task, epsilon, *compare.STEPS_OF[task])
    ]
    about = {"command": "python -m recipes.paper.matrix_optimizers.alignment", **versions(), "date": compare.DATE}
    path = given.output_dir / "matrix_alignment.json"
    path.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()})


if __name__ == "__main__":
    main()
