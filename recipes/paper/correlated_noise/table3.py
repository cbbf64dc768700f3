"""Table 3: what the mechanisms cost, measured: coefficients once, then time and memory of the noise of a step.

Coefficients for 2052 steps with 6 participations 342 steps apart (the paper's StackOverflow setting), the dense matrix
for fewer. Streams of 2^18 coordinates for 128 steps. Times are those of the
processor, which on a machine that does other work besides still depend on it; rerun on an idle one before quoting
them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from hf_dpopt.noise import (
    BandedInverse,
    BandedToeplitz,
    BufferedLinearToeplitz,
    FourierStrategy,
    IdentityStrategy,
    NoiseStrategy,
    NuDPFTRL,
    Participation,
    optimize_banded,
    optimize_blt,
    optimize_nu,
)
from hf_dpopt.noise.dense import optimize_dense
from hf_dpopt.noise.tree import TreeAggregation
from hf_dpopt.randomness.chacha import ChaCha20Gaussian
from recipes.paper.runs import experiment

N, PARTICIPATION = 2052, Participation(6, 342)
D, NUM_STEPS = 2**18, 128


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


def streams() -> list[dict[str, Any]]:
    """Seconds of a step and bytes kept between steps, relative to one gradient."""
    blt = BufferedLinearToeplitz((0.99, 0.8, 0.3), (0.95, 0.5, 0.1))
    bands = BandedToeplitz(tuple(NuDPFTRL(1e-2).strategy_coefs(16)))
    cases: list[tuple[str, NoiseStrategy, dict[str, Any]]] = [
        ("DP-SGD", IdentityStrategy(), {}),
        ("anti-PGD, drawn again", BandedInverse((1.0, -1.0)), {}),
        ("nu-DP-FTRL, all draws kept", NuDPFTRL(1e-3), {"backend": "history"}),
        ("nu-DP-FTRL, drawn again", NuDPFTRL(1e-3), {"backend": "regenerate"}),
        ("nu-DP-FTRL, drawn again, blocks of 32", NuDPFTRL(1e-3), {"backend": "regenerate", "block": 32}),
        ("BLT, 3 buffers", blt, {}),
        ("banded, 16 bands", bands, {}),
        ("banded inverse, 16 bands, drawn again", BandedInverse.of_nu(16, 1e-3), {}),
        ("tree, Honaker", TreeAggregation("honaker"), {}),
        ("Fourier factorisation, all draws kept", FourierStrategy(), {"backend": "history"}),
    ]
    source = ChaCha20Gaussian(bytes(range(32)))
    draw = seconds(lambda: source.normal((D,), step=0, tensor=0), 9)
    rows = []
    for name, strategy, options in cases:
        stream = strategy.stream(source, scale=1.0, num_steps=NUM_STEPS, **options)
        times, most = [], 0
        for step in range(NUM_STEPS):
            sums = {"weight": torch.zeros(D)}
            began = time.process_time()
            stream.add_(sums, step)
            times.append(time.process_time() - began)
            most = max(most, stream.bytes_kept())
        row = {"name": name, "mean_ms": 1e3 * sum(times) / NUM_STEPS, "draws": sum(times) / NUM_STEPS / draw}
        rows.append(row | {"gradients_kept_at_most": most / (4 * D)})
        print(rows[-1], flush=True)
    return [{"name": "one draw", "mean_ms": 1e3 * draw, "draws": 1.0, "gradients_kept_at_most": 0.0}, *rows]


def compute(given: Any = None) -> dict[str, Any]:
    about = {"threads": torch.get_num_threads(), "coordinates": D, "stream_steps": NUM_STEPS}
    return {**about, "generation": generation(), "streams": streams()}


main = experiment("table3", compute)

if __name__ == "__main__":
    main()
