"""The runner of all experiments: options, kept runs, the search for values, intervals, JSON and plots.

A module of an experiment holds its settings as data, a function that computes numbers from the options, and one that
draws them; ``main = experiment(..)`` makes its command of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t as student

from hf_dpopt.common.extras import import_extra

MAX_RATES = 10  # tried for one cell
NUM_POINTS = 8  # of a learning curve
PACKAGES = ("numpy", "scipy", "torch", "transformers", "dp-accounting")

# --- the command of an experiment ------------------------------------------------------------------------------------


class Folder(str):
    """A file or folder that a command must be given; its text is the help."""


class OptionalFolder(Folder):
    """One that may be left out."""


def experiment(
    name: str,
    compute: Callable[[argparse.Namespace], dict[str, Any]],
    plot: Callable[[dict[str, Any], Path], None] | None = None,
    **options: Any,
) -> Callable[[], None]:
    """Return the command of an experiment: it computes, and writes ``<name>.json`` and ``<name>.png``.

    Args:
        name: of the files.
        compute: makes the numbers of the options. Entries whose name begins with "_" are for the plot alone.
        plot: draws the numbers.
        options: name -> default. A list takes several values, a tuple several of its own; a `Folder` must be given.
    """

    def main() -> None:
        module = compute.__module__
        module = sys.modules[module].__spec__.name if module == "__main__" else module  # type: ignore[union-attr]
        parser = argparse.ArgumentParser(
            prog=f"python -m {module}",
            description=sys.modules[compute.__module__].__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.add_argument("--output_dir", type=Path, default=Path("runs/paper"), help="folder for JSON and plots")
        for option, default in options.items():
            _add_option(parser, f"--{option}", default)
        given = parser.parse_args()
        given.output_dir.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter()
        numbers = compute(given)
        about = {
            "command": f"python -m {module}",
            "options": {key: value for key, value in vars(given).items() if not isinstance(value, Path)},
            "date": datetime.date.today().isoformat(),
            "seconds": round(time.perf_counter() - began, 1),
            "python": platform.python_version(),
            **{package: version(package) for package in PACKAGES},
        }
        path = given.output_dir / f"{name}.json"
        path.write_text(json.dumps(about | _public(numbers), indent=1) + "\n", encoding="utf-8")
        if plot is not None:
            plot(numbers, path.with_suffix(".png"))
        print(path)

    return main


def _add_option(parser: argparse.ArgumentParser, name: str, default: Any) -> None:
    if isinstance(default, Folder):
        parser.add_argument(name, type=Path, required=not isinstance(default, OptionalFolder), help=default)
    elif isinstance(default, (list, tuple)):
        choices = default if isinstance(default, tuple) else None
        parser.add_argument(name, type=type(default[0]), nargs="+", default=list(default), choices=choices)
    else:
        parser.add_argument(name, type=type(default), default=default)


def _public(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _public(entry) for key, entry in value.items() if not str(key).startswith("_")}
    return [_public(entry) for entry in value] if isinstance(value, (list, tuple)) else value


# --- runs ------------------------------------------------------------------------------------------------------------


def _line(run: Any, result: dict[str, Any]) -> str:
    found = {name: round(value, 4) for name, value in result.items() if isinstance(value, (int, float))}
    return f"{', '.join(f'{name} {value}' for name, value in dataclasses.asdict(run).items())}: {found}"


class KeptRuns:
    """Each done once: those in the file are read, others are trained and appended.

    Args:
        path: JSONL, a run and its result on each line.
        train: from a run, which is a dataclass of all that the result depends on, to a JSON-able result.
    """

    def __init__(self, path: Path, train: Callable[[Any], dict[str, Any]]):
        self._path, self._train = path, train
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        self._known = {_key(line["run"]): line for line in map(json.loads, lines)}

    def result(self, run: Any) -> dict[str, Any]:
        """As `train` returned it, beside the run."""
        key = _key(dataclasses.asdict(run))
        if key not in self._known:
            line = {"run": dataclasses.asdict(run), **self._train(run)}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            self._known[key] = line
            print(_line(run, line), flush=True)
        return self._known[key]

    def of_seeds(self, run: Any, seeds: Iterable[int]) -> list[dict[str, Any]]:
        """The same run under each of the seeds."""
        return [self.result(dataclasses.replace(run, seed=seed)) for seed in seeds]

    def mean(self, run: Any, seeds: Iterable[int], score: str) -> float:
        """Mean of an entry of the results over the seeds."""
        return float(np.mean([result[score] for result in self.of_seeds(run, seeds)]))

    def rates(self, run: Any, start: float, seeds: Sequence[int], score: str) -> dict[float, float]:
        """Mean score by learning rate, of a climb that begins at `start`; the seeds are not to be reported."""
        return climb(lambda rate: self.mean(dataclasses.replace(run, rate=rate), seeds, score), start)


def is_point(step: int, num_steps: int) -> bool:
    """Whether a learning curve has a point after this step."""
    return step * NUM_POINTS // num_steps > (step - 1) * NUM_POINTS // num_steps


def _key(run: dict[str, Any]) -> str:
    return json.dumps(run, sort_keys=True)


# --- the search for values -------------------------------------------------------------------------------------------


def climb(score: Callable[[float], float], start: float, factor: float = 2.0) -> dict[float, float]:
    """Scores of the rates ``start * factor^k`` up to the first maximum: the best one has a worse one on each side."""
    scores = {k: score(start * factor**k) for k in (0, 1)}
    while len(scores) < MAX_RATES:
        best = max(scores, key=lambda k: scores[k])
        missing = [k for k in (best + 1, best - 1) if k not in scores]
        if not missing:
            break
        scores[missing[0]] = score(start * factor ** missing[0])
    return {start * factor**k: scores[k] for k in sorted(scores)}


def best_of(scores: dict[Any, float]) -> Any:
    """The first one with the highest score."""
    return max(scores, key=lambda one: scores[one])


def labelled(scores: dict[float, float]) -> dict[str, float]:
    """Scores by rate, as JSON has them."""
    return {f"{rate:g}": score for rate, score in scores.items()}


Move = tuple[int, ...]  # of each value, by how many factors


def ascend(
    score: Callable[..., float],
    start: Sequence[float],
    factors: Sequence[float],
    moves: Sequence[Move],
    *,
    is_eager: bool = False,
) -> tuple[float, tuple[float, ...]]:
    """The best score of a climb in several values, and those values: all their neighbours are worse, or as good.

    Args:
        score: of values in the order of `start`; asked once for each place.
        start: values where it begins.
        factors: the values are ``start * factor^k``.
        moves: ways to the neighbours of a place.
        is_eager: go to the first neighbour that is better and, from there, on in the same way first; else to the best.
    """
    place, order, known = (0,) * len(start), list(moves), {}

    def values(k: Move) -> tuple[float, ...]:
        return tuple(first * factor**i for first, factor, i in zip(start, factors, k, strict=True))

    def at(k: Move) -> float:
        if k not in known:
            known[k] = score(*values(k))
        return known[k]

    while True:
        around = {move: tuple(i + j for i, j in zip(place, move, strict=True)) for move in order}
        better = (move for move in order if at(around[move]) > at(place))
        way = next(better, None) if is_eager else max(better, key=lambda move: at(around[move]), default=None)
        if way is None:
            return at(place), values(place)
        place = around[way]
        if is_eager:
            order.remove(way)
            order.insert(0, way)


# --- statistics ------------------------------------------------------------------------------------------------------


def interval(differences: np.ndarray) -> tuple[float, float]:
    """Mean of paired differences, and half of their 95 % interval."""
    half = student.ppf(0.975, len(differences) - 1) * differences.std(ddof=1) / math.sqrt(len(differences))
    return float(differences.mean()), float(half)


def unpaired(with_it: Sequence[float], without: Sequence[float]) -> tuple[float, float]:
    """Difference of means, and half of its 95 % interval, by Welch."""
    sizes = (len(with_it), len(without))
    parts = (np.var(with_it, ddof=1) / sizes[0], np.var(without, ddof=1) / sizes[1])
    freedom = sum(parts) ** 2 / sum(part**2 / (size - 1) for part, size in zip(parts, sizes, strict=True))
    half = student.ppf(0.975, freedom) * math.sqrt(sum(parts))
    return float(np.mean(with_it) - np.mean(without)), float(half)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and its standard error."""
    return float(np.mean(values)), float(np.std(values, ddof=1) / math.sqrt(len(values)))


def log_slope(x: Any, y: Any) -> Any:
    """Slope of a straight line through the logarithms; for columns of y, of each."""
    return np.polyfit(np.log(x), np.log(y), 1)[0]


# --- plots -----------------------------------------------------------------------------------------------------------


def pyplot() -> Any:
    """Matplotlib without a display.

    Raises:
        DPConfigError: if it is not installed.
    """
    import_extra("matplotlib", "A plot").use("Agg")
    plt = importlib.import_module("matplotlib.pyplot")
    plt.rcParams.update({"font.size": 9, "axes.grid": True, "grid.alpha": 0.3, "axes.axisbelow": True})
    return plt


def panels(num: int, width: float = 4.2, height: float = 3.6) -> tuple[Any, list[Any]]:
    """A figure and its axes, side by side, without a display."""
    figure, axes = pyplot().subplots(1, num, figsize=(width * num, height), squeeze=False)
    return figure, list(axes[0])


def save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def plain_ticks(axis: Any, ticks: Sequence[float]) -> None:
    """Numbers instead of powers of ten, on a logarithmic x axis with few values."""
    axis.set_xscale("log")
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()


def same_range(axes: Sequence[Any]) -> None:
    """Panels of one figure with the same y axis."""
    low, high = min(axis.get_ylim()[0] for axis in axes), max(axis.get_ylim()[1] for axis in axes)
    for axis in axes:
        axis.set_ylim(low, high)


def percent(values: Any) -> np.ndarray:
    return 100 * np.asarray(values, dtype=float)


def draw_lines(
    axis: Any,
    rows: Iterable[dict[str, Any]],
    x: str,
    values: Callable[[dict[str, Any]], Any],
    label: Callable[[dict[str, Any]], str],
) -> None:
    """Mean and standard deviation of the values of each row against its entry `x`; a line for each label."""
    lines: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        lines.setdefault(label(row), []).append(row)
    for name, own in lines.items():
        own.sort(key=lambda row: row[x])
        spread = [(np.mean(values(row)), np.std(values(row), ddof=1)) for row in own]
        axis.errorbar(
            [row[x] for row in own], *zip(*spread, strict=True), marker="o", markersize=4, capsize=3, label=name
        )
    axis.legend(fontsize=8)


def draw_band(axis: Any, x: Sequence[float], curves: Any, label: str, **style: Any) -> None:
    """Mean of several curves, and their range."""
    (line,) = axis.plot(x, np.mean(curves, axis=0), label=label, **style)
    low, high = np.min(curves, axis=0), np.max(curves, axis=0)
    axis.fill_between(x, low, high, color=line.get_color(), alpha=0.12, linewidth=0)


def draw_curves(axis: Any, cell: dict[str, Any], label: str, **style: Any) -> None:
    """Validation accuracy over the steps, of all seeds of a cell."""
    curves = np.array(cell["curves"])  # (seeds, points, 2): step, accuracy
    draw_band(axis, curves[0, :, 0], percent(curves[..., 1]), label, **style)
    axis.set(xlabel="step", ylabel="validation accuracy, %")
