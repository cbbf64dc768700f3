"""Joint moment estimation against tuned DP-AdamW and DP-AdamBC, on linear models of words.

Three tasks whose coordinates differ much in scale: phrases of SST-2, film reviews and news leads, as words. Every
cell has the best learning rate, clip, floor and, where squares are released, scale of a climb in all of them, on
records and seeds that are not reported; then paired seeds (same batches, fresh noise) on test records. "momentum" is
AdamW with a floor that leaves nothing of its second moment, which is also where the floor of the others may lead.

    python -m recipes.paper.joint_moments.words --sst2 FOLDER_WITH_train.tsv --imdb FOLDER --ag_news FOLDER \\
        --output_dir docs/reproductions

Runs are kept in ``joint_moments.jsonl``; those that are there are not made again.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_matrix

from hf_dpopt.noise.level import MechanismLevel
from hf_dpopt.optim import DPAdamBC, DPAdamW
from hf_dpopt.plan.plan import PrivacyPlan
from hf_dpopt.preclip import Identity
from recipes.paper.dp2 import data
from recipes.paper.dp2.output import versions
from recipes.paper.joint_moments.releases import BETAS, JointReleases, MomentAdam
from recipes.paper.linear import WEIGHTS, ManyClasses, PrivateGradients, Records, TwoClasses, with_bias
from recipes.paper.one_query import words
from recipes.paper.runs import KeptRuns, Move, ascend, interval

EPSILONS = (3.0, 1.0, 8.0)  # climbs at the others begin where that of the first ended
NUM_SEEDS, TUNING_SEEDS = 5, (1000, 1001)
FACTORS = (2.0, 3.0, 3.0, 2.0)  # of a climb: learning rate, clip, floor, scale
DATE = "2026-11-24"  # of the runs


@dataclasses.dataclass(frozen=True)
class Task:
    """A data set, and how long and in which batches it is trained on."""

    train: Records
    tuning: Records
    test: Records
    batch: int
    num_steps: int


def ag_news(folder: Path) -> Task:
    """News leads in four classes; 10,001 to train on, 2,500 that choose, the other 5,100 are reported."""
    made = data.ag_news(folder)

    def present(*parts: data.Records) -> ManyClasses:
        x_NW = csr_matrix(np.concatenate([part.counts_NW.numpy() for part in parts]) > 0, dtype=float)
        return ManyClasses(with_bias(x_NW), np.concatenate([part.labels_N.numpy() for part in parts]))

    held_out = present(made.public, made.tuning, made.test)
    return Task(present(made.train), held_out[:2500], held_out[2500:], batch=512, num_steps=300)


# --- methods ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Run:
    """All that a result depends on.

    Args:
        rate: first learning rate.
        clip: bound on the norm of a record's gradient.
        floor: of the root that Adam divides by: in stddevs of the noise in the mean gradient, or, where squares are
            released, in root mean squares of a coordinate.
        scale: of the squares in the joint release, in 1 / clip; 0 for none.
    """

    task: str
    method: str
    epsilon: float
    rate: float
    clip: float
    floor: float
    scale: float
    seed: int


@dataclasses.dataclass(frozen=True)
class Method:
    """A row of the table.

    Args:
        starts: learning rates, clips, floors and scales where climbs begin; the best end counts.
        num_tuned: how many of them are tuned.
        optimizer: of the package, on mean gradients; None for `MomentAdam` on gradients and squares.
        is_private: whether the squares are.
    """

    starts: tuple[tuple[float, float, float, float], ...]
    num_tuned: int
    optimizer: type[DPAdamW] | None = None
    is_private: bool = True

    @property
    def moves(self) -> list[Move]:
        """Ways to neighbours: one value up or down, and learning rate and clip against each other."""
        single = [tuple(sign * (i == j) for j in range(4)) for i in range(self.num_tuned) for sign in (1, -1)]
        return [*single, (1, -1, 0, 0), (-1, 1, 0, 0)]


METHODS = {
    "DP-AdamW": Method(((6e-2, 1.0, 0.1, 0.0),), 3, DPAdamW),
    "DP-AdamBC": Method(((6e-2, 1.0, 0.1, 0.0),), 3, DPAdamBC),
    "momentum": Method(((6e-2, 1.0, 1e6, 0.0),), 2, DPAdamW),  # the floor leaves nothing of the second moment
    "JME": Method(((0.5, 1.0, 1.0, 0.5), (0.03, 0.1, 3.0, 0.25)), 4),
    "true squares (not private)": Method(((0.5, 1.0, 1.0, 0.0), (0.03, 0.1, 3.0, 0.0)), 3, is_private=False),
}


def plan_of(task: Task, epsilon: float) -> PrivacyPlan:
    """The plan of every method: sampled batches, independent noise."""
    return words.plan_of(task.batch, task.num_steps, len(task.train), words.Method(), epsilon, Identity())


def train(tasks: Callable[[str], Task], run: Run) -> dict[str, Any]:
    """Accuracies of one run on the tuning and on the test records."""
    task, method = tasks(run.task), METHODS[run.method]
    sampling_key = np.random.default_rng(run.seed).bytes(32)  # the same batches for all methods
    noise_key = np.random.default_rng([run.seed, zlib.crc32(repr(run).encode())]).bytes(32)
    num_outputs = 1 if isinstance(task.train, TwoClasses) else int(task.train.labels_N.max()) + 1
    weights_WK = np.zeros((task.train.num_features, num_outputs))
    keys, made = (sampling_key, noise_key), plan_of(task, run.epsilon)
    step = (_on_gradients if method.optimizer else _on_moments)(task.train, weights_WK, made, run, keys)
    for relative in words.schedule(task.num_steps):
        step(run.rate * relative)
    return {"tuning": task.tuning.accuracy(weights_WK), "test": task.test.accuracy(weights_WK)}


Step = Callable[[float], None]  # makes a step of a learning rate


def _on_gradients(
    records: Records, weights_WK: np.ndarray, plan: PrivacyPlan, run: Run, keys: tuple[bytes, bytes]
) -> Step:
    """Steps of an optimizer of the package."""
    levels: list[MechanismLevel] = []

    def start(level: MechanismLevel) -> Any:
        levels.append(level)
        return Identity().start({WEIGHTS: torch.zeros(weights_WK.shape)}, clipping_norm=run.clip, noise=level)

    gradients = PrivateGradients(records, weights_WK, plan, clip=run.clip, keys=keys, start=start)
    parameter = torch.nn.Parameter(torch.from_numpy(weights_WK))  # the same memory
    make = METHODS[run.method].optimizer
    assert make is not None
    optimizer = make([parameter], 0.0, betas=BETAS, eps=run.floor * gradients.stddev, noise=levels[0])

    def step(rate: float) -> None:
        parameter.grad = torch.from_numpy(gradients())
        optimizer.param_groups[0]["lr"] = (1 + run.floor) * rate
        optimizer.step()

    return step


def _on_moments(
    records: Records, weights_WK: np.ndarray, plan: PrivacyPlan, run: Run, keys: tuple[bytes, bytes]
) -> Step:
    """Steps of Adam on released gradients and squares."""
    releases = JointReleases(
        records, weights_WK, plan, clip=run.clip, scale=run.scale, keys=keys, is_private=METHODS[run.method].is_private
    )
    update = MomentAdam(weights_WK.shape, floor=run.floor, stddev_of_squares=releases.stddev_of_squares)

    def step(rate: float) -> None:
        weights_WK[...] -= rate * update(*releases())

    return step


# --- tuning and table ------------------------------------------------------------------------------------------------


def tune(runs: KeptRuns, task: str, method: str, epsilon: float) -> Run:
    """The best values of a climb in all of them: each neighbour is worse."""

    def score(rate: float, clip: float, floor: float, scale: float) -> float:
        some = [Run(task, method, epsilon, rate, clip, floor, scale, seed) for seed in TUNING_SEEDS]
        return float(np.mean([runs.result(run)["tuning"] for run in some]))

    made, starts = METHODS[method], METHODS[method].starts
    if epsilon != EPSILONS[0]:
        first = tune(runs, task, method, EPSILONS[0])
        starts = ((first.rate, first.clip, first.floor, first.scale),)
    _, values = max(ascend(score, start, FACTORS, made.moves, is_eager=True) for start in starts)
    return Run(task, method, epsilon, *values, seed=0)


BASES = {"over_dp_adamw": "DP-AdamW", "over_dp_adam_bc": "DP-AdamBC", "over_momentum": "momentum"}


def table(runs: KeptRuns, cells: Iterable[tuple[str, float]]) -> list[dict[str, Any]]:
    """Accuracies at the best values, and differences from both baselines with their intervals, in points."""
    rows = []
    for task, epsilon in cells:
        scores: dict[str, np.ndarray] = {}
        for method, made in METHODS.items():
            if not made.is_private and epsilon != EPSILONS[0]:
                continue  # what explains the table is measured at one budget
            best = tune(runs, task, method, epsilon)
            found = [runs.result(dataclasses.replace(best, seed=seed))["test"] for seed in range(NUM_SEEDS)]
            scores[method] = 100 * np.array(found)
            row = {
                "task": task, "epsilon": epsilon, "method": method, "accuracy": float(scores[method].mean()),
                "stddev": float(scores[method].std(ddof=1)),
            }  # fmt: skip
            for key, base in BASES.items():
                if base in scores and method != base:
                    row[key] = list(interval(scores[method] - scores[base]))
            rows.append(row | {name: getattr(best, name) for name in ("rate", "clip", "floor", "scale")})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sst2", type=Path, help="folder with train.tsv of GLUE's SST-2")
    parser.add_argument("--imdb", type=Path, help="folder with train, test and unsup .jsonl.gz")
    parser.add_argument("--ag_news", type=Path, help="folder with train.tsv and test.tsv")
    parser.add_argument("--epsilons", type=float, nargs="+", default=EPSILONS)
    parser.add_argument("--output_dir", type=Path, required=True)
    options = parser.parse_args()
    given = {
        "sst2": (words.sst2, options.sst2), "imdb": (words.reviews, options.imdb),
        "ag_news": (ag_news, options.ag_news),
    }  # fmt: skip
    names = [name for name, (_, folder) in given.items() if folder is not None]

    @functools.cache
    def tasks(name: str) -> Any:
        make, folder = given[name]
        return make(folder)

    options.output_dir.mkdir(parents=True, exist_ok=True)
    runs = KeptRuns(
        options.output_dir / "joint_moments.jsonl",
        functools.partial(train, tasks),
        lambda run, line: (
            f"{run.task} {run.method} eps {run.epsilon:g} rate {run.rate:.3g} clip {run.clip:.2g} "
            f"floor {run.floor:.2g} scale {run.scale:g} seed {run.seed}: "
            f"{100 * line['tuning']:.1f} {100 * line['test']:.1f}"
        ),
    )
    cells = [(name, epsilon) for epsilon, name in itertools.product(options.epsilons, names)]
    rows = sorted(table(runs, cells), key=lambda row: (names.index(row["task"]), row["epsilon"]))
    made = {"command": "python -m recipes.paper.joint_moments.words", **versions(), "date": DATE, "rows": rows}
    (options.output_dir / "joint_moments.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        gains = "  ".join(f"{row[key][0]:+.2f} +- {row[key][1]:.2f}" for key in BASES if key in row)
        print(f"{row['task']:8} eps {row['epsilon']:g} {row['method']:28} {row['accuracy']:.1f}  {gains}")


if __name__ == "__main__":
    main()
