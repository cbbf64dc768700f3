"""Tabulated losses of long runs and of large matrices, ours beside them; about a minute on one core.

    python -m tests.mechanisms.strategies.slow_rows

Prints a row for each and ends with an error if a mean loss is above the tabulated one by more than the tolerance, or
sensitivity or loss are so far below it that one of them cannot be right.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from hf_dpopt.noise import (
    NoiseStrategy,
    OptimalCC,
    Participation,
    optimize_banded,
    optimize_blt,
    optimize_dense,
    optimize_nu,
)
from tests.reference.strategies import max_loss

ABOVE, BELOW = 2e-4, 1e-3  # relative


class Row(NamedTuple):
    label: str
    tune: Callable[[int, Participation], NoiseStrategy]
    n: int
    participation: Participation
    want: tuple[float | None, float, float | None]  # sensitivity, mean and max loss; None where none is tabulated


def _losses(n: int, k: int, by_mechanism: dict[str, float]) -> list[Row]:
    participation = Participation(k, n // k)
    return [Row(label, _tuning(label), n, participation, (None, mean, None)) for label, mean in by_mechanism.items()]


def _tuning(label: str) -> Callable[[int, Participation], NoiseStrategy]:
    if label == "nu = 0":
        return lambda n, participation: OptimalCC()
    if label == "best nu":
        return optimize_nu
    if label == "b bands":
        return lambda n, participation: optimize_banded(n, participation.min_sep, participation)
    num_buffers = int(label.split()[0])
    return lambda n, participation: optimize_blt(n, participation, num_buffers)


ROWS = [
    Row("dense, one participation", optimize_dense, 512, Participation(), (1.0, 2.7394, 2.9715)),
    Row("dense, b bands", optimize_dense, 512, Participation(4, 128), (2.0, 5.8456, 6.9214)),
    Row("dense, b bands", optimize_dense, 512, Participation(6, 85), (2.4495, 7.5511, 9.2130)),
    Row("dense, fixed epochs", optimize_dense, 64, Participation(4, 16, "fixed_epoch"), (1.0, 4.4079, 5.7857)),
    Row("dense, fixed epochs", optimize_dense, 512, Participation(4, 128, "fixed_epoch"), (1.0, 5.6267, 7.2373)),
    *_losses(2052, 1, {"nu = 0": 3.3311, "best nu": 3.2876, "1 buffers": 3.8645, "2 buffers": 3.3274}),
    *_losses(2052, 1, {"3 buffers": 3.2819, "4 buffers": 3.2785, "5 buffers": 3.2784}),
    *_losses(2052, 4, {"nu = 0": 7.9977, "best nu": 7.3017, "1 buffers": 7.8350, "2 buffers": 7.1305}),
    *_losses(2052, 4, {"3 buffers": 7.1110, "4 buffers": 7.1110, "b bands": 6.8859}),
    *_losses(2052, 6, {"nu = 0": 10.8700, "best nu": 9.4774, "1 buffers": 9.8455, "2 buffers": 9.1828}),
    *_losses(2052, 6, {"3 buffers": 9.1713, "4 buffers": 9.1713, "b bands": 8.8041}),
    *_losses(10_000, 1, {"nu = 0": 3.8356, "best nu": 3.7919, "2 buffers": 3.9253, "3 buffers": 3.7999}),
    *_losses(10_000, 1, {"4 buffers": 3.7842, "5 buffers": 3.7825}),
    *_losses(10_000, 6, {"nu = 0": 12.1686, "best nu": 10.7225, "2 buffers": 10.5058, "3 buffers": 10.4092}),
    *_losses(10_000, 6, {"4 buffers": 10.4061}),
    *_losses(2000, 20, {"nu = 0": 30.5965, "best nu": 22.293, "2 buffers": 21.3740, "3 buffers": 21.3740}),
]


def _text(values: tuple[float | None, ...]) -> str:
    return " / ".join("-" if value is None else f"{value:.4f}" for value in values)


def main() -> int:
    os.environ["HF_DPOPT_CACHE_DIR"] = os.devnull  # or they would be read, and not tuned
    num_wrong = 0
    print("| strategy | steps | k, b | ours: sensitivity / mean / max loss | tabulated | mean, relative | seconds |")
    print("|---|---|---|---|---|---|---|")
    for label, tune, n, participation, want in ROWS:
        start = time.perf_counter()
        strategy = tune(n, participation)
        seconds = time.perf_counter() - start
        sensitivity, loss = strategy.sensitivity(n, participation), strategy.mean_loss(n, participation)
        off = loss / want[1] - 1
        is_right = -BELOW < off < ABOVE and (want[0] is None or abs(sensitivity / want[0] - 1) < ABOVE)
        num_wrong += not is_right
        k, b = participation.max_participations, participation.min_sep
        ours = _text((sensitivity, loss, max_loss(strategy, n, participation)))
        mark = "" if is_right else " WRONG"
        print(f"| {label} | {n} | {k}, {b} | {ours} | {_text(want)} | {off:+.1e}{mark} | {seconds:.1f} |", flush=True)
    return 1 if num_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
