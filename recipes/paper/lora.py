"""Improvements of private LoRA that papers promise, each against plain LoRA.

    python -m recipes.paper.lora --data glue-sst2 --public imdb --model all-MiniLM-L6-v2

10,000 phrases of SST-2; LoRA of rank 8 on all linear layers of the top layer of a BERT and of its pooler, a new head.
The layers below are frozen, so their outputs are computed once. A variant is one change:

* ``LoRA+``: the rate of B is 16 times that of A (arXiv:2402.12354).
* ``frozen A``: A stays as it was drawn (arXiv:2403.12313).
* ``orthonormal A``: its rows start orthonormal, as those of ``tangent``.
* ``tangent``: gradient, clip and noise in the tangent space of BA, so that they do not depend on its factors: what the
  abstract of arXiv:2606.00944 asks for. With orthonormal bases V and U of rows and columns, ``W V^T + U Q`` is trained
  at Q = 0, with U = 0 before the first step; each step ends at the nearest matrix of rank 8. Adam's second moments are
  means over the 8 coordinates of a basis, so no rotation of it changes them.
* ``histogram``: the clip is the median norm at the start (arXiv:2605.10272), of the noisy histogram of one more draw;
  it costs what a step costs.
* ``random public text``: first, without privacy, 3,000 of 12,000 sentences of film reviews with the labels of their
  reviews. ``chosen public text`` (after arXiv:2305.13865): the 3,000 that a private linear classifier finds most like
  the phrases. It is the noisy mean of whitened features in one more draw, and costs what a step costs.

Runs of one seed share draws, initial weights and the key of the noise.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import re
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

AGAINST = {
    "LoRA": None, "LoRA+": "LoRA", "frozen A": "LoRA", "orthonormal A": "LoRA", "tangent": "LoRA", "histogram": "LoRA",
    "random public text": "LoRA", "chosen public text": "random public text",
}  # fmt: skip
QUERIES = ("histogram", "chosen public text")  # these take one more draw
RANK, SCALE, START_RATE, TUNING_SEED = 8, 2.0, 0.006, 1000  # a rate of 0.006 is the advisor's
NUM_TRAIN, NUM_TEST, NUM_PUBLIC, NUM_CHOSEN, NUM_TOKENS = 10_000, 8_000, 12_000, 3_000, 4096
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
        return make_plan(config, num_examples=NUM_TRAIN, num_steps=self.num_steps + (self.variant in QUERIES))


class Adapted(nn.Module):
    """A frozen linear layer plus ``SCALE up(down(x))``; in the tangent space also ``SCALE columns(rows(x))``."""

    def __init__(self, base: nn.Linear, variant: str):
        super().__init__()
        self.base, sizes = base.requires_grad_(False), (base.in_features, base.out_features)
        self.down, self.up = nn.Linear(sizes[0], RANK, bias=False), nn.Linear(RANK, sizes[1], bias=False)
        self.down.requires_grad_(variant not in ("frozen A", "tangent"))
        nn.init.zeros_(self.up.weight)
        if variant in ("orthonormal A", "tangent"):
            self.down.weight.data = torch.linalg.qr(self.down.weight.data.T)[0].T.contiguous()
        self.rows = self.columns = None
        if variant == "tangent":
            self.rows, self.columns = nn.Linear(sizes[0], RANK, bias=False), nn.Linear(RANK, sizes[1], bias=False)
            self.columns.requires_grad_(False)
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
    """Outputs of the frozen layers for phrases to train on and to test on, sentences to test on, and public ones."""

    def __init__(self, data: Path, public: Path, model: Path):
        self._model = model
        tokenizer = AutoTokenizer.from_pretrained(model)
        phrases, labels = texts.sst2(data / "train.tsv")
        order = np.random.default_rng(39).permutation(len(phrases))[: NUM_TRAIN + NUM_TEST]
        sentences, theirs = texts.sst2(data / "dev.tsv")
        reviews, of_reviews = public_sentences(public / "train.jsonl.gz")
        all_texts = [*(phrases[i] for i in order), *sentences, *reviews]
        self._ids = [torch.tensor(ids) for ids in tokenizer(all_texts, truncation=True, max_length=66)["input_ids"]]
        self.labels = torch.tensor([*(labels[i] for i in order), *theirs, *of_reviews])
        self.states = list(self._ids)
        self.public = np.arange(len(self._ids) - NUM_PUBLIC, len(self._ids))
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


def public_sentences(path: Path) -> tuple[list[str], list[int]]:
    """Sentences of 3 to 40 words, in random order, with the labels of their reviews."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        reviews = [json.loads(line) for line in file]
    pairs = [(one, row["label"]) for row in reviews for one in re.split(r"(?<=[.!?])\s+|\n", row["text"])]
    pairs = [pair for pair in pairs if 3 <= len(pair[0].split()) <= 40]
    order = np.random.default_rng(39).permutation(len(pairs))[:NUM_PUBLIC]
    return [pairs[i][0] for i in order], [pairs[i][1] for i in order]


def train(run: Run, task: Task) -> dict[str, Any]:
    """Accuracy on held-out phrases, and on the sentences of the development set."""
    began = time.process_time()
    torch.manual_seed(run.seed)
    model = TopLayer(task.model(), run.variant)
    plan, keys = run.plan(), seeded_keys(run.seed)
    if run.variant == "histogram":
        plan = run.plan(median_norm(model, task, plan, keys[0], run.seed))
    if run.variant.endswith("public text"):
        query = (plan, keys[0], run.seed) if run.variant in QUERIES else None
        learn_public(model, task, task.public if query is None else most_alike(task, *query), run.seed)
    engine = make_engine(model, plan.clipper)
    sums = EngineSums(engine, partial(task.losses_in_parts, model))
    optimizer = make_optimizer(run, model)
    first = [group["lr"] for group in optimizer.param_groups]
    for step in descend(PrivateSteps(plan, sums, keys=keys), engine, optimizer, run.num_steps):
        for group, rate in zip(optimizer.param_groups, first, strict=True):
            group["lr"] = rate * [*falling(run.num_steps), 0.0][step]
    return {
        "accuracy": task.accuracy(model, NUM_TRAIN, NUM_TRAIN + NUM_TEST),
        "sentences": task.accuracy(model, NUM_TRAIN + NUM_TEST, len(task.labels) - NUM_PUBLIC),
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


def most_alike(task: Task, plan: PrivacyPlan, key: bytes, seed: int) -> np.ndarray:
    """Public rows in the order of a linear classifier: the noisy mean of a draw in whitened features of norm 1."""
    means = torch.stack([state_TD.mean(0) for state_TD in task.states])
    public = means[task.public]
    whiten = torch.linalg.inv(torch.linalg.cholesky(torch.cov(public.T) + 1e-4 * torch.eye(means.shape[1])))
    x = nn.functional.normalize((means - public.mean(0)) @ whiten.T)
    total = x[plan.sampler.draw(key, plan.num_steps)].sum(0).numpy()
    noise = np.random.default_rng([seed, 1]).normal(0, plan.noise_multiplier, len(total))
    return task.public[np.argsort(-x[task.public].numpy() @ (total + noise))]


def learn_public(model: TopLayer, task: Task, rows: np.ndarray, seed: int) -> None:
    """Two passes over the first `NUM_CHOSEN` rows, in batches of 64, without privacy."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for generator in (np.random.default_rng([seed, i]) for i in range(2)):
        for batch in np.array_split(generator.permutation(rows[:NUM_CHOSEN]), NUM_CHOSEN // 64):
            optimizer.zero_grad()
            task.losses(model, batch.tolist()).mean().backward()
            optimizer.step()


def compute(given: argparse.Namespace) -> dict[str, Any]:
    task = Task(given.data, given.public, given.model)
    runs = KeptRuns(given.output_dir / "lora.jsonl", lambda run: train(run, task))
    rows: dict[tuple[str | None, float], dict[str, Any]] = {}
    for epsilon in given.epsilon:
        for variant in given.variants:
            against = AGAINST[variant]
            run = Run(variant=variant, epsilon=epsilon, batch=given.batch, num_steps=given.num_steps)
            tried = runs.rates(run, START_RATE, (TUNING_SEED,), "accuracy")
            of_seeds = runs.of_seeds(dataclasses.replace(run, rate=best_of(tried)), range(given.num_seeds))
            row = {"variant": variant, "against": against, "epsilon": epsilon, "tried": labelled(tried)}
            row |= {name: [result[name] for result in of_seeds] for name in of_seeds[0] if name != "run"}
            for name in ("accuracy", "sentences") if against else ():
                mean, half = interval(percent(row[name]) - percent(rows[against, epsilon][name]))
                row[f"{name}_gain"] = {"mean": mean, "half_of_95_interval": half}
            rows[variant, epsilon] = row
    return {"rows": list(rows.values())}


main = experiment(
    "lora",
    compute,
    data=Folder("folder with train.tsv and dev.tsv of SST-2"),
    public=Folder("folder with train.jsonl.gz of IMDB"),
    model=Folder("BERT with pooler, as transformers saves it"),
    variants=list(AGAINST),
    epsilon=[8.0, 3.0],
    batch=1377,
    num_steps=24,
    num_seeds=5,
)

if __name__ == "__main__":
    main()
