"""Improvements of private LoRA that papers promise, each against plain LoRA.

    python -m recipes.paper.lora --data glue-sst2 --model all-MiniLM-L6-v2

10,000 phrases of SST-2; LoRA of rank 8 on all linear layers of the top layer of a BERT and of its pooler, a new head.
The layers below are frozen, so their outputs are computed once. A variant is one change:

* ``LoRA+``: the rate of B is 16 times that of A (arXiv:2402.12354).
* ``frozen A``: A stays as it was drawn (arXiv:2403.12313).
* ``tangent``: gradient, clip and noise in the tangent space of BA, so that they do not depend on its factors: what the
  abstract of arXiv:2606.00944 asks for. With orthonormal bases V and U of rows and columns, ``W V^T + U Q`` is trained
  at Q = 0, with U = 0 before the first step; each step ends at the nearest matrix of rank 8. Adam's second moments are
  means over the 8 coordinates of a basis, so no rotation of it changes them.
* ``histogram``: the clip is the median norm at the start (arXiv:2605.10272), of the noisy histogram of one more draw;
  it costs what a step costs.

Runs of one seed share draws, initial weights (of ``tangent`` those of the head alone) and the key of the noise.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hf_dpopt.clipping import make_engine
from hf_dpopt.clipping.thresholds import FlatClipping
from hf_dpopt.plan.choose import make_plan
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.plan.plan import PrivacyPlan
from recipes.paper import texts
from recipes.paper.runs import Folder, KeptRuns, best_of, experiment, interval, labelled, percent
from recipes.paper.steps import EngineSums, Part, PrivateSteps, descend, falling, seeded_keys

VARIANTS = ("LoRA", "LoRA+", "frozen A", "tangent", "histogram")
RANK, SCALE, START_RATE, TUNING_SEED = 8, 2.0, 0.006, 1000  # the advisor has 0.0053
NUM_TRAIN, NUM_TEST, NUM_TOKENS = 10_000, 8_000, 4096
EDGES = np.geomspace(0.01, 1000, 101)  # of the histogram, in gradient units


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """All that a result depends on, the data aside."""

    variant: str
    epsilon: float
    batch: int
    num_steps: int
    rate: float = 0.0
    seed: int = 0

    def plan(self, clipping_norm: float = 1.0) -> PrivacyPlan:
        config = PrivacyConfig(
            target_epsilon=self.epsilon, target_delta=1e-5, expected_batch_size=self.batch, clipping_norm=clipping_norm
        )
        return make_plan(config, num_examples=NUM_TRAIN, num_steps=self.num_steps + (self.variant == "histogram"))


class Adapted(nn.Module):
    """A frozen linear layer plus ``SCALE up(down(x))``; in the tangent space also ``SCALE columns(rows(x))``."""

    def __init__(self, base: nn.Linear, variant: str):
        super().__init__()
        self.base, sizes = base.requires_grad_(False), (base.in_features, base.out_features)
        self.down, self.up = nn.Linear(sizes[0], RANK, bias=False), nn.Linear(RANK, sizes[1], bias=False)
        self.down.requires_grad_(variant not in ("frozen A", "tangent"))
        nn.init.zeros_(self.up.weight)
        self.rows = self.columns = None
        if variant == "tangent":
            self.rows, self.columns = nn.Linear(sizes[0], RANK, bias=False), nn.Linear(RANK, sizes[1], bias=False)
            self.columns.requires_grad_(False)
            self.down.weight.data = torch.linalg.qr(self.down.weight.data.T)[0].T.contiguous()
            nn.init.zeros_(self.rows.weight)
            nn.init.zeros_(self.columns.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added = self.up(self.down(x))
        if self.rows is not None:
            added = added + self.columns(self.rows(x))
        return self.base(x) + SCALE * added

    @torch.no_grad()
    def to_rank(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Go to the nearest matrix of rank r, and to its bases; returns products of the bases before and after."""
        v, u = self.down.weight.T.clone(), self.columns.weight.clone()
        left, right = (torch.linalg.qr(torch.cat(x, 1)) for x in ((self.up.weight, u), (v, self.rows.weight.T)))
        a, s, b = torch.linalg.svd(left[1] @ right[1].T)
        self.columns.weight.copy_(left[0] @ a[:, :RANK])
        self.up.weight.copy_(self.columns.weight * s[:RANK])
        self.down.weight.copy_((right[0] @ b[:RANK].T).T)
        self.rows.weight.zero_()
        return v.T @ self.down.weight.T, u.T @ self.columns.weight


class TopLayer(nn.Module):
    """The last layer of a BERT, its pooler and head, which read the first token alone; all but the head adapted."""

    def __init__(self, model: nn.Module, variant: str):
        super().__init__()
        self.layer, self.pooler, self.head = model.bert.encoder.layer[-1], model.bert.pooler, model.classifier
        self.requires_grad_(False)
        self.head.requires_grad_(True)
        self.adapted = []
        for name, one in [*self.named_modules()]:
            if isinstance(one, nn.Linear) and one is not self.head:
                parent, _, own = name.rpartition(".")
                setattr(self.get_submodule(parent), own, Adapted(one, variant))
                self.adapted.append(self.get_submodule(name))

    def forward(self, x_BTD: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
        inner, first = self.layer.attention.self, x_BTD[:, :1]
        q, k, v = (
            one(x).unflatten(-1, (inner.num_attention_heads, -1)).transpose(1, 2)
            for one, x in ((inner.query, first), (inner.key, x_BTD), (inner.value, x_BTD))
        )
        seen = scaled_dot_product_attention(q, k, v, mask_BT[:, None, None]).transpose(1, 2).flatten(2)
        seen = self.layer.attention.output(seen, first)
        return self.head(self.pooler(self.layer.output(self.layer.intermediate(seen), seen))).float()


class TangentAdam(torch.optim.Adam):
    """Adam whose moments follow the bases."""

    def __init__(self, adapted: list[Adapted], head: list[nn.Parameter], rate: float):
        super().__init__(head, lr=rate)
        self._adapted, self._num_steps = adapted, 0
        self._moments = {p: (torch.zeros_like(p), torch.zeros(())) for one in adapted for p in _tangents(one)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        self._num_steps += 1
        t, rate = self._num_steps, self.param_groups[0]["lr"]
        for one in self._adapted:
            for p, dim in zip(_tangents(one), (1, 0), strict=True):
                mean, square = self._moments[p]
                mean = mean.lerp(p.grad, 0.1)
                square = square.lerp(p.grad.square().mean(dim, keepdim=True), 0.001)
                p.sub_(rate * mean / (1 - 0.9**t) / ((square / (1 - 0.999**t)).sqrt() + 1e-8))
                self._moments[p] = mean, square
            (w, q), (turn_v, turn_u) = _tangents(one), one.to_rank()
            self._moments[w] = self._moments[w][0] @ turn_v, self._moments[w][1]
            self._moments[q] = turn_u.T @ self._moments[q][0], self._moments[q][1]


def _tangents(one: Adapted) -> tuple[nn.Parameter, nn.Parameter]:
    """W and Q."""
    return one.up.weight, one.rows.weight


class Task:
    """Outputs of the frozen layers for phrases to train on and to test on, and sentences to test on."""

    def __init__(self, data: Path, model: Path):
        self._model = model
        tokenizer = AutoTokenizer.from_pretrained(model)
        phrases, labels = texts.sst2(data / "train.tsv")
        order = np.random.default_rng(39).permutation(len(phrases))[: NUM_TRAIN + NUM_TEST]
        sentences, theirs = texts.sst2(data / "dev.tsv")
        all_texts = [*(phrases[i] for i in order), *sentences]
        self._ids = [torch.tensor(ids) for ids in tokenizer(all_texts, truncation=True, max_length=66)["input_ids"]]
        self.labels = torch.tensor([*(labels[i] for i in order), *theirs])
        self.states = list(self._ids)
        below = self.model().bert
        below.encoder.layer = below.encoder.layer[:-1]
        for rows in self.parts(np.arange(len(self._ids))):
            ids, mask = self._batch(self._ids, rows)
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                states = below(input_ids=ids, attention_mask=mask.long()).last_hidden_state.float()
            for row, state_TD in zip(rows, states, strict=True):
                self.states[row] = state_TD[: len(self._ids[row])].clone()

    def model(self) -> nn.Module:
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return AutoModelForSequenceClassification.from_pretrained(self._model, num_labels=2, **dropout)

    def parts(self, rows: np.ndarray) -> Iterator[list[int]]:
        """Rows by their lengths, in parts of about `NUM_TOKENS` tokens."""
        rest = sorted(rows.tolist(), key=lambda row: len(self._ids[row]))
        while rest:
            num = max(1, NUM_TOKENS // len(self._ids[rest[min(len(rest), 512) - 1]]))
            yield rest[:num]
            rest = rest[num:]

    @staticmethod
    def _batch(tensors: list[torch.Tensor], rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        some = [tensors[row] for row in rows]
        padded = nn.utils.rnn.pad_sequence(some, batch_first=True)
        return padded, torch.arange(padded.shape[1]) < torch.tensor([[len(one)] for one in some])

    def logits(self, model: nn.Module, rows: list[int]) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(*self._batch(self.states, rows))

    def losses(self, model: nn.Module, rows: list[int]) -> torch.Tensor:
        return cross_entropy(self.logits(model, rows), self.labels[rows], reduction="none")

    def losses_in_parts(self, model: nn.Module, rows: torch.Tensor) -> Iterator[Part]:
        for part in self.parts(rows):
            yield partial(self.losses, model, part), len(part)

    @torch.no_grad()
    def accuracy(self, model: nn.Module, start: int, end: int) -> float:
        parts = self.parts(np.arange(start, end))
        return sum(int((self.logits(model, rows).argmax(1) == self.labels[rows]).sum()) for rows in parts) / (
            end - start
        )


def train(run: Run, task: Task) -> dict[str, Any]:
    """Accuracy on held-out phrases, and on the sentences of the development set."""
    began = time.process_time()
    torch.manual_seed(run.seed)
    model = TopLayer(task.model(), run.variant)
    plan, keys = run.plan(), seeded_keys(run.seed)
    if run.variant == "histogram":
        plan = run.plan(median_norm(model, task, plan, keys[0], run.seed))
    engine = make_engine(model, plan.clipper)
    sums = EngineSums(engine, partial(task.losses_in_parts, model))
    optimizer = make_optimizer(run, model)
    first = [group["lr"] for group in optimizer.param_groups]
    for step in descend(PrivateSteps(plan, sums, keys=keys), engine, optimizer, run.num_steps):
        for group, rate in zip(optimizer.param_groups, first, strict=True):
            group["lr"] = rate * [*falling(run.num_steps), 0.0][step]
    return {
        "accuracy": task.accuracy(model, NUM_TRAIN, NUM_TRAIN + NUM_TEST),
        "sentences": task.accuracy(model, NUM_TRAIN + NUM_TEST, len(task.labels)),
        "clipping_norm": plan.config.clipping_norm,
        "clipped": sums.seen.num_clipped / sums.seen.num_records,
        "noise_multiplier": plan.noise_multiplier,
        "seconds": round(time.process_time() - began, 1),
    }


def make_optimizer(run: Run, model: TopLayer) -> torch.optim.Optimizer:
    head = list(model.head.parameters())
    if run.variant == "tangent":
        return TangentAdam(model.adapted, head, run.rate)
    up, down = ([getattr(one, side).weight for one in model.adapted] for side in ("up", "down"))
    ratio = 4.0 if run.variant == "LoRA+" else 1.0
    groups = [(head, 1.0), (up, ratio), *([] if run.variant == "frozen A" else [(down, 1 / ratio)])]
    return torch.optim.Adam([{"params": some, "lr": run.rate * by} for some, by in groups])


def median_norm(model: nn.Module, task: Task, plan: PrivacyPlan, key: bytes, seed: int) -> float:
    """Median gradient norm of a draw, from counts with the noise of a step: one record moves one count by 1."""
    norms: list[torch.Tensor] = []

    class Watched(FlatClipping):
        def factors(self, squared_norms: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            norms.append(squared_norms[""].sqrt())
            return super().factors(squared_norms)

    watching = EngineSums(make_engine(model, Watched(clipping_norm=1.0)), partial(task.losses_in_parts, model))
    watching(plan.sampler.draw(key, plan.num_steps), (None,))
    counts = np.histogram(torch.cat(norms).numpy().clip(EDGES[0], EDGES[-1]), EDGES)[0]
    noisy = counts + np.random.default_rng([seed, 1]).normal(0, plan.noise_multiplier, len(counts))
    return float(EDGES[1:][np.argmax(noisy.cumsum() >= noisy.sum() / 2)])


def compute(given: argparse.Namespace) -> dict[str, Any]:
    task = Task(given.data, given.model)
    runs = KeptRuns(given.output_dir / "lora.jsonl", lambda run: train(run, task))
    rows: list[dict[str, Any]] = []
    for variant in VARIANTS:
        run = Run(variant=variant, epsilon=given.epsilon, batch=given.batch, num_steps=given.num_steps)
        tried = runs.rates(run, START_RATE, (TUNING_SEED,), "accuracy")
        of_seeds = runs.of_seeds(dataclasses.replace(run, rate=best_of(tried)), range(given.num_seeds))
        row = {"variant": variant, "epsilon": given.epsilon, "tried": labelled(tried)}
        row |= {name: [result[name] for result in of_seeds] for name in of_seeds[0] if name != "run"}
        for name in ("accuracy", "sentences") if rows else ():
            mean, half = interval(percent(row[name]) - percent(rows[0][name]))
            row[f"{name}_gain"] = {"mean": mean, "half_of_95_interval": half}
        rows.append(row)
    return {"rows": rows}


main = experiment(
    "lora",
    compute,
    data=Folder("folder with train.tsv and dev.tsv of SST-2"),
    model=Folder("BERT with pooler, as transformers saves it"),
    epsilon=8.0,
    batch=1377,
    num_steps=24,
    num_seeds=5,
)

if __name__ == "__main__":
    main()
