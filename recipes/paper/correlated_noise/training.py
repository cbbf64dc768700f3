"""Training on real text with every noise mechanism at the same budgets: where does correlated noise win?

SST-2 phrases, a bag of hashed words (an embedding, its mean, a linear layer) trained from scratch: small enough for
hundreds of private runs on a CPU, large enough (131,106 coordinates) that noise decides what is learned. The setting
is that of the paper's CIFAR-10 experiment at half the size: 25,000 records, batches of 250, 2,000 steps, 20 epochs,
clip 1, delta 1e-5, momentum, and a learning rate that cools down to 0.05 of itself over the last quarter.

A record's gradient is known in closed form, so clipped sums are exact and fast; plans, batches, clip factors and noise
are the package's. Every cell has the best learning rate of a climb by factors of 2, on records and seeds that are not
reported; then paired seeds (the same initial weights, the same batches for rows with the same sampler, fresh noise)
on test records. "dense, multi-epoch" is a matrix that is optimised once for the whole run, which takes half an hour.

    python -m recipes.paper.correlated_noise.training --data FOLDER_WITH_train.tsv --output_dir docs/reproductions

Runs are kept in ``training_runs.jsonl``; those that are there are not made again. It takes 3 GB of memory.

Shape legend: N = records, B = records of a batch, V = buckets of words, W = width of a word vector, D = coordinates.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_matrix

from hf_dpopt.clipping.thresholds import Clipping
from hf_dpopt.noise import NoiseStrategy, Workload, linear_cooldown, momentum_workload
from hf_dpopt.plan.choose import choose_num_bands, make_plan
from hf_dpopt.plan.compare import predicted_errors
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.plan.plan import PrivacyPlan
from hf_dpopt.randomness.chacha import ChaCha20Gaussian
from hf_dpopt.sampling.cyclic_poisson import CyclicPoissonSampler
from recipes.paper.runs import Folder, KeptRuns, best_of, experiment, interval, panels, percent, save
from recipes.paper.texts import bucket, sst2

BUCKETS, WIDTH, MAX_WORDS = 8192, 16, 32
NUM_TRAIN, NUM_TUNING, BATCH, MOMENTUM, DELTA = 25_000, 5_000, 250, 0.9, 1e-5
EPSILONS = (2.0, 4.0, 8.0, 16.0)
NUM_SEEDS, TUNING_SEEDS = 5, (1000, 1001)
EPOCH = "epoch"  # stands for the steps of one: a stamped mechanism is the one of an epoch, over and over
BLOCK = 100  # steps whose noise is made at once
MECHANISMS: dict[str, dict[str, Any]] = {
    "DP-SGD, amplified": {"noise_mechanism": "gaussian"},
    "tree": {"noise_mechanism": "tree"},
    "Honaker": {"noise_mechanism": "honaker"},
    "nu = 0": {"noise_mechanism": "nu_dpftrl", "noise_kwargs": {"nu": 0.0}},
    "best nu": {"noise_mechanism": "nu_dpftrl"},
    "BLT": {"noise_mechanism": "blt"},
    "banded, cyclic Poisson": {"noise_mechanism": "banded"},
    "nu, balls in bins": {"noise_mechanism": "nu_dpftrl", "sampling": "balls_in_bins"},
    "Fourier": {"noise_mechanism": "fft"},
    "nu = 0, stamped": {"noise_mechanism": "nu_dpftrl", "noise_kwargs": {"nu": 0.0}, "noise_restart_every": EPOCH},
    "dense, stamped": {"noise_mechanism": "dense", "noise_restart_every": EPOCH},
    "dense, multi-epoch": {"noise_mechanism": "dense"},
}
# two budgets for rows that are behind by their predicted error, or whose noise or plan takes long
BUDGETS = dict.fromkeys(MECHANISMS, EPSILONS) | dict.fromkeys(
    ("tree", "Honaker", "nu, balls in bins", "Fourier", "nu = 0, stamped", "dense, stamped", "dense, multi-epoch"),
    (2.0, 8.0),
)
REFERENCES = {"over_dp_sgd": "DP-SGD, amplified", "over_best_nu": "best nu"}
# streams of these draw every earlier row again; a product with the matrix is the same noise, and faster
BY_MATRIX = ("Fourier", "dense, stamped", "dense, multi-epoch")
START = 1.0  # learning rate where every climb begins


# --- records and model -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Bags:
    """Records as shares of words: how often a word occurs / number of words.

    Args:
        shares_NV: shares, float32; the entries of a row are its distinct words.
        squares_N: sums of the squared shares of a record, float32.
        labels_N: 0 or 1.
    """

    shares_NV: csr_matrix
    squares_N: np.ndarray
    labels_N: np.ndarray

    def __getitem__(self, rows: Any) -> Bags:
        return Bags(self.shares_NV[rows], self.squares_N[rows], self.labels_N[rows])


@dataclasses.dataclass(frozen=True)
class Phrases:
    """Records to train on, those that choose the learning rate, and those that are reported."""

    train: Bags
    tuning: Bags
    test: Bags


def bags(phrases: Sequence[str], labels: Sequence[int]) -> Bags:
    """Words hashed to buckets and counted; a phrase without words is one word, of bucket 0."""
    places, columns, shares = [], [], []
    for i, phrase in enumerate(phrases):
        words = [bucket(word, BUCKETS) for word in phrase.lower().split()[:MAX_WORDS]] or [0]
        counts = Counter(words)
        places += [i] * len(counts)
        columns += list(counts)
        shares += [count / len(words) for count in counts.values()]
    matrix = csr_matrix((shares, (places, columns)), shape=(len(phrases), BUCKETS), dtype=np.float32)
    return Bags(matrix, np.asarray(matrix.multiply(matrix).sum(axis=1)).ravel(), np.array(labels))


def read_phrases(path: Path) -> Phrases:
    """The 25,000 records to train on, 5,000 to choose by, and the rest to report."""
    texts, labels = sst2(path)
    every, order = bags(texts, labels), np.random.default_rng(0).permutation(len(texts))
    ends = NUM_TRAIN, NUM_TRAIN + NUM_TUNING
    return Phrases(every[order[: ends[0]]], every[order[ends[0] : ends[1]]], every[order[ends[1] :]])


def parts(weights_D: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Word vectors (V, W), head (2, W) and its bias (2,) of a vector of all weights: views."""
    words, head = BUCKETS * WIDTH, 2 * WIDTH
    return (
        weights_D[:words].reshape(BUCKETS, WIDTH),
        weights_D[words : words + head].reshape(2, WIDTH),
        weights_D[words + head :],
    )


def initial_weights(seed: int) -> np.ndarray:
    """Weights in the law of torch's layers, and no bias; float32, (D,)."""
    rng, bound = np.random.default_rng(seed), WIDTH**-0.5
    values = rng.standard_normal(BUCKETS * WIDTH), rng.uniform(-bound, bound, 2 * WIDTH), np.zeros(2)
    return np.concatenate(values).astype(np.float32)


def logits(records: Bags, weights_D: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Means of word vectors, (N, W), and logits, (N, 2)."""
    vectors_VW, head, bias = parts(weights_D)
    means_NW = records.shares_NV @ vectors_VW
    return means_NW, means_NW @ head.T + bias


def clipped_sum(batch: Bags, weights_D: np.ndarray, clipper: Clipping) -> np.ndarray:
    """Sum of the clipped gradients of the cross entropy, (D,).

    With the residual r = p - y and the mean h of the word vectors, the head's gradient is ``r h^T``, its bias' is r,
    and that of a word vector is the share of the word times ``head^T r``.
    """
    _, head, _ = parts(weights_D)
    means_BW, logits_B2 = logits(batch, weights_D)
    residuals_B2 = np.exp(logits_B2 - logits_B2.max(axis=1, keepdims=True))
    residuals_B2 /= residuals_B2.sum(axis=1, keepdims=True)
    residuals_B2[np.arange(len(residuals_B2)), batch.labels_N] -= 1
    back_BW = residuals_B2 @ head
    squares_B = (residuals_B2**2).sum(axis=1) * ((means_BW**2).sum(axis=1) + 1)
    squares_B += (back_BW**2).sum(axis=1) * batch.squares_N
    factors_B = clipper.factors({"": torch.from_numpy(squares_B)})[""].numpy()
    residuals_B2 *= factors_B[:, None]
    back_BW *= factors_B[:, None]
    sums = batch.shares_NV.T @ back_BW, residuals_B2.T @ means_BW, residuals_B2.sum(axis=0)
    return np.concatenate([np.ravel(part) for part in sums])


def accuracy(records: Bags, weights_D: np.ndarray) -> float:
    return float((logits(records, weights_D)[1].argmax(axis=1) == records.labels_N).mean())


# --- noise -----------------------------------------------------------------------------------------------------------


def workload(num_steps: int) -> Workload:
    """Momentum and cool-down, for which the noise is tuned."""
    return momentum_workload(num_steps, MOMENTUM, linear_cooldown(num_steps, num_steps // 4))


def make(name: str, epsilon: float, num_steps: int) -> PrivacyPlan:
    """The plan of a cell; as many bands as are best, whatever they keep."""
    wanted, options = workload(num_steps), dict(MECHANISMS[name])
    if options["noise_mechanism"] == "banded":
        sampler = CyclicPoissonSampler(num_examples=NUM_TRAIN, expected_batch_size=BATCH)
        bands = choose_num_bands(sampler, num_steps, epsilon, DELTA, workload=wanted)
        options["noise_kwargs"] = {"num_bands": bands}
    if options.get("noise_restart_every") == EPOCH:
        options["noise_restart_every"] = -(-NUM_TRAIN // BATCH)
    config = PrivacyConfig(target_epsilon=epsilon, target_delta=DELTA, expected_batch_size=BATCH, **options)
    return make_plan(config, num_examples=NUM_TRAIN, num_steps=num_steps, workload=wanted)


def noise_of_a_run(strategy: NoiseStrategy, name: str, seed: int, num_steps: int) -> np.ndarray:
    """Noise of every step of a run at draws of stddev 1, float32, (steps, D): that of the package's stream.

    The same for every budget and learning rate, which only scale it; of its own for every mechanism and seed.
    """
    source = ChaCha20Gaussian(np.random.default_rng([seed, zlib.crc32(name.encode())]).bytes(32))
    noise_TD = np.zeros((num_steps, BUCKETS * WIDTH + 2 * WIDTH + 2), dtype=np.float32)
    if name in BY_MATRIX:
        for t, row in enumerate(noise_TD):
            row[:] = source.normal(row.shape, step=t, tensor=0).numpy()
        matrix = strategy.noising_matrix(num_steps).astype(np.float32)
        for first in reversed(range(0, num_steps, BLOCK)):  # in place: no later step needs what is overwritten
            end = min(first + BLOCK, num_steps)
            noise_TD[first:end] = matrix[first:end, :end] @ noise_TD[:end]
        return noise_TD
    stream = strategy.stream(source, scale=1.0, num_steps=num_steps)
    for t, row in enumerate(noise_TD):
        stream.add_({"weights": torch.from_numpy(row)}, t)
    return noise_TD


# --- runs ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Run:
    """All that a result depends on."""

    mechanism: str
    epsilon: float
    rate: float
    seed: int
    num_steps: int


Plans = Callable[[str, float, int], PrivacyPlan]
Noise = Callable[[NoiseStrategy, str, int, int], np.ndarray]


def train(phrases: Phrases, plans: Plans, noise: Noise, run: Run) -> dict[str, Any]:
    """Accuracies of one private run: `private_step` without ledger and with fixed keys, for the data are public."""
    plan = plans(run.mechanism, run.epsilon, run.num_steps)
    sampling_key = np.random.default_rng(run.seed).bytes(32)  # the same batches for rows with the same sampler
    noise_TD = noise(plan.strategy, run.mechanism, run.seed, run.num_steps)
    stddev = float(plan.draw_stddev * plan.sensitivity)
    weights_D = initial_weights(run.seed)
    momentum_D = np.zeros_like(weights_D)
    sizes = linear_cooldown(run.num_steps, run.num_steps // 4)
    for step, size in enumerate(sizes, start=1):
        total_D = clipped_sum(phrases.train[plan.sampler.draw(sampling_key, step)], weights_D, plan.clipper)
        total_D += stddev * noise_TD[step - 1]
        momentum_D *= MOMENTUM
        momentum_D += total_D / BATCH
        weights_D -= run.rate * size * momentum_D
    return {"tuning": accuracy(phrases.tuning, weights_D), "test": accuracy(phrases.test, weights_D)}


def cells(runs: KeptRuns, plans: Plans, mechanism: str, epsilons: Sequence[float], num_steps: int) -> list[dict]:
    """The cells of a row, each at the best learning rate of a climb; its accuracies are those of the seeds in %.

    A seed of all budgets in turn, for they share its noise.
    """
    best = []
    for epsilon in epsilons:
        run = Run(mechanism, epsilon, 0.0, 0, num_steps)
        scores = runs.rates(run, START, TUNING_SEEDS, "tuning")
        best.append(dataclasses.replace(run, rate=best_of(scores)))
    found = [[runs.of_seeds(run, [seed])[0]["test"] for run in best] for seed in range(NUM_SEEDS)]
    return [
        {"mechanism": mechanism, "epsilon": run.epsilon, "accuracy": float(scores.mean()),
         "stddev": float(scores.std(ddof=1)), "rate": run.rate, **facts_of(plans(mechanism, run.epsilon, num_steps)),
         "_scores": scores}
        for run, scores in zip(best, percent(found).T, strict=True)
    ]  # fmt: skip


def facts_of(plan: PrivacyPlan) -> dict[str, Any]:
    """Numbers of a plan that are known before training."""
    errors = predicted_errors(plan, workload(plan.num_steps))
    return {
        "spent": plan.epsilon(), "adjacency": plan.adjacency, "sampler": plan.sampler.name,
        "num_bands": plan.strategy.num_bands, "draw_stddev": plan.draw_stddev,
        "predicted_error": float(np.sqrt(np.mean(errors**2))),
    }  # fmt: skip


# --- table and plot --------------------------------------------------------------------------------------------------


def with_differences(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with their differences from the references and their intervals, in points."""
    scores = {(row["mechanism"], row["epsilon"]): row["_scores"] for row in rows}
    for row in rows:
        for column, reference in REFERENCES.items():
            if row["mechanism"] != reference and (reference, row["epsilon"]) in scores:
                mean, half = interval(row["_scores"] - scores[reference, row["epsilon"]])
                row[column] = {"mean": mean, "half_of_95_interval": half}
    return rows


def plot(numbers: dict[str, Any], picture: Path) -> None:
    """Differences from DP-SGD with their intervals, a panel for each budget."""
    rows, reference = numbers["rows"], REFERENCES["over_dp_sgd"]
    epsilons = sorted({row["epsilon"] for row in rows})
    names = [name for name in dict.fromkeys(row["mechanism"] for row in rows) if name != reference]
    figure, axes = panels(len(epsilons), width=3.0, height=4.0)
    for axis, epsilon in zip(axes, epsilons, strict=True):
        here = {row["mechanism"]: row for row in rows if row["epsilon"] == epsilon}
        for i, name in enumerate(names):
            if difference := here.get(name, {}).get("over_dp_sgd"):
                bar = difference["mean"], i, None, difference["half_of_95_interval"]
                axis.errorbar(*bar, marker="o", markersize=4, capsize=3, color=f"C{i % 10}")
        axis.axvline(0.0, color="#7f7f7f", linewidth=1)
        axis.set_yticks(range(len(names)), names if axis is axes[0] else [""] * len(names))
        axis.set_ylim(len(names) - 0.5, -0.5)
        level = f"\nDP-SGD {here[reference]['accuracy']:.1f} %" if reference in here else ""
        axis.set(xlabel="points over DP-SGD", title=f"epsilon {epsilon:g}{level}")
    save(figure, picture)


def compute(given: argparse.Namespace) -> dict[str, Any]:
    plans = functools.cache(make)
    noise = functools.lru_cache(maxsize=len(TUNING_SEEDS))(noise_of_a_run)
    phrases = read_phrases(given.data / "train.tsv")
    runs = KeptRuns(given.output_dir / "training_runs.jsonl", functools.partial(train, phrases, plans, noise))
    rows: list[dict[str, Any]] = []
    for name in given.mechanisms:
        epsilons = [epsilon for epsilon in given.epsilons if epsilon in BUDGETS[name]]
        rows += cells(runs, plans, name, epsilons, given.num_steps)
    return {"rows": with_differences(rows)}


main = experiment(
    "training", compute, plot, data=Folder("folder with SST-2's train.tsv"), num_steps=2000, epsilons=EPSILONS,
    mechanisms=tuple(MECHANISMS),
)  # fmt: skip

if __name__ == "__main__":
    main()
