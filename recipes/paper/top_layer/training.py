"""One private run of adapters in the top layer, and the choice of its learning rate.

A run is `private_step` without ledger and with keys made of its seed: the data are public. Runs of one seed share
initial weights, and batches where they share the sampler; noise is fresh in each.

Shape legend: B = records, T = tokens, D = width of the encoder.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from hf_dpopt.clipping import ClippingEngine, make_engine
from hf_dpopt.clipping.squared_sum import SquaredSum, squared_sensitivity
from hf_dpopt.common.types import ClippedSums, Released
from hf_dpopt.noise import momentum_workload
from hf_dpopt.noise.level import MechanismLevel
from hf_dpopt.optim import OPTIMIZERS
from hf_dpopt.plan.choose import make_plan
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.plan.plan import PrivacyPlan
from hf_dpopt.postprocess.low_pass import LowPassFilter
from hf_dpopt.preclip import Identity, OneQuery, Preclip
from recipes.paper.runs import Folder, KeptRuns, best_of, labelled
from recipes.paper.steps import EngineSums, FromReleases, Part, PrivateSteps, descend, falling, query_noise
from recipes.paper.top_layer.task import States, Task

DELTA, MOMENTUM, RANK = 1e-5, 0.9, 8
TARGETS = ["query", "value"]  # as PEFT has it for BERT
TUNING_SEEDS = (1000,)

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
        return OneQuery(query_noise=query_noise(self.epsilon), floor=self.floor)

    def plan(self, num_examples: int) -> PrivacyPlan:
        return _plan(dataclasses.replace(self, rate=0.0, seed=0, filter="plain", floor=2.0), num_examples)


@functools.cache
def _plan(run: Run, num_examples: int) -> PrivacyPlan:
    config = PrivacyConfig(
        target_epsilon=run.epsilon, target_delta=DELTA, expected_batch_size=run.batch, clipping_norm=run.clip,
        noise_mechanism=run.mechanism, sampling="poisson" if run.mechanism == "gaussian" else "auto",
    )  # fmt: skip
    momentum = 0.0 if run.optimizer == "dp_sgd" else MOMENTUM
    workload = momentum_workload(run.num_steps, momentum, falling(run.num_steps))
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


def parts(model: nn.Module, records: States, rows: torch.Tensor) -> Iterator[Part]:
    """Some records in physical batches."""
    for states_BTD, mask_BT, labels_B in records.batches(rows):

        def losses(states_BTD=states_BTD, mask_BT=mask_BT, labels_B=labels_B) -> torch.Tensor:  # type: ignore[no-untyped-def]
            return nn.functional.cross_entropy(model(states_BTD, mask_BT), labels_B, reduction="none")

        yield losses, len(labels_B)


def squared_sums(engine: ClippingEngine, records: States, rows: torch.Tensor, *, by_rows: bool = True) -> ClippedSums:
    """Sums of the squares of clipped gradients. Secret, without noise."""
    query = SquaredSum(engine.parameters, by_rows=by_rows)
    for losses, num in parts(engine.model, records, rows):
        engine.add_clipped_sum(query, losses, num)
    return query.result()


class Queries:
    """Sums of squares over all training records at the initial weights, each computed once. Secret, without noise."""

    def __init__(self) -> None:
        self._known: dict[Any, ClippedSums] = {}

    def result(self, run: Run, engine: ClippingEngine, records: States) -> ClippedSums:
        key = (run.seed, run.clip)
        if key not in self._known:
            self._known[key] = squared_sums(engine, records, torch.arange(len(records)))
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
    fresh = np.random.default_rng([run.seed, zlib.crc32(repr(run).encode())])
    keys = np.random.default_rng(run.seed).bytes(32), fresh.bytes(32)  # the same batches for the same sampler

    def start(level: MechanismLevel) -> Any:
        if run.scale == "releases":
            return FromReleases(run.floor)
        made = run.preclip.start(engine.parameters, clipping_norm=run.clip, noise=level)
        if run.scale == "query":
            made.receive_opening(answer(run, queries.result(run, engine, task.train), len(task.train), fresh))
        return made

    sums = EngineSums(engine, lambda rows: parts(model, task.train, rows))
    steps = PrivateSteps(plan, sums, keys=keys, start=start)
    low_pass = None if run.filter == "plain" else LowPassFilter.parse(run.filter, steps.level)
    optimizer = make_optimizer(run, engine, steps.level, low_pass)
    chain = [low_pass] if low_pass is not None and run.optimizer.startswith("dp_sgd") else []
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: [*falling(run.num_steps), 0.0][done])
    for step in descend(steps, engine, optimizer, run.num_steps, chain):
        if observe:
            observe(step, steps.before, steps.released)
        rates.step()
    held_out = {"tuning": task.tuning, "test": task.test, "sentences": task.sentences}
    accuracies = {name: accuracy(model, records) for name, records in held_out.items()}
    return {**accuracies, "noise": plan.draw_stddev, "seconds": round(time.process_time() - began, 1)}


@torch.no_grad()
def accuracy(model: nn.Module, records: States) -> float:
    """Share of records whose class is found."""
    right = 0
    for states_BTD, mask_BT, labels_B in records.batches(torch.arange(len(records))):
        right += int((model(states_BTD, mask_BT).argmax(1) == labels_B).sum())
    return right / len(records)


def kept_runs(given: argparse.Namespace, task: Task) -> KeptRuns:
    """Runs of the task in a JSONL file."""
    queries = Queries()
    return KeptRuns(given.output_dir / "top_layer.jsonl", lambda run: train(task, queries, run))


def cell(runs: KeptRuns, run: Run, start: float, num_seeds: int) -> dict[str, Any]:
    """Accuracies at the best learning rate of a climb that begins at `start`, in %."""
    tried = runs.rates(run, start, TUNING_SEEDS, "tuning")
    rate = best_of(tried)
    found = runs.of_seeds(dataclasses.replace(run, rate=rate), range(num_seeds))
    accuracies = {name: [100 * one[name] for one in found] for name in ("test", "sentences", "tuning")}
    return {"epsilon": run.epsilon, "rate": rate, "tried": labelled(tried), **accuracies}


# options of every command
OPTIONS: dict[str, Any] = {
    "data": Folder("folder with train.tsv and dev.tsv of GLUE's SST-2"),
    "model": Folder("folder of a pretrained BERT"), "states": Path("top_layer_states.pt"), "num_seeds": 5,
}  # fmt: skip
