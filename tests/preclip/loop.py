"""A private run in one's own loop: linear regression with two parameters, and what was added to its sums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_dpopt import PrivacyConfig, PrivateRun, make_plan, private_step
from hf_dpopt.clipping import make_engine
from hf_dpopt.clipping.measures import MEASURES
from hf_dpopt.preclip import Preclip

NUM_RECORDS, EXPECTED, IN, OUT = 40, 12, 6, 3
CLIP_SGD = 0.7


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """Features of sizes over three orders of magnitude: where preconditioners matter."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(NUM_RECORDS, IN, generator=generator) * 10.0 ** torch.linspace(-2, 1, IN)
    return x.double(), torch.randn(NUM_RECORDS, OUT, generator=generator).double()


def model() -> nn.Linear:
    torch.manual_seed(5)
    return nn.Linear(IN, OUT).double()  # sums are noised in float32, all the same


def gradient(weights: list[torch.Tensor], b: int) -> list[torch.Tensor]:
    """Of record b, by hand: loss |W x + c - y|^2 / 2."""
    x, y = (values[b].double() for values in data())
    error = weights[0] @ x + weights[1] - y
    return [torch.outer(error, x), error]


def plan(num_steps: int, preclip: Preclip | None = None, *, recorded: Any = None, **config: Any):
    values = dict(noise_multiplier=1.0, target_delta=1e-3, expected_batch_size=EXPECTED, clipping_norm=CLIP_SGD)
    return make_plan(
        PrivacyConfig(**(values | config)), num_examples=NUM_RECORDS, num_steps=num_steps, preclip=preclip,
        recorded=recorded,
    )  # fmt: skip


class Loop:
    """`step` runs one private step and updates the weights by SGD; `noise` and `batches` are what happened."""

    def __init__(self, folder: Path, made_plan, *, rate: float = 0.1, optimizer: Any = None, public: Any = None):
        self.model = model()
        self.engine = make_engine(self.model, made_plan.clipper)
        self.run = PrivateRun(made_plan, output_dir=folder / "out", private_state_dir=folder / "keys")
        self.preclip = self.run.start_preclip(self.engine, public=public)
        self.optimizer = (optimizer or (lambda p: torch.optim.SGD(p, lr=rate)))(self.model.parameters())
        self.x, self.y = data()
        self.batches: list[list[int]] = []
        self.noise: list[list[list[torch.Tensor]]] = []
        self.sums: list[dict[str, torch.Tensor]] = []
        self._add = self.run.noise.add_
        self.run.noise.add_ = self._recorded  # type: ignore[method-assign]

    def _recorded(self, sums: dict[str, torch.Tensor], step: int) -> None:
        before = {name: total.clone() for name, total in sums.items()}
        self._add(sums, step)
        names = [name for name in sums if "query" not in name]
        added = {name: sums[name].double() - before[name].double() for name in sums}
        queries = [[added[n] for n in names]]
        if len(sums) > len(names):
            queries.append([added[f"{n} (query 2)"] for n in names if n != MEASURES])
        self.noise.append(queries)
        self.sums.append(before)

    def losses(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return (self.model(batch["x"]) - batch["labels"]).square().sum(dim=1) / 2

    def step(self, t: int, *, after_noise: tuple = (), physical: int = 5) -> None:
        rows = self.run.draw(t)
        self.batches.append(rows.tolist())
        parts = [rows[i : i + physical] for i in range(0, len(rows), physical)]
        batches = [{"x": self.x[part], "labels": self.y[part]} for part in parts]
        private_step(self.engine, self.losses, batches, run=self.run, step=t, after_noise=after_noise)
        self.optimizer.step()

    def weights(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]
