"""One query against tuned DP-AdamW, and against what lies between them, on logistic regression over words.

A record's gradient is ``r x`` with its residual r and its words x, so clipped sums are computed exactly and fast;
plan, batches and noise are the package's. Every cell has the best learning rate and clip of a climb by factors of 2
and 3, on records and seeds that are not reported; then paired seeds (same batches, fresh noise) on test records.

    python -m recipes.paper.one_query.words --sst2 FOLDER_WITH_train.tsv --imdb FOLDER --output_dir docs/reproductions

Runs are kept in ``one_query_words.jsonl``; those that are there are not made again.

Shape legend: N = records, W = words and the bias.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_matrix

from hf_dpopt.noise import momentum_workload
from hf_dpopt.plan.choose import make_plan
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.plan.plan import PrivacyPlan
from hf_dpopt.preclip import DelayedPreconditioner, Identity, OneQuery, Preclip
from recipes.paper.dp2.data import imdb
from recipes.paper.linear import TwoClasses, private_run, with_bias
from recipes.paper.runs import KeptRuns, OptionalFolder, ascend, best_of, experiment, interval, percent
from recipes.paper.steps import falling, query_noise
from recipes.paper.texts import bucket, sst2

BUCKETS, MAX_WORDS, MOMENTUM, DELTA = 8192, 64, 0.9, 1e-5
EPSILONS = (1.0, 3.0, 8.0)
NUM_SEEDS, TUNING_SEEDS = 5, (1000, 1001)
RATE, CLIP = 2.0, 3.0  # factors of a climb
MOVES = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, -1), (-1, 1))
DELAY = 30  # steps of a phase of DP^2


@dataclasses.dataclass(frozen=True)
class Task:
    """A data set, and how long and in which batches it is trained on."""

    train: TwoClasses
    tuning: TwoClasses
    test: TwoClasses
    batch: int
    num_steps: int


def phrases(folder: Path) -> Task:
    """Phrases of SST-2; 57,349 to train on, 5,000 that choose, 5,000 that are reported."""
    texts, labels = sst2(folder / "train.tsv")
    places, columns = [], []
    for i, text in enumerate(texts):
        found = {bucket(word, BUCKETS) for word in text.lower().split()[:MAX_WORDS]}
        places += [i] * len(found)
        columns += sorted(found)
    x_NW = with_bias(csr_matrix((np.ones(len(columns)), (places, columns)), shape=(len(texts), BUCKETS)))
    words, order = TwoClasses(x_NW, np.array(labels)), np.random.default_rng(0).permutation(len(texts))
    return Task(words[order[10_000:]], words[order[:5000]], words[order[5000:10_000]], batch=1024, num_steps=400)


def reviews(folder: Path) -> Task:
    """Film reviews; words of the unlabelled ones, which count as public."""
    made = imdb(folder, features="presence")

    def words(records: Any) -> TwoClasses:
        return TwoClasses(with_bias(records.sparse_NW), records.labels_N.numpy())

    return Task(words(made.train), words(made.tuning), words(made.test), batch=256, num_steps=240)


# --- methods ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Run:
    """All that a result depends on."""

    task: str
    method: str
    epsilon: float
    rate: float
    clip: float
    floor: float
    seed: int


@dataclasses.dataclass(frozen=True)
class Method:
    """A row of the table.

    Args:
        mechanism: of the noise.
        scale: where D comes from: "none", "query" or "dp2" (delayed).
        adam: AdamW behind the noise; else SGD with momentum.
        anew: whether correlated noise starts anew where the scale changes.
    """

    mechanism: str = "gaussian"
    scale: str = "none"
    adam: bool = False
    anew: bool = False

    @property
    def floors(self) -> tuple[float, ...]:
        """Floors that are tried: of D in root mean squares of a coordinate; of "dp2" the clip of g / D, in clips."""
        return {"none": (1.0,), "dp2": (300.0, 3000.0), "query": (1.0, 3.0)}[self.scale]

    def preclip(self, run: Run) -> Preclip:
        """The preconditioner of a run."""
        if self.scale == "query":
            return OneQuery(query_noise=query_noise(run.epsilon), floor=run.floor, by_rows=False)
        if self.scale == "dp2":
            clip, ratio = run.floor * run.clip, 1 / run.floor
            return DelayedPreconditioner(delay=DELAY, clipping_norm=clip, learning_rate_ratio=ratio)
        return Identity()


METHODS = {
    "DP-AdamW": Method(adam=True),
    "DP-SGD": Method(),
    "banded SGD": Method("banded"),
    "nu SGD": Method("nu_dpftrl"),
    "BLT SGD": Method("blt"),
    "independent noise, D from one query": Method(scale="query"),
    "banded, D from one query": Method("banded", "query"),
    "BLT, D from one query": Method("blt", "query"),
    "DP2": Method(scale="dp2"),
    "DP2, banded": Method("banded", "dp2"),
    "DP2, nu": Method("nu_dpftrl", "dp2"),
    "DP2, BLT": Method("blt", "dp2"),
    "DP2, banded, noise anew": Method("banded", "dp2", anew=True),
}


@functools.cache
def plan_of(batch: int, num_steps: int, num: int, method: Method, epsilon: float, preclip: Preclip) -> PrivacyPlan:
    """The plan of a run at clip 1; the noise grows with the clip."""
    config = PrivacyConfig(
        target_epsilon=epsilon, target_delta=DELTA, expected_batch_size=batch, noise_mechanism=method.mechanism,
        sampling="poisson" if method.mechanism == "gaussian" else "auto",
        noise_at_changes="restart" if method.anew else "auto",
    )  # fmt: skip
    workload = momentum_workload(num_steps, MOMENTUM, falling(num_steps))
    return make_plan(config, num_examples=num, num_steps=num_steps, workload=workload, preclip=preclip)


def train(tasks: Callable[[str], Task], run: Run) -> dict[str, Any]:
    """Accuracies of one run on the tuning and on the test records."""
    task, method = tasks(run.task), METHODS[run.method]
    preclip = method.preclip(run)
    plan = plan_of(task.batch, task.num_steps, len(task.train), method, run.epsilon, preclip)

    def optimizer(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        if method.adam:
            return torch.optim.AdamW(parameters, lr=run.rate, weight_decay=0.0)
        return torch.optim.SGD(parameters, lr=run.rate, momentum=MOMENTUM)

    steps = private_run(task.train, plan, run, lambda level: preclip, optimizer, rates=falling(task.num_steps))
    ((_, weights_W1),) = deque(steps, maxlen=1)
    return {"tuning": task.tuning.accuracy(weights_W1), "test": task.test.accuracy(weights_W1)}


# --- tuning and table ------------------------------------------------------------------------------------------------


def tune(runs: KeptRuns, task: str, method: str, epsilon: float) -> Run:
    """The best learning rate, clip and floor of a climb: each neighbour by a factor is worse."""
    made = METHODS[method]
    start = {"rate": 3e-2 if made.adam else 4.0, "clip": 1.0}

    def score(rate: float, clip: float, floor: float) -> float:
        return runs.mean(Run(task, method, epsilon, rate, clip, floor, 0), TUNING_SEEDS, "tuning")

    def climb(floor: float) -> tuple[float, tuple[float, ...]]:
        return ascend(lambda *at: score(*at, floor), (start["rate"], start["clip"]), (RATE, CLIP), MOVES)

    best = {floor: climb(floor) for floor in made.floors}
    floor = best_of({floor: score for floor, (score, _) in best.items()})
    return Run(task, method, epsilon, *best[floor][1], floor, 0)


def table(runs: KeptRuns, cells: Iterable[tuple[str, float]]) -> list[dict[str, Any]]:
    """Accuracies at the best values, and differences from DP-AdamW with their intervals, in points."""
    rows = []
    for task, epsilon in cells:
        scores: dict[str, np.ndarray] = {}
        for method in METHODS:
            best = tune(runs, task, method, epsilon)
            scores[method] = percent([result["test"] for result in runs.of_seeds(best, range(NUM_SEEDS))])
            mean, half = interval(scores[method] - scores["DP-AdamW"]) if method != "DP-AdamW" else (0.0, 0.0)
            rows.append({
                "task": task, "epsilon": epsilon, "method": method, "accuracy": float(scores[method].mean()),
                "stddev": float(scores[method].std(ddof=1)), "over_dp_adamw": mean, "half_of_95_interval": half,
                "rate": best.rate, "clip": best.clip, "floor": best.floor,
            })  # fmt: skip
    return rows


def compute(given: argparse.Namespace) -> dict[str, Any]:
    makers = {"sst2": phrases, "imdb": reviews}
    folders = {name: getattr(given, name) for name in makers if getattr(given, name) is not None}
    tasks = functools.cache(lambda name: makers[name](folders[name]))
    runs = KeptRuns(given.output_dir / "one_query_words.jsonl", functools.partial(train, tasks))
    return {"rows": table(runs, itertools.product(folders, given.epsilons))}


main = experiment(
    "one_query_words", compute, sst2=OptionalFolder("folder with train.tsv of GLUE's SST-2"),
    imdb=OptionalFolder("folder with train, test and unsup.jsonl.gz"), epsilons=list(EPSILONS),
)  # fmt: skip

if __name__ == "__main__":
    main()
