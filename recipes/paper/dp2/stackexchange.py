"""DP^2 on posts of Stack Exchange: which site and kind of post words come from, as the paper predicts tags.

The paper's second task is the tag of StackOverflow questions: softmax regression on the frequencies of 10,000 words,
500 classes, 246,092 questions. Here: 11,145 posts of five sites without tags; their classes are the twelve pairs of
site and kind (question, answer, comment). Words are hashed, so nothing is fitted. Titles, which questions alone have,
are left out.

Every cell has the best values of a climb (rates by factors of 2, clips by 3, floors by 10) on tuning records, with
seeds that are not reported; then paired seeds, with the same batches and fresh noise, on test records.

    python -m recipes.paper.dp2.stackexchange --data FOLDER_WITH_posts.jsonl.gz --output_dir docs/reproductions

Runs are kept in ``dp2_stackexchange.jsonl``; those that are there are not made again.

Shape legend: N = records, W = words and the bias, K = classes.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hf_dpopt.noise.mechanism import MechanismLevel
from hf_dpopt.plan.choose import make_plan
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.plan.plan import PrivacyPlan
from hf_dpopt.preclip import DelayedPreconditioner, Identity, OneQuery, Preclip, PublicPreconditioner
from recipes.paper.dp2.data import bags
from recipes.paper.dp2.training import DELTA, make_optimizer
from recipes.paper.linear import (
    ManyClasses,
    private_run,
    with_bias,
)
from recipes.paper.runs import (
    Folder,
    KeptRuns,
    Move,
    ascend,
    draw_lines,
    experiment,
    interval,
    panels,
    plain_ticks,
    same_range,
    save,
)
from recipes.paper.steps import query_noise
from recipes.paper.texts import bucket

CLASSES = (  # site and kind; of the other pairs, there are no posts
    "alcohol, comment", "alcohol.meta, question", "alcohol.meta, answer", "alcohol.meta, comment",
    "cardano, question", "cardano, answer", "cardano, comment", "cstheory.meta, question", "cstheory.meta, answer",
    "quantumcomputing, question", "quantumcomputing, answer", "quantumcomputing, comment",
)  # fmt: skip
NUM_WORDS = 5000  # half of the paper's, for speed
NUM_TUNING, NUM_TEST, NUM_PUBLIC = 1500, 3000, 112  # public: 1 % of the rest, the paper's share
BATCH, NUM_STEPS, DELAY = 256, 360, 30
CHOOSE = range(NUM_STEPS - 15, NUM_STEPS + 1, 5)  # steps whose mean accuracy chooses; one alone is noisy
EPSILONS = (8.0, 3.0, 1.0)  # a climb begins where that of the budget before it ended
NUM_SEEDS, TUNING_SEEDS = 5, (1000, 1001)


@dataclasses.dataclass(frozen=True)
class Features:
    """Features besides the frequencies of words, and how much of the table is made with them.

    Args:
        bias: feature that all records have; 0 for none.
        methods: names of the methods; None for all.
        begins: name of the features at whose best values a climb begins, where no larger budget came before.
    """

    bias: float
    epsilons: tuple[float, ...] = EPSILONS
    methods: tuple[str, ...] | None = None
    begins: str | None = None


COMPARED = ("DP-SGD", "DP-Adam", "DP2-RMSProp")  # with which rows are compared
SOME = ("DP-SGD", "DP-Adam", "DP2-RMSProp", "one query")
FEATURES = {
    "frequencies, bias": Features(1.0),
    "frequencies, small bias": Features(0.1, methods=SOME),
    "frequencies, no bias": Features(0.0, epsilons=(3.0,), methods=("DP-SGD",), begins="frequencies, small bias"),
}


@dataclasses.dataclass(frozen=True)
class Task:
    """Posts that do not overlap; the public ones are drawn as the others are, which is the best case for a method."""

    train: ManyClasses
    public: ManyClasses
    tuning: ManyClasses
    test: ManyClasses


def posts(folder: Path) -> tuple[list[str], list[int]]:
    """Texts without titles, and their classes, in the order of the file."""
    with gzip.open(folder / "posts.jsonl.gz", "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    names = [f"{row['site'].removesuffix('.stackexchange.com')}, {row['kind']}" for row in rows]
    return [row["text"] for row in rows], [CLASSES.index(name) for name in names]


def make_task(folder: Path, name: str) -> Task:
    """The task with features of that name."""
    (texts, labels), bias = posts(folder), FEATURES[name].bias
    x_NW = bags(texts, labels, lambda word: bucket(word, NUM_WORDS), NUM_WORDS).sparse_NW.astype(np.float64)
    records = ManyClasses(with_bias(x_NW, bias) if bias else x_NW, np.array(labels))
    order = np.random.default_rng(0).permutation(len(records))
    ends = np.cumsum([NUM_TUNING, NUM_TEST, NUM_PUBLIC])
    tuning, test, public, train = (records[np.sort(rows)] for rows in np.split(order, ends))
    return Task(train, public, tuning, test)


# --- methods ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Run:
    """All that a result depends on.

    Args:
        floor: of D: of a second moment as it is ("adadps", and eps of RMSProp), in stddevs of the noise in the mean of
            a phase ("dp2"), in root mean squares of a coordinate ("query").
        clip_ratio: bound on g / D in the adaptive phase of DP^2 / clip.
        rate_ratio: how far noise moves the weights in the adaptive phase / in the other one.
    """

    task: str
    method: str
    epsilon: float
    rate: float
    clip: float
    floor: float
    clip_ratio: float
    rate_ratio: float
    seed: int


VALUES = ("rate", "clip", "floor", "clip_ratio", "rate_ratio")
FACTORS = (2.0, 3.0, 10.0, 3.0, 2.0)
PAIRS: list[Move] = [  # rate and clip; rate of the first phase of DP^2 alone; its floor and its clip of g / D
    (1, -1, 0, 0, 0), (1, 0, 0, 0, -1), (0, 0, 1, -2, 0),
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Method:
    """A row of the table: an optimizer, what stands before the clip, and where a climb begins.

    Args:
        start: rate, clip, floor, clip_ratio and rate_ratio.
        climbed: how many of them, from the first on, are climbed.
    """

    start: tuple[float, float, float, float, float]
    climbed: int = 2
    optimizer: str = "sgd"
    scale: str = "none"

    @property
    def moves(self) -> list[Move]:
        """Ways to the neighbours: each value by itself, and pairs of which one may undo the other."""
        alone = [tuple(sign * (i == j) for j in range(5)) for i in range(self.climbed) for sign in (1, -1)]
        pairs = [move for move in PAIRS if not any(move[self.climbed :])]
        return [*alone, *pairs, *(tuple(-i for i in move) for move in pairs)]

    def preclip(self, run: Run, noise: MechanismLevel) -> Preclip:
        """The preconditioner of a run; floor and scales of DP^2 cost nothing, and need the level of the noise."""
        match self.scale:
            case "dp2":
                return DelayedPreconditioner(
                    delay=DELAY, eps=run.floor * noise.variance_of_mean(DELAY) ** 0.5,
                    clipping_norm=run.clip * run.clip_ratio, learning_rate_ratio=run.rate_ratio / run.clip_ratio,
                )  # fmt: skip
            case "adadps":
                return PublicPreconditioner(refresh_every=5, eps=run.floor)
            case "query":
                return OneQuery(query_noise=query_noise(run.epsilon), floor=run.floor)
        return Identity()


METHODS = {
    "DP-SGD": Method((8.0, 0.3, 1.0, 1.0, 1.0)),
    "DP-Adam": Method((0.03, 0.3, 1e-8, 1.0, 1.0), optimizer="adam"),
    "DP-RMSProp": Method((0.03, 0.3, 1e-3, 1.0, 1.0), climbed=3, optimizer="rmsprop"),
    "DP-AdaGrad": Method((0.3, 0.3, 1e-8, 1.0, 1.0), optimizer="adagrad"),
    "AdaDPS": Method((1.0, 3.0, 1e-3, 1.0, 1.0), climbed=3, scale="adadps"),
    "DP2-RMSProp": Method((1.0, 0.3, 0.1, 300.0, 256.0), climbed=5, scale="dp2"),  # a slow first phase, as the paper's
    "one query": Method((512.0, 0.3 * 3.0**-1, 1.0, 1.0, 1.0), climbed=3, scale="query"),
}


@functools.cache
def plan_of(num: int, epsilon: float, query: float | None) -> PrivacyPlan:
    """The plan of a run at clip 1; a division by D of public or released values changes nothing in it."""
    config = PrivacyConfig(
        target_epsilon=epsilon, target_delta=DELTA, expected_batch_size=BATCH, sampling="poisson",
        noise_mechanism="gaussian",
    )  # fmt: skip
    preclip = Identity() if query is None else OneQuery(query_noise=query)
    return make_plan(config, num_examples=num, num_steps=NUM_STEPS, preclip=preclip)


def train(tasks: Callable[[str], Task], run: Run) -> dict[str, Any]:
    """Accuracy of one run on the tuning records, a mean over its last models, and of its last model on the others."""
    task, method = tasks(run.task), METHODS[run.method]
    plan = plan_of(len(task.train), run.epsilon, query_noise(run.epsilon) if method.scale == "query" else None)
    hyper, tuning = {"rate": run.rate, "eps": run.floor}, []
    steps = private_run(
        task.train, plan, run, functools.partial(method.preclip, run),
        functools.partial(make_optimizer, method.optimizer, hyper), num_outputs=len(CLASSES), public=task.public,
    )  # fmt: skip
    for step, weights_WK in steps:
        if step in CHOOSE:
            tuning.append(task.tuning.accuracy(weights_WK))
    return {"tuning": float(np.mean(tuning)), "test": task.test.accuracy(weights_WK)}


# --- tuning and table ------------------------------------------------------------------------------------------------


def tune(runs: KeptRuns, task: str, method: str, epsilon: float, start: Run | None = None) -> Run:
    """The best values of a climb, all of whose neighbours are worse; it may begin where another one ended."""

    def score(*values: float) -> float:
        made = Run(task, method, epsilon, *values, seed=0)
        return runs.mean(made, TUNING_SEEDS, "tuning")

    first = METHODS[method].start if start is None else tuple(getattr(start, name) for name in VALUES)
    _, values = ascend(score, first, FACTORS, METHODS[method].moves, is_eager=True)
    return Run(task, method, epsilon, *values, seed=0)


Cells = dict[tuple[str, float, str], np.ndarray]  # features, epsilon, method -> test accuracies of the seeds, in %


def table(runs: KeptRuns) -> list[dict[str, Any]]:
    """Accuracies at the best values, and differences from other rows with their intervals, in points."""
    rows, cells, ends = [], Cells(), dict[tuple[str, float, str], Run]()
    for task, features in FEATURES.items():
        before: dict[str, Run] = {}
        for epsilon in features.epsilons:
            for method in features.methods or METHODS:
                start = before.get(method) or ends.get((features.begins or "", epsilon, method))
                best = ends[task, epsilon, method] = before[method] = tune(runs, task, method, epsilon, start)
                made = runs.of_seeds(best, range(NUM_SEEDS))
                scores = cells[task, epsilon, method] = 100 * np.array([line["test"] for line in made])
                rows.append({
                    "features": task, "epsilon": epsilon, "method": method, "accuracy": float(scores.mean()),
                    "stddev": float(scores.std(ddof=1)), "_test": scores,
                    "tuning_accuracy": 100 * runs.mean(best, TUNING_SEEDS, "tuning"),
                    **{f"over {name}": list(interval(scores - cells[task, epsilon, name])) for name in COMPARED
                       if (task, epsilon, name) in cells},
                    **{name: getattr(best, name) for name in VALUES},
                })  # fmt: skip
    return rows


def compute(given: argparse.Namespace) -> dict[str, Any]:
    tasks = functools.cache(functools.partial(make_task, given.data))
    return {"rows": table(KeptRuns(given.output_dir / "dp2_stackexchange.jsonl", functools.partial(train, tasks)))}


def plot(numbers: dict[str, Any], path: Path) -> None:
    """Test accuracy against epsilon; a panel for each kind of features."""
    drawn = [name for name, features in FEATURES.items() if len(features.epsilons) > 1]
    figure, axes = panels(len(drawn), width=4.4, height=3.8)
    for axis, name in zip(axes, drawn, strict=True):
        own = [row for row in numbers["rows"] if row["features"] == name]
        draw_lines(axis, own, "epsilon", lambda row: row["_test"], lambda row: row["method"])
        plain_ticks(axis, sorted(EPSILONS))
        axis.set(xlabel="epsilon (delta 1e-5)", ylabel="test accuracy, %", title=name)
    same_range(axes)
    save(figure, path)


main = experiment("dp2_stackexchange", compute, plot, data=Folder("folder with posts.jsonl.gz"))

if __name__ == "__main__":
    main()
