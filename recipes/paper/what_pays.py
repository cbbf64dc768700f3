"""One table of what pays where, made of the results of the reproductions.

    python -m recipes.paper.what_pays --write

reads the JSON files in ``docs/reproductions`` and writes ``docs/what_pays.md``.

A gain is a difference in test accuracy, in points, with half of its 95 % interval: Student's t over paired seeds, or
Welch's over seeds that are no pairs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from scipy.stats import t as student

FOLDER = Path(__file__).parents[2] / "docs" / "reproductions"
PAGE = FOLDER.parent / "what_pays.md"
Kind = Literal["linear", "lora", "full"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Effect:
    """One comparison.

    Args:
        method: in words.
        against: likewise; learning rates of both were tuned.
        kind: "linear" models of words, "lora" adapters, or "full" training, here of small models.
        epsilon: as planned; those of the table stand side by side.
        gain: points of accuracy.
        half: of the 95 % interval, points; the smallest gain that would have been seen.
        seeds: pairs, or runs of each.
        is_paired: whether seeds share batches and initial weights.
        source: file with the runs.
    """

    method: str
    against: str
    kind: Kind
    task: str
    epsilon: float
    gain: float
    half: float
    seeds: int
    is_paired: bool
    source: str

    @property
    def verdict(self) -> str:
        if self.gain - self.half > 0:
            return "pays"
        return "costs" if self.gain + self.half < 0 else "not seen"


def load(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / name).read_text(encoding="utf-8"))


def unpaired(with_it: list[float], without: list[float]) -> tuple[float, float]:
    """Difference of means, and half of its 95 % interval, by Welch."""
    sizes = (len(with_it), len(without))
    parts = (np.var(with_it, ddof=1) / sizes[0], np.var(without, ddof=1) / sizes[1])
    freedom = sum(parts) ** 2 / sum(part**2 / (size - 1) for part, size in zip(parts, sizes, strict=True))
    half = student.ppf(0.975, freedom) * math.sqrt(sum(parts))
    return float(np.mean(with_it) - np.mean(without)), float(half)


QUERY_METHODS = ("banded SGD", "independent noise, D from one query", "banded, D from one query")


def one_query() -> Iterator[Effect]:
    """Correlated noise and a scale before it, against AdamW."""
    tasks = {"sst2": "SST-2 phrases, words", "imdb": "film reviews, words"}
    for row in load("one_query_words.json")["rows"]:
        if row["method"] in QUERY_METHODS:
            yield Effect(
                method=row["method"], against="DP-AdamW", kind="linear", task=tasks[row["task"]],
                epsilon=row["epsilon"], gain=row["over_dp_adamw"], half=row["half_of_95_interval"], seeds=5,
                is_paired=True, source="one_query_words.json",
            )  # fmt: skip
    for row in load("one_query_top_layer.json")["rows"]:
        if row["method"] in QUERY_METHODS:
            yield Effect(
                method=row["method"], against="DP-AdamW", kind="lora", task="SST-2, LoRA in the top layer of MiniLM",
                epsilon=row["epsilon"], gain=row["over_dp_adamw"], half=row["half_of_95_interval"],
                seeds=len(row["test"]), is_paired=True, source="one_query_top_layer.json",
            )  # fmt: skip


def correlated() -> Iterator[Effect]:
    """Mechanisms with SGD and momentum, against independent noise of amplified batches."""
    for row in load("training.json")["rows"]:
        over = row.get("over_dp_sgd")
        if over is not None:
            yield Effect(
                method=row["mechanism"], against="DP-SGD", kind="linear", task="SST-2 phrases, learned embeddings",
                epsilon=row["epsilon"], gain=over["mean"], half=over["half_of_95_interval"], seeds=5, is_paired=True,
                source="training.json",
            )  # fmt: skip


def low_pass() -> Iterator[Effect]:
    """DOPPLER: SGD and Adam with a filter."""
    names = {"dp_sgd": "DP-SGD", "dp_adam_bc": "DP-AdamBC", "dp_adamw": "DP-AdamW"}
    for row in load("doppler_top_layer.json")["rows"]:
        first = row["cells"][0]
        yield Effect(
            method="filter first_order_v1", against=names[first["optimizer"]], kind="lora",
            task="SST-2, LoRA in the top layer of MiniLM", epsilon=first["epsilon"], gain=row["gain"],
            half=row["half_of_95_interval"], seeds=len(first["test"]), is_paired=True,
            source="doppler_top_layer.json",
        )  # fmt: skip
    for row in load("doppler_from_scratch.json")["gains"]:
        if row["optimizer"] in names:
            yield Effect(
                method="filter first_order_v1", against=names[row["optimizer"]], kind="full",
                task="AG News, a small transformer from scratch", epsilon=row["epsilon"], gain=row["gain"],
                half=student.ppf(0.975, 2) * row["error"], seeds=3, is_paired=True,
                source="doppler_from_scratch.json",
            )  # fmt: skip


def delayed() -> Iterator[Effect]:
    """DP^2, and what else scales before the noise, with a bias as the paper has it and without that advantage."""
    found = load("dp2_imdb.json")
    for rows, where in ((found["table"], "bias 1"), (found["presence"], "presence"), (found["no_bias"], "no bias")):
        by_method = {row["method"]: row for row in rows}
        for base in ("DP-SGD", "DP-Adam"):
            gain, half = unpaired(*(_percent(by_method[name]["test"]) for name in ("DP2-RMSProp", base)))
            yield Effect(
                method="DP2-RMSProp", against=base, kind="linear", task=f"film reviews, {where}",
                epsilon=round(by_method[base]["epsilon"], 1), gain=gain, half=half,
                seeds=len(by_method[base]["test"]), is_paired=False, source="dp2_imdb.json",
            )  # fmt: skip
    features = {"frequencies, bias": "bias 1", "frequencies, small bias": "bias 0.1"}
    for row in load("dp2_stackexchange.json")["rows"]:
        if row["method"] in ("DP2-RMSProp", "one query", "AdaDPS") and row["features"] in features:
            for base in ("DP-SGD", "DP-Adam"):
                gain, half = row[f"over {base}"]
                yield Effect(
                    method=row["method"], against=base, kind="linear",
                    task=f"posts of Stack Exchange, {features[row['features']]}", epsilon=row["epsilon"], gain=gain,
                    half=half, seeds=5, is_paired=True, source="dp2_stackexchange.json",
                )  # fmt: skip


def _percent(accuracies: list[float]) -> list[float]:
    return [100 * one for one in accuracies]


def subspaces() -> Iterator[Effect]:
    """Public subspaces, beside training on public records first."""
    rows = {(row["row"], row["epsilon"]): _percent(row["accuracies"]) for row in load("subspace_task.json")["rows"]}
    for (method, epsilon), accuracies in rows.items():
        if epsilon is not None and method not in ("DP-SGD", "DP-Adam"):
            gain, half = unpaired(accuracies, rows["DP-SGD", epsilon])
            yield Effect(
                method=method, against="DP-SGD", kind="full", task="topics, 500 public records", epsilon=epsilon,
                gain=gain, half=half, seeds=len(accuracies), is_paired=False, source="subspace_task.json",
            )  # fmt: skip


def last_iterate() -> Iterator[Effect]:
    """The last-iterate bound against composition, each with its best number of steps."""
    cells = load("convergent_utility.json")["cells"]
    settings = sorted({(cell["task"], cell["epsilon"]) for cell in cells})
    for task, epsilon in settings:
        best = {
            way: max(
                (_percent(cell["accuracies"]) for cell in cells
                 if (cell["task"], cell["epsilon"], cell["accounting"]) == (task, epsilon, way)),
                key=lambda found: float(np.mean(found)),
            )
            for way in {cell["accounting"] for cell in cells}
        }  # fmt: skip
        (other,) = set(best) - {"composition"}
        gain, half = unpaired(best[other], best["composition"])
        yield Effect(
            method="last-iterate bound", against="composition", kind="linear", task=f"head on features, {task}",
            epsilon=epsilon, gain=gain, half=half, seeds=len(best[other]), is_paired=False,
            source="convergent_utility.json",
        )  # fmt: skip


SECTIONS = {
    "Correlated noise with SGD": correlated,
    "A query before the first step, and correlated noise": one_query,
    "Scales from the gradients: DP^2, one query, public records": delayed,
    "Low-pass filters": low_pass,
    "Public subspaces": subspaces,
    "The last-iterate bound": last_iterate,
}
HEAD = """# What pays where

Differences in test accuracy, in points, with half of the 95 % interval: of five or three seeds, paired unless marked
with `*`. Half of the interval is the smallest gain that could have been seen. "pays" and "costs" are intervals that
lie on one side of 0; everything else is "not seen", which is no proof of nothing. With so many rows one in twenty
of those without an effect is on one side by chance. Made by `python -m recipes.paper.what_pays --write` from the files
named; [reproductions.md](reproductions.md) has the settings, commands and reasons.
"""


REMOVED = """
## Measured and removed

Methods without a consistent gain over tuned baselines, which are not in the package. The commit has the code, the
command and the runs: five paired seeds in each cell.

| method | paper | against | cells | pays | costs | not seen | commit |
|---|---|---|---|---|---|---|---|
| joint moment estimation (JME), words | arXiv:2502.06597 | DP-AdamW, DP-AdamBC | 18 | 1 | 0 | 17 | 8432830 |
| DP-Muon, without and with bias correction | arXiv:2605.12994 | DP-AdamW | 15 | 2 | 1 | 12 | b69cae3 |
| spectral denoising, before Adam and as its first moment | arXiv:2510.01137 | DP-AdamW | 13 | 0 | 10 | 3 | b69cae3 |
"""


def page() -> str:
    """The table in Markdown."""
    parts = [HEAD]
    for title, section in SECTIONS.items():
        parts.append(
            f"\n## {title}\n\n| method | against | task | epsilon | gain | verdict |\n|---|---|---|---|---|---|\n"
        )
        sources = []
        for one in section():
            mark = "" if one.is_paired else "*"
            gain = f"{one.gain:+.1f} +- {one.half:.1f}{mark}"
            verdict = f"**{one.verdict}**" if one.verdict != "not seen" else one.verdict
            parts.append(
                f"| {one.method} | {one.against} | {one.task} | {one.epsilon:g} | {gain} ({one.seeds}) | {verdict} |\n"
            )
            sources += [one.source] if one.source not in sources else []
        links = ", ".join(f"[{name}](reproductions/{name})" for name in sources)
        parts.append(f"\nFrom {links}; in brackets the seeds.\n")
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
