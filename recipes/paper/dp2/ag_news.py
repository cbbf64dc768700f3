"""DP^2 on news leads in four classes: sparse features and several outputs, where a factored D differs from a full one.

Multinomial logistic regression on the frequencies of 10,000 hashed words. Every method has the best of a grid, found
under a seed and on records that are not reported; and two methods without the biases, which fill the norms that are
clipped. Runs are kept in ``dp2_ag_news.jsonl``.

    python -m recipes.paper.dp2.ag_news --data FOLDER --output_dir docs/reproductions

FOLDER holds train.tsv and test.tsv (text, class name; no header).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from recipes.paper.dp2.data import ag_news
from recipes.paper.dp2.imdb import plot_curves
from recipes.paper.dp2.training import Method, Runs, Setting
from recipes.paper.runs import Folder, experiment

DELAY = 65
SETTING = Setting(batch=128, num_steps=24 * DELAY, noise_multiplier=1.0)  # 20 epochs
RATES = [1.0, 3.0, 10.0]
DP2 = {"rate": [0.1], "rate_adaptive": RATES, "clip": [0.5], "clip_adaptive": [5.0], "eps": [1e-7]}
METHODS = [
    Method("DP-SGD", [{"rate": [5.0, 15.0, 50.0], "clip": [0.5]}, {"rate": [15.0, 50.0, 150.0], "clip": [0.1]}]),
    Method(
        "DP-Adam",
        [{"rate": [0.03, 0.1, 0.3], "clip": [0.5], "eps": [1e-8]}, {"rate": [0.1], "clip": [0.1], "eps": [1e-8]}],
        optimizer="adam",
    ),
    Method("DP-RMSProp", [{"rate": [0.1, 0.3, 1.0], "clip": [0.5], "eps": [1e-3]}], optimizer="rmsprop"),
    Method(
        "AdaDPS",
        [{"rate": RATES, "clip": [5.0], "eps": [1e-3]}],
        preconditioner="adadps",
        options={"refresh_every": 5},
    ),
    Method("DP2-RMSProp", [DP2], preconditioner="dp2_rmsprop", options={"delay": DELAY}),
    Method("DP2-RMSProp, factored", [DP2], preconditioner="dp2_rmsprop", options={"delay": DELAY, "factored": True}),
]
NO_BIAS = [
    Method("DP-SGD", [{"rate": [50.0, 150.0, 500.0], "clip": [0.1]}]),
    Method(
        "DP2-RMSProp", [DP2 | {"clip": [0.1], "rate": [1.0]}], preconditioner="dp2_rmsprop", options={"delay": DELAY}
    ),
]


def compute(given: argparse.Namespace) -> dict[str, Any]:
    def table(methods: list[Method], *, bias: bool) -> list[dict[str, Any]]:
        path = given.output_dir / "dp2_ag_news.jsonl"
        runs = Runs(path, ag_news(given.data, bias=bias), methods, evaluate_every=DELAY)
        return runs.best([method.name for method in methods], SETTING, given.num_seeds)

    return {"table": table(METHODS, bias=True), "no_bias": table(NO_BIAS, bias=False)}


def plot(numbers: dict[str, Any], path: Path) -> None:
    names = [method.name for method in METHODS]
    plot_curves(numbers["table"], path, [("AG News, noise multiplier 1", names)])


main = experiment("dp2_ag_news", compute, plot, data=Folder("folder with train.tsv and test.tsv"), num_seeds=3)

if __name__ == "__main__":
    main()
