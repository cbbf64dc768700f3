"""Write ``docs/what_pays.md`` from the JSON files of the reproductions in ``docs/reproductions``.

    python -m recipes.paper.what_pays --write

A gain is a difference in test accuracy, in points, with half of its 95 % interval: Student's t over paired seeds, or
Welch's t over unpaired seeds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as student

from recipes.paper.runs import percent, unpaired

FOLDER = Path(__file__).parents[2] / "docs" / "reproductions"
PAGE = FOLDER.parent / "what_pays.md"


@dataclasses.dataclass(frozen=True)
class Effect:
    """One comparison of a method with a baseline whose learning rate was tuned as well.

    Args:
        gain: difference in test accuracy, points.
        half: half of the 95 % interval, points: the smallest gain that the runs could show.
        seeds: number of pairs, or of runs of each method.
        is_paired: whether both runs of a seed share batches and initial weights.
    """

    method: str
    against: str
    task: str
    epsilon: float
    gain: float
    half: float
    seeds: int = 5
    is_paired: bool = True

    @property
    def verdict(self) -> str:
        if self.gain - self.half > 0:
            return "pays"
        return "costs" if self.gain + self.half < 0 else "not seen"


def without_pairs(method: str, against: str, task: str, epsilon: float, with_it: Any, without: Any) -> Effect:
    """Compare accuracies in [0, 1] of unpaired seeds."""
    gain, half = unpaired(percent(with_it), percent(without))
    return Effect(method, against, task, epsilon, gain, half, len(with_it), False)


def load(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


QUERY_METHODS = ("banded SGD", "independent noise, D from one query", "banded, D from one query")
TOP_LAYER = "SST-2, LoRA in the top layer of MiniLM"
NAMES = {"dp_sgd": "DP-SGD", "dp_adam_bc": "DP-AdamBC", "dp_adamw": "DP-AdamW"}
LOW_PASS = "filter first_order_v1"
OF_LORA = {"tangent": "tangent space of BA", "histogram": "first clip from a private histogram"}


def one_query(words: dict, top_layer: dict) -> Iterator[Effect]:
    """Correlated noise, with and without a scale before the clip, against AdamW."""
    tasks = {"sst2": "SST-2 phrases, words", "imdb": "film reviews, words"}
    for row in words["rows"] + top_layer["rows"]:
        if row["method"] in QUERY_METHODS:
            task, values = tasks.get(row.get("task"), TOP_LAYER), (row["over_dp_adamw"], row["half_of_95_interval"])
            yield Effect(row["method"], "DP-AdamW", task, row["epsilon"], *values, len(row.get("test", range(5))))


def correlated(found: dict, short: dict) -> Iterator[Effect]:
    """Noise mechanisms with SGD and momentum, against independent noise with amplification by sampling."""
    task = "SST-2 phrases, learned embeddings"
    for row, steps in [(row, "") for row in found["rows"]] + [(row, ", 1,000 steps") for row in short["rows"]]:
        if over := row.get("over_dp_sgd"):
            values = over["mean"], over["half_of_95_interval"]
            yield Effect(row["mechanism"], "DP-SGD", task + steps, row["epsilon"], *values)


def low_pass(top_layer: dict, from_scratch: dict, regimes: dict) -> Iterator[Effect]:
    """DOPPLER: SGD and Adam with a filter."""
    for row in top_layer["rows"]:
        first = row["cells"][0]
        values = row["gain"], row["half_of_95_interval"], len(first["test"])
        yield Effect(LOW_PASS, NAMES[first["optimizer"]], TOP_LAYER, first["epsilon"], *values)
    task = "AG News, a small transformer from scratch"
    for row in from_scratch["gains"]:
        if row["optimizer"] in NAMES:
            half = student.ppf(0.975, 2) * row["error"]
            yield Effect(LOW_PASS, NAMES[row["optimizer"]], task, row["epsilon"], row["gain"], half, 3)
    for name, cell in regimes["regimes"].items():
        values = cell["gain"], cell["half_of_95_interval"], len(cell["accuracies"]["plain"])
        yield Effect(LOW_PASS, "DP-SGD", f"regime {name}", regimes["options"]["epsilon"], *values)


def delayed(imdb: dict, posts: dict) -> Iterator[Effect]:
    """DP^2, AdaDPS and one query, with the paper's bias of 1 and without it."""
    bases = ("DP-SGD", "DP-Adam")
    for name, where in (("table", "bias 1"), ("presence", "presence"), ("no_bias", "no bias")):
        rows = {row["method"]: row for row in imdb[name]}
        for base in bases:
            epsilon, test = round(rows[base]["epsilon"], 1), rows["DP2-RMSProp"]["test"]
            yield without_pairs("DP2-RMSProp", base, f"film reviews, {where}", epsilon, test, rows[base]["test"])
    features = {"frequencies, bias": "bias 1", "frequencies, small bias": "bias 0.1"}
    for row in posts["rows"]:
        if row["method"] in ("DP2-RMSProp", "one query", "AdaDPS") and row["features"] in features:
            task = f"posts of Stack Exchange, {features[row['features']]}"
            for base in bases:
                yield Effect(row["method"], base, task, row["epsilon"], *row[f"over {base}"])


def subspaces(found: dict) -> Iterator[Effect]:
    """Public subspaces, and training on the public records first."""
    rows = {(row["row"], row["epsilon"]): row["accuracies"] for row in found["rows"] if row["epsilon"] is not None}
    for (method, epsilon), accuracies in rows.items():
        if method not in ("DP-SGD", "DP-Adam"):
            task = "topics, 500 public records"
            yield without_pairs(method, "DP-SGD", task, epsilon, accuracies, rows["DP-SGD", epsilon])


def last_iterate(found: dict) -> Iterator[Effect]:
    """The last-iterate bound against composition, each with its best number of steps."""
    for task, epsilon in sorted({(cell["task"], cell["epsilon"]) for cell in found["cells"]}):
        cells = [cell for cell in found["cells"] if (cell["task"], cell["epsilon"]) == (task, epsilon)]
        ways = sorted({cell["accounting"] for cell in cells}, key=lambda way: way == "composition")
        best = [max((cell["accuracies"] for cell in cells if cell["accounting"] == way), key=np.mean) for way in ways]
        yield without_pairs("last-iterate bound", "composition", f"head on features, {task}", epsilon, *best)


def adapters(changes: dict, public: dict) -> Iterator[Effect]:
    """Changes of LoRA, and public text before it."""
    for row in [*changes["rows"][1:], *public["rows"][1:]]:
        gain = row["accuracy_gain"]["mean"], row["accuracy_gain"]["half_of_95_interval"]
        method = OF_LORA.get(row["variant"], row["variant"])
        yield Effect(method, row.get("against", "LoRA"), f"{TOP_LAYER}, 10,000 phrases", row["epsilon"], *gain)


SECTIONS = {
    "Correlated noise with SGD": (correlated, ["training.json", "training_1000.json"]),
    "A query before the first step, and correlated noise": (
        one_query, ["one_query_words.json", "one_query_top_layer.json"],
    ),
    "Scales from the gradients: DP^2, one query, public records": (
        delayed, ["dp2_imdb.json", "dp2_stackexchange.json"],
    ),
    "Low-pass filters": (low_pass, ["doppler_top_layer.json", "doppler_from_scratch.json", "doppler_regimes.json"]),
    "Public subspaces": (subspaces, ["subspace_task.json"]),
    "LoRA": (adapters, ["lora.json", "lora_public.json"]),
    "The last-iterate bound": (last_iterate, ["convergent_utility.json"]),
}  # fmt: skip
# results whose code was removed, because nothing or little was gained: the last commit that has it
CODE = dict.fromkeys(
    ("one_query_top_layer.json", "doppler_top_layer.json", "subspace_task.json", "convergent_utility.json"), "79152dd"
) | {"doppler_regimes.json": "cfa1584", "lora.json": "0b13f66", "lora_public.json": "1c55738"}
HEAD = """# What pays where

Each row compares a method with a tuned baseline: the difference in test accuracy, in points, with half of its 95 %
interval. In brackets is the number of seeds, paired unless marked with `*`. A method **pays** if the whole interval is
above 0 and **costs** if it is below 0. Otherwise the difference is not seen, which does not mean that there is none:
half of the interval is the smallest gain that the runs could show. By chance, about one row in twenty without an
effect has an interval on one side of 0.

`python -m recipes.paper.what_pays --write` makes this page from the files that each section names.
[reproductions.md](reproductions.md) has the settings, commands and reasons.
"""


REMOVED = """
## Measured and removed

These methods had no consistent gain over tuned baselines and are not in the package. The commit has the code, the
command and the runs, five paired seeds in each cell.

| method | paper | against | cells | pays | costs | not seen | commit |
|---|---|---|---|---|---|---|---|
| joint moment estimation (JME), words | arXiv:2502.06597 | DP-AdamW, DP-AdamBC | 18 | 1 | 0 | 17 | 8432830 |
| DP-Muon, without and with bias correction | arXiv:2605.12994 | DP-AdamW | 15 | 2 | 1 | 12 | b69cae3 |
| spectral denoising, before Adam and as its first moment | arXiv:2510.01137 | DP-AdamW | 13 | 0 | 10 | 3 | b69cae3 |
"""


def page() -> str:
    """The table in Markdown."""
    parts = [HEAD]
    for title, (section, sources) in SECTIONS.items():
        parts.append(
            f"\n## {title}\n\n| method | against | task | epsilon | gain | verdict |\n|---|---|---|---|---|---|\n"
        )
        for one in section(*map(load, sources)):
            mark = "" if one.is_paired else "*"
            gain = f"{one.gain:+.1f} +- {one.half:.1f}{mark}"
            verdict = f"**{one.verdict}**" if one.verdict != "not seen" else one.verdict
            parts.append(
                f"| {one.method} | {one.against} | {one.task} | {one.epsilon:g} | {gain} ({one.seeds}) | {verdict} |\n"
            )
        commits = {name: f" (code: commit {CODE[name]})" if name in CODE else "" for name in sources}
        links = [f"[{name}](reproductions/{name}){commit}" for name, commit in commits.items()]
        parts.append(f"\nFrom {', '.join(links)}.\n")
    return "".join([*parts, REMOVED])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the page")
    if parser.parse_args().write:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page())


if __name__ == "__main__":
    main()
