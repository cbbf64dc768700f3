"""One private run of a method, the choice of its hyper-parameters, and what the rows of a table hold."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_dpopt.clipping import make_engine
from hf_dpopt.noise.mechanism import MechanismLevel
from hf_dpopt.plan.choose import make_plan
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.plan.plan import PrivacyPlan
from hf_dpopt.postprocess.mirror_descent import PublicMirrorDescent
from hf_dpopt.preclip import Preconditioning
from hf_dpopt.public import PublicGradients
from recipes.paper.dp2.data import Task
from recipes.paper.runs import KeptRuns
from recipes.paper.steps import EngineSums, Part, PrivateSteps, descend, seeded_keys

DELTA = 1e-5
TUNING_SEED = 1000  # its runs choose hyper-parameters and are not reported
LAST = 4  # evaluations at the end of a run that choose, as in the authors' code; one alone is noisy

Hyper = dict[str, Any]  # rate, clip, and where they apply: rate_adaptive, clip_adaptive, eps, beta


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


@dataclasses.dataclass(frozen=True)
class Run:
    """All that a result depends on."""

    task: str
    method: str
    setting: Setting
    hyper: Hyper
    seed: int


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
        noise_multiplier=setting.noise_multiplier, target_epsilon=setting.target_epsilon, target_delta=DELTA,
        clipping_norm=hyper["clip"], expected_batch_size=setting.batch, sampling="poisson",
        preconditioner=method.preconditioner, preconditioner_kwargs=options,
    )  # fmt: skip
    return make_plan(config, num_examples=num_examples, num_steps=setting.num_steps)


def make_optimizer(name: str, hyper: Hyper, parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """A stock optimizer; RMSProp averages over as many steps as the paper's, ten."""
    match name:
        case "adam":
            return torch.optim.Adam(parameters, lr=hyper["rate"], eps=hyper["eps"])
        case "rmsprop":
            return torch.optim.RMSprop(parameters, lr=hyper["rate"], alpha=0.9, eps=hyper["eps"])
        case "adagrad":
            return torch.optim.Adagrad(parameters, lr=hyper["rate"], eps=hyper["eps"])
    return torch.optim.SGD(parameters, lr=hyper["rate"])


@dataclasses.dataclass
class Outcome:
    """What a run gives; accuracies on the tuning and the test records after `steps`."""

    steps: list[int]
    tuning: list[float]
    test: list[float]
    model: torch.nn.Linear


def public_gradients(task: Task, model: torch.nn.Linear) -> PublicGradients:
    """All public records, every time: the authors' code does so."""
    words_NW, labels_N = task.public.batch(torch.arange(len(task.public)))

    def losses(batch: Mapping[str, Any]) -> torch.Tensor:
        return task.losses(model(words_NW), labels_N)[batch["rows"]]

    rows = range(len(task.public))
    return PublicGradients(model, losses, rows, lambda some: {"rows": torch.tensor(some)}, batch_size=len(rows))


def train_once(
    task: Task,
    plan: PrivacyPlan,
    method: Method,
    hyper: Hyper,
    keys: tuple[bytes, bytes],
    *,
    evaluate_every: int,
) -> Outcome:
    """One private run."""
    model = task.model()
    engine, public = make_engine(model, plan.clipper), public_gradients(task, model)

    def parts(rows: torch.Tensor) -> list[Part]:
        features, labels = task.train.batch(rows)
        return [(lambda: task.losses(model(features), labels), len(rows))]

    def start(level: MechanismLevel) -> Preconditioning:
        clip = plan.config.clipping_norm
        return plan.preclip.start(engine.parameters, clipping_norm=clip, noise=level, public=public)

    steps = PrivateSteps(plan, EngineSums(engine, parts), keys=keys, start=start)
    chain = [PublicMirrorDescent(public, num_steps=plan.num_steps)] if method.mirror else []
    optimizer = make_optimizer(method.optimizer, hyper, model.parameters())
    outcome = Outcome([], [], [], model)
    for step in descend(steps, engine, optimizer, plan.num_steps, chain):
        if step % evaluate_every == 0 or step == plan.num_steps:
            outcome.steps.append(step)
            outcome.tuning.append(task.accuracy(model, task.tuning))
            outcome.test.append(task.accuracy(model, task.test))
    return outcome


class Runs:
    """All runs of a task."""

    def __init__(self, path: Path, task: Task, methods: Iterable[Method], *, evaluate_every: int):
        self.task, self._every = task, evaluate_every
        self._methods = {method.name: method for method in methods}
        self._kept = KeptRuns(path, self._train)

    def _train(self, run: Run) -> dict[str, Any]:
        method = self._methods[run.method]
        plan = make(method, run.hyper, run.setting, len(self.task.train))
        keys = seeded_keys(run.seed)
        outcome = train_once(self.task, plan, method, run.hyper, keys, evaluate_every=self._every)
        return {
            "epsilon": plan.epsilon(), "noise_multiplier": plan.noise_multiplier, "steps": outcome.steps,
            "tuning": [round(a, 5) for a in outcome.tuning], "test": [round(a, 5) for a in outcome.test],
        }  # fmt: skip

    def tune(self, method: str, setting: Setting, candidates: Sequence[Hyper] = ()) -> Hyper:
        """The candidate (by default: of the method's) that is best on the tuning records, under a seed of its own."""
        tried = [Run(self.task.name, method, setting, hyper, TUNING_SEED)
                 for hyper in candidates or self._methods[method].candidates()]  # fmt: skip
        return max(tried, key=lambda run: float(np.mean(self._kept.result(run)["tuning"][-LAST:]))).hyper

    def report(self, method: str, setting: Setting, hyper: Hyper, num_seeds: int) -> dict[str, Any]:
        """Mean and standard deviation of the test accuracy of the last model, over the seeds."""
        runs = self._kept.of_seeds(Run(self.task.name, method, setting, hyper, 0), range(num_seeds))
        curves = np.array([run["test"] for run in runs])
        test = curves[:, -1]
        return {
            "task": self.task.name, "method": method, "hyper": hyper, "epsilon": runs[0]["epsilon"],
            "noise_multiplier": runs[0]["noise_multiplier"], "mean": float(np.mean(test)),
            "std": float(np.std(test, ddof=1)) if num_seeds > 1 else 0.0, "test": test.tolist(),
            "_steps": runs[0]["steps"], "_curves": curves,
        }  # fmt: skip

    def best(self, methods: Iterable[str], setting: Setting, num_seeds: int) -> list[dict[str, Any]]:
        """Reports of methods, each at its best."""
        return [self.report(method, setting, self.tune(method, setting), num_seeds) for method in methods]
