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

from recipes.paper.dp2 import output
from recipes.paper.dp2.data import ag_news
from recipes.paper.dp2.training import Method, Runs, Setting

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with train.tsv and test.tsv")
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--num_seeds", type=int, default=3)
    arguments = parser.parse_args()
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    path = arguments.output_dir / "dp2_ag_news.jsonl"

    def table(methods: list[Method], *, bias: bool) -> list[dict[str, Any]]:
        runs = Runs(path, ag_news(arguments.data, bias=bias), evaluate_every=DELAY)
        return [runs.report(method, SETTING, runs.tune(method, SETTING), arguments.num_seeds) for method in methods]

    rows, no_bias = table(METHODS, bias=True), table(NO_BIAS, bias=False)
    numbers = {"table": rows, "no_bias": no_bias}
    output.save_numbers(path.with_suffix(".json"), "python -m recipes.paper.dp2.ag_news", numbers)
    names = [method.name for method in METHODS]
    output.curves(rows, path.with_suffix(".png"), [("AG News, noise multiplier 1", names)])


if __name__ == "__main__":
    main()
