"""One private run of adapters in the top layer, and the choice of its learning rate.

A run is `private_step` without ledger and with keys made of its seed: the data are public. Runs of one seed share
initial weights, and batches where they share the sampler; noise is fresh in each.

Shape legend: B = records, T = tokens, D = width of the encoder.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from hf_dpopt.clipping import ClippingEngine, make_engine
from hf_dpopt.clipping.scaling import Diagonal, Scale
from hf_dpopt.clipping.squared_sum import SquaredSum, squared_sensitivity
from hf_dpopt.common.types import ClippedSums, Released
from hf_dpopt.noise import make_noise_source, momentum_workload
from hf_dpopt.noise.level import MechanismLevel
from hf_dpopt.optim import OPTIMIZERS
from hf_dpopt.plan.choose import make_plan
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.plan.plan import PrivacyPlan
from hf_dpopt.postprocess.low_pass import LowPassFilter
from hf_dpopt.preclip import Identity, OneQuery, Preclip
from recipes.paper.runs import KeptRuns, climb
from recipes.paper.top_layer.task import States, Task

DELTA, MOMENTUM, RANK = 1e-5, 0.9, 8
TARGETS = ["query", "value"]  # as PEFT has it for BERT
DECAY = 0.95  # of the average of squared releases
FIRST_DIVIDED = 10  # the step from which that average is used

Observer = Callable[[int, ClippedSums, Released], None]  # step; mean before the noise, released


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """All that a result depends on, the data aside.

    Args:
        optimizer: "dp_sgd", "dp_sgd_momentum", or a key of `OPTIMIZERS`.
        filter: "plain", or what `LowPassFilter.parse` reads. In Adam it takes the place of the first moment.
        mechanism: of the noise.
        scale: where D comes from: "none", "query", or "releases" (an average of squared releases).
        floor: of D, in root mean squares of a coordinate; the package's default.
        clip: far below the norm of most records: a smaller one only changes the rate of SGD.
    """

    epsilon: float
    rate: float
    seed: int
    optimizer: str = "dp_adamw"
    filter: str = "plain"
    mechanism: str = "gaussian"
    scale: str = "none"
    floor: float = 2.0
    clip: float = 0.1
    num_steps: int = 100
    batch: int = 256

    @property
    def preclip(self) -> Preclip:
        if self.scale != "query":
            return Identity()
        return OneQuery(query_noise=5.0 if self.epsilon > 4 else 10.0, floor=self.floor)

    def plan(self, num_examples: int) -> PrivacyPlan:
        return _plan(dataclasses.replace(self, rate=0.0, seed=0, filter="plain", floor=2.0), num_examples)

    def schedule(self) -> list[float]:
        """Learning rates relative to the first: down to a twentieth."""
        return np.linspace(1.0, 0.05, self.num_steps).tolist()


@functools.cache
def _plan(run: Run, num_examples: int) -> PrivacyPlan:
    config = PrivacyConfig(
        target_epsilon=run.epsilon, target_delta=DELTA, expected_batch_size=run.batch, clipping_norm=run.clip,
        noise_mechanism=run.mechanism, sampling="poisson" if run.mechanism == "gaussian" else "auto",
    )  # fmt: skip
    momentum = 0.0 if run.optimizer == "dp_sgd" else MOMENTUM
    workload = momentum_workload(run.num_steps, momentum, run.schedule())
    return make_plan(
        config, num_examples=num_examples, num_steps=run.num_steps, workload=workload, preclip=run.preclip
    )


class TopLayer(nn.Module):
    """The last layer of an encoder, with adapters or trained itself, the mean over tokens, a head for two classes."""

    def __init__(self, layer: nn.Module, seed: int, *, adapters: bool = True):
        super().__init__()
        torch.manual_seed(seed)
        self.layer = copy.deepcopy(layer)
        if adapters:
            config = LoraConfig(r=RANK, lora_alpha=RANK, lora_dropout=0.0, target_modules=TARGETS)
            inject_adapter_in_model(config, self)
        width = layer.get_submodule("output.dense").weight.size(0)  # type: ignore[operator]
        self.head = nn.Linear(width, 2)
        nn.init.normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0

    def forward(self, states_BTD: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
        lowest = torch.finfo(torch.float32).min
        hidden_BTD = self.layer(states_BTD, (~mask_BT).float()[:, None, None, :] * lowest)
        weights_BT = mask_BT / mask_BT.sum(1, keepdim=True)
        return self.head(torch.einsum("btd,bt->bd", hidden_BTD, weights_BT))


def add(engine: ClippingEngine, query: Any, records: States, rows: torch.Tensor) -> None:
    """Add the clipped gradients of some records to a sum."""
    for states_BTD, mask_BT, labels_B in records.batches(rows):

        def losses(states_BTD=states_BTD, mask_BT=mask_BT, labels_B=labels_B) -> torch.Tensor:  # type: ignore[no-untyped-def]
            return nn.functional.cross_entropy(engine.model(states_BTD, mask_BT), labels_B, reduction="none")

        engine.add_clipped_sum(query, losses, len(labels_B))


class Releases:
    """D of an average of squared releases, where no query was asked (after arXiv:2507.01129)."""

    def __init__(self, floor: float):
        self._floor, self._steps = floor, 0
        self._average: dict[str, torch.Tensor] = {}
        self.inverse: dict[str, torch.Tensor] = {}

    def receive(self, released: Released) -> None:
        """Learn from a release, in the coordinates after division by D."""
        self._steps += 1
        for name, value in released.items():
            undone = value / self.inverse[name] if name in self.inverse else value
            old = self._average.get(name, torch.zeros_like(value))
            self._average[name] = DECAY * old + (1 - DECAY) * undone.square()
        if self._steps >= FIRST_DIVIDED:
            moments = {name: value / (1 - DECAY**self._steps) for name, value in self._average.items()}
            count = sum(value.numel() for value in moments.values())
            rms = (sum(float(value.sum()) for value in moments.values()) / count) ** 0.5
            size, floor = (1 + self._floor) * rms, self._floor * rms
            self.inverse = {name: size / (value.sqrt() + floor) for name, value in moments.items()}

    def scale(self) -> Scale | None:
        return Scale({name: Diagonal(value) for name, value in self.inverse.items()}) if self.inverse else None


class Queries:
    """Sums of squares over all training records at the initial weights, each computed once. Secret, without noise."""

    def __init__(self) -> None:
        self._known: dict[Any, ClippedSums] = {}

    def result(self, run: Run, engine: ClippingEngine, records: States) -> ClippedSums:
        key = (run.seed, run.clip)
        if key not in self._known:
            query = SquaredSum(engine.parameters, by_rows=True)
            add(engine, query, records, torch.arange(len(records)))
            self._known[key] = query.result()
        return self._known[key]


def answer(run: Run, sums: ClippedSums, num_examples: int, fresh: np.random.Generator) -> Released:
    """The query's answer: mean squares of clipped gradients with the noise of the plan."""
    assert isinstance(run.preclip, OneQuery)
    stddev = run.preclip.query_noise * squared_sensitivity(run.clip, by_rows=True)
    generator = torch.Generator().manual_seed(int(fresh.integers(2**62)))

    def noised(value: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(value.shape, generator=generator, dtype=value.dtype)
        return ((value + stddev * noise) / num_examples).float()

    return Released({name: noised(value) for name, value in sums.items()})


def make_optimizer(run: Run, engine: ClippingEngine, level: Any, low_pass: Any) -> torch.optim.Optimizer:
    """Stock SGD, whose gradients are filtered before it, or an optimizer of the package, with the filter inside."""
    parameters = engine.parameters.values()
    if run.optimizer.startswith("dp_sgd"):
        return torch.optim.SGD(parameters, lr=run.rate, momentum=MOMENTUM if "momentum" in run.optimizer else 0.0)
    make: Any = OPTIMIZERS[run.optimizer]
    return make(parameters, lr=run.rate, noise=level, filter=low_pass)


def train(task: Task, queries: Queries, run: Run, observe: Observer | None = None) -> dict[str, Any]:
    """Accuracies of the last weights on tuning and test phrases and on the sentences."""
    began = time.process_time()
    plan = run.plan(len(task.train))
    model = TopLayer(task.layer, run.seed)
    engine = make_engine(model, plan.clipper)
    sampling_key = np.random.default_rng(run.seed).bytes(32)
    fresh = np.random.default_rng([run.seed, zlib.crc32(repr(run).encode())])
    noise = plan.mechanism.stream(make_noise_source("fast", fresh.bytes(32)), plan.sensitivity, first_step=1)
    done, stddev = 0, noise.draw_stddev / run.batch
    level = MechanismLevel(plan.mechanism, stddev=stddev, num_steps=run.num_steps, steps_done=lambda: done)
    preclip = run.preclip.start(engine.parameters, clipping_norm=run.clip, noise=level)
    if run.scale == "query":
        preclip.receive_opening(answer(run, queries.result(run, engine, task.train), len(task.train), fresh))
    releases = Releases(run.floor) if run.scale == "releases" else None
    low_pass = None if run.filter == "plain" else LowPassFilter.parse(run.filter, level)
    optimizer = make_optimizer(run, engine, level, low_pass)
    for step, size in enumerate(run.schedule(), start=1):
        (scale,) = preclip.scales()
        scale = releases.scale() if releases else scale
        query = engine.empty_sum(scale)
        rows = torch.tensor(plan.sampler.draw(sampling_key, step))
        if len(rows):
            add(engine, query, task.train, rows)
        sums = ClippedSums({name: value.float() for name, value in query.result().items()})
        before = ClippedSums({name: value / run.batch for name, value in sums.items()} if observe else {})
        noise.add_(sums, step)
        done = step
        released = preclip.receive(Released({name: value.div_(run.batch) for name, value in sums.items()}))
        if releases:
            releases.receive(released)
        if observe:
            observe(step, before, released)
        if low_pass is not None and run.optimizer.startswith("dp_sgd"):
            released = low_pass(released)
        for name, p in engine.parameters.items():
            p.grad = released[name]
        optimizer.param_groups[0]["lr"] = run.rate * size
        optimizer.step()
    parts = {"tuning": task.tuning, "test": task.test, "sentences": task.sentences}
    accuracies = {name: accuracy(model, records) for name, records in parts.items()}
    return {**accuracies, "noise": plan.draw_stddev, "seconds": round(time.process_time() - began, 1)}


@torch.no_grad()
def accuracy(model: nn.Module, records: States) -> float:
    """Share of records whose class is found."""
    right = 0
    for states_BTD, mask_BT, labels_B in records.batches(torch.arange(len(records))):
        right += int((model(states_BTD, mask_BT).argmax(1) == labels_B).sum())
    return right / len(records)


def tune(runs: KeptRuns, run: Run, start: float, seeds: Sequence[int]) -> dict[float, float]:
    """Mean accuracy on the tuning phrases, by learning rate: a climb by factors of 2 up to worse neighbours."""

    def score(rate: float) -> float:
        some = [dataclasses.replace(run, rate=rate, seed=seed) for seed in seeds]
        return float(np.mean([runs.result(one)["tuning"] for one in some]))

    return climb(score, start)


def kept_runs(path: Any, task: Task) -> KeptRuns:
    """Runs of the task in a JSONL file."""
    queries = Queries()
    return KeptRuns(path, lambda run: train(task, queries, run), _line)


def _line(run: Run, result: dict[str, Any]) -> str:
    return (
        f"{run.optimizer} {run.mechanism} {run.scale} {run.filter} floor {run.floor:g} epsilon {run.epsilon:g} rate "
        f"{run.rate:.3g} seed {run.seed}: {100 * result['tuning']:.1f} {100 * result['test']:.1f} "
        f"{100 * result['sentences']:.1f} in {result['seconds']:.0f} s"
    )
