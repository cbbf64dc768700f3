"""Table 3: seconds for the coefficients of the mechanisms; ``benchmarks/noise.py`` has what the noise of a step costs.

For 2052 steps with 6 participations 342 steps apart (the paper's StackOverflow setting), the dense matrix for fewer.
Times are those of the processor, which on a machine that does other work besides still depend on it; rerun on an idle
one before quoting them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from hf_dpopt.noise import FourierStrategy, NuDPFTRL, Participation, optimize_banded, optimize_blt, optimize_nu
from hf_dpopt.noise.dense import optimize_dense
from recipes.paper.runs import experiment

N, PARTICIPATION = 2052, Participation(6, 342)


def seconds(work: Callable[[], Any], repetitions: int = 3) -> float:
    times = []
    for _ in range(repetitions):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return median(times)


def generation() -> list[dict[str, Any]]:
    """Seconds for the coefficients, and for tuning them."""
    works: list[tuple[str, int, Callable[[], Any], int]] = [
        ("nu-DP-FTRL, coefficients", N, lambda: NuDPFTRL(1e-3).noising_coefs(N), 9),
        ("nu-DP-FTRL, tuned nu", N, lambda: optimize_nu(N, PARTICIPATION), 3),
        ("BLT, 3 buffers, tuned", N, lambda: optimize_blt(N, PARTICIPATION, 3), 1),
        ("banded, 16 bands, tuned", N, lambda: optimize_banded(N, 16), 3),
        ("banded, 342 bands, tuned", N, lambda: optimize_banded(N, 342), 1),
        ("Fourier factorisation, matrices", N, lambda: FourierStrategy().noising_matrix(N), 1),
        *(
            (f"dense, one participation, {n} steps", n, lambda n=n: optimize_dense(n, Participation()), 1)
            for n in (128, 256, 512, 1024)
        ),
    ]
    rows = []
    for name, n, work, repetitions in works:
        rows.append({"name": name, "steps": n, "seconds": seconds(work, repetitions)})
        print(rows[-1], flush=True)
    return rows


def compute(given: Any = None) -> dict[str, Any]:
    return {"threads": torch.get_num_threads(), "generation": generation()}


main = experiment("table3", compute)

if __name__ == "__main__":
    main()
