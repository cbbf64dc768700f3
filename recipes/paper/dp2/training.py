"""One private run of a method, the choice of its hyper-parameters, and a file that remembers every run."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_dpopt.clipping import ClippingEngine, make_engine
from hf_dpopt.clipping.scaling import Scale
from hf_dpopt.common.types import ClippedSums, Released
from hf_dpopt.noise import make_noise_source
from hf_dpopt.noise.level import MechanismLevel
from hf_dpopt.plan.choose import make_plan
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.plan.plan import PrivacyPlan
from hf_dpopt.postprocess.mirror_descent import PublicMirrorDescent
from hf_dpopt.preclip import Preconditioning, queries
from hf_dpopt.public import PublicGradients
from recipes.paper.dp2.data import Task

DELTA = 1e-5
TUNING_SEED = 1000  # its runs choose hyper-parameters and are not reported
LAST = 4  # evaluations at the end of a run that choose, as in the authors' code; one alone is noisy

Hyper = dict[str, Any]  # rate, clip, and where they apply: rate_adaptive, clip_adaptive, eps, beta
Observer = Callable[[int, Preconditioning, torch.nn.Linear], None]


@dataclasses.dataclass(frozen=True)
class Method:
    """A row of the table: an optimizer, what stands before the clip, and the grid that is searched.

    `grid` maps hyper-parameters to values; several grids are tried one after the other.
    """

    name: str
    grids: Sequence[Mapping[str, Sequence[Any]]]
    optimizer: str = "sgd"
    preconditioner: str = "none"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    mirror: bool = False

    def candidates(self) -> list[Hyper]:
        """Every combination."""
        return [
            dict(zip(grid, values, strict=True)) for grid in self.grids for values in itertools.product(*grid.values())
        ]


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a run is given: exactly one of the noise multiplier and the budget."""

    batch: int
    num_steps: int
    noise_multiplier: float | None = None
    target_epsilon: float | None = None


def make(method: Method, hyper: Hyper, setting: Setting, num_examples: int) -> PrivacyPlan:
    """The plan of a run: the clip norm and the preconditioner of the method, the noise of the setting."""
    options = dict(method.options)
    if method.preconditioner != "none":
        options |= {key: hyper[key] for key in ("eps", "beta", "delay") if key in hyper}
        if "clip_adaptive" in hyper:
            options["clipping_norm"] = hyper["clip_adaptive"]
        if "rate_adaptive" in hyper:
            options["learning_rate_ratio"] = hyper["rate_adaptive"] / hyper["rate"]
    config = PrivacyConfig(
        noise_multiplier=setting.noise_multiplier,
        target_epsilon=setting.target_epsilon,
        target_delta=DELTA,
        clipping_norm=hyper["clip"],
        expected_batch_size=setting.batch,
        sampling="poisson",
        noise_rng="fast",
        preconditioner=method.preconditioner,
        preconditioner_kwargs=options,
    )
    return make_plan(config, num_examples=num_examples, num_steps=setting.num_steps)


def make_optimizer(method: Method, hyper: Hyper, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """A stock optimizer; RMSProp averages over as many steps as the paper's, ten."""
    match method.optimizer:
        case "adam":
            return torch.optim.Adam(parameters, lr=hyper["rate"], eps=hyper["eps"])
        case "rmsprop":
            return torch.optim.RMSprop(parameters, lr=hyper["rate"], alpha=0.9, eps=hyper["eps"])
        case "adagrad":
            return torch.optim.Adagrad(parameters, lr=hyper["rate"], eps=hyper["eps"])
    return torch.optim.SGD(parameters, lr=hyper["rate"])


def keys(seed: int) -> tuple[bytes, bytes]:
    """Of the sampling and of the noise. Fixed, for the data are public and nothing is kept private here."""
    rng = np.random.default_rng(seed)
    return rng.bytes(32), rng.bytes(32)


@dataclasses.dataclass
class Outcome:
    """What a run gives; accuracies on the tuning and the test records after `steps`."""

    steps: list[int]
    tuning: list[float]
    test: list[float]
    model: torch.nn.Linear
    signal_to_noise: float  # norm of the clipped sum / norm of its noise, root mean square over the second half


def public_gradients(task: Task, model: torch.nn.Linear) -> PublicGradients:
    """All public records, every time: the authors' code does so."""
    words_NW, labels_N = task.public.batch(torch.arange(len(task.public)))

    def losses(batch: Mapping[str, Any]) -> torch.Tensor:
        return task.losses(model(words_NW), labels_N)[batch["rows"]]

    rows = range(len(task.public))
    return PublicGradients(model, losses, rows, lambda some: {"rows": torch.tensor(some)}, batch_size=len(rows))


def clipped_sums(
    engine: ClippingEngine, task: Task, rows: torch.Tensor, scales: Sequence[Scale | None]
) -> ClippedSums:
    """Of one batch, for every query."""
    sums = [engine.empty_sum(scale) for scale in scales]
    if len(rows):
        features, labels = task.train.batch(rows)
        for query in sums:
            engine.add_clipped_sum(query, lambda: task.losses(engine.model(features), labels), len(rows))
    return queries.join([query.result() for query in sums])


def train_once(
    task: Task,
    plan: PrivacyPlan,
    method: Method,
    hyper: Hyper,
    seed: int,
    *,
    evaluate_every: int,
    observe: Observer = lambda step, preclip, model: None,
) -> Outcome:
    """One private run, as `private_step` does it, without ledger and with a fixed key: the data are public."""
    model = task.model()
    engine = make_engine(model, plan.clipper)
    sampling_key, noise_key = keys(seed)
    noise = plan.mechanism.stream(make_noise_source("fast", noise_key), plan.sensitivity, first_step=1)
    batch, done = plan.config.expected_batch_size, 0
    level = MechanismLevel(
        plan.mechanism, stddev=noise.draw_stddev / batch, num_steps=plan.num_steps, steps_done=lambda: done
    )
    public = public_gradients(task, model)
    preclip = plan.preclip.start(
        engine.parameters, clipping_norm=plan.config.clipping_norm, noise=level, public=public
    )
    chain = [PublicMirrorDescent(public, num_steps=plan.num_steps)] if method.mirror else []
    optimizer = make_optimizer(method, hyper, model.parameters())
    outcome = Outcome([], [], [], model, 0.0)
    signals, noises = 0.0, 0.0
    for step in range(1, plan.num_steps + 1):
        rows = torch.tensor(plan.sampler.draw(sampling_key, step))
        scales = preclip.scales()
        sums = clipped_sums(engine, task, rows, scales)
        if step > plan.num_steps // 2:
            signals += sum(float(total.square().sum()) for total in sums.values())
            noises += noise.draw_stddev**2 * sum(total.numel() for total in sums.values())
        noise.add_(sums, step)
        done = step
        released = preclip.receive(Released({name: total.div_(batch) for name, total in sums.items()}))
        for stage in chain:
            released = stage(released)
        for name, p in engine.parameters.items():
            p.grad = released[name]
        optimizer.step()
        observe(step, preclip, model)
        if step % evaluate_every == 0 or step == plan.num_steps:
            outcome.steps.append(step)
            outcome.tuning.append(task.accuracy(model, task.tuning))
            outcome.test.append(task.accuracy(model, task.test))
    outcome.signal_to_noise = (signals / noises) ** 0.5 if noises else 0.0
    return outcome


class Kept:
    """Runs, a line each in a JSONL file; one that is there already is not made again.

    Args:
        path: the file; need not exist.
        names: entries that tell a run from the others.
    """

    def __init__(self, path: Path, names: Sequence[str]):
        self.path, self._names = path, names
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self._known = {self._key(run): run for run in map(json.loads, lines)}

    def _key(self, run: Mapping[str, Any]) -> str:
        return json.dumps([run[name] for name in self._names], sort_keys=True)

    def get(self, wanted: dict[str, Any], compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The run of that description: what `compute` gives, and how long it took."""
        key = self._key(wanted)
        if key not in self._known:
            wall, processor = time.monotonic(), time.process_time()
            run = wanted | compute()
            run["seconds"] = round(time.monotonic() - wall, 1)
            run["processor_seconds"] = round(time.process_time() - processor, 1)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(run) + "\n")
            print(*wanted.values(), "->", run.get("accuracy", run.get("test", [None])[-1]), flush=True)
            self._known[key] = run
        return self._known[key]


class Runs:
    """All runs of a task."""

    def __init__(self, path: Path, task: Task, *, evaluate_every: int):
        self.task, self.evaluate_every = task, evaluate_every
        self._kept = Kept(path, ("task", "method", "setting", "hyper", "seed"))

    def run(self, method: Method, hyper: Hyper, setting: Setting, seed: int) -> dict[str, Any]:
        """The record of a run: accuracies over the steps, what it spent, how long it took."""

        def compute() -> dict[str, Any]:
            plan = make(method, hyper, setting, len(self.task.train))
            outcome = train_once(self.task, plan, method, hyper, seed, evaluate_every=self.evaluate_every)
            return {
                "epsilon": plan.epsilon(), "noise_multiplier": plan.noise_multiplier, "steps": outcome.steps,
                "tuning": [round(a, 5) for a in outcome.tuning], "test": [round(a, 5) for a in outcome.test],
                "signal_to_noise": round(outcome.signal_to_noise, 5),
            }  # fmt: skip

        wanted = {
            "task": self.task.name, "method": method.name, "setting": dataclasses.asdict(setting), "hyper": hyper,
            "seed": seed,
        }  # fmt: skip
        return self._kept.get(wanted, compute)

    def tune(self, method: Method, setting: Setting, candidates: Sequence[Hyper] = ()) -> Hyper:
        """The candidate (by default: of the method's) that is best on the tuning records, under a seed of its own."""
        tried = [self.run(method, hyper, setting, TUNING_SEED) for hyper in candidates or method.candidates()]
        return max(tried, key=lambda run: float(np.mean(run["tuning"][-LAST:])))["hyper"]

    def report(self, method: Method, setting: Setting, hyper: Hyper, num_seeds: int) -> dict[str, Any]:
        """Mean and standard deviation of the test accuracy of the last model, over the seeds."""
        runs = [self.run(method, hyper, setting, seed) for seed in range(num_seeds)]
        test = [run["test"][-1] for run in runs]
        curves = np.array([run["test"] for run in runs])
        return {
            "task": self.task.name, "method": method.name, "hyper": hyper, "epsilon": runs[0]["epsilon"],
            "noise_multiplier": runs[0]["noise_multiplier"], "mean": float(np.mean(test)),
            "std": float(np.std(test, ddof=1)) if num_seeds > 1 else 0.0, "test": test,
            "area": float(curves.mean()),
            "signal_to_noise": float(np.mean([run["signal_to_noise"] for run in runs])),
            "seconds": float(np.mean([run["seconds"] for run in runs])),
            "steps": runs[0]["steps"], "curve": curves.mean(axis=0).tolist(), "band": curves.std(axis=0).tolist(),
        }  # fmt: skip
