"""A tuning whose runs are trainers of this process, where `hf-dpopt tune` starts a command for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hf_dpopt.accounting.best_of_runs import RunCount
from hf_dpopt.tuning.search import Candidate, Tuning, release
from hf_dpopt.tuning.space import Space


def tune(make: Callable[..., Any], output_dir: Path, law: RunCount, rates: Sequence[float]) -> None:
    """Train a random number of runs, and release the best into a folder.

    Args:
        make: (output_dir, options) -> a trainer of one run.
        output_dir: folder of the release; keys and runs lie beside it.
        law: law of the number of runs.
        rates: learning rates to draw from.
    """
    tuning = Tuning(
        law=law, space=Space.read({"learning_rate": [*rates]}), output_dir=output_dir,
        private_dir=f"{output_dir}-keys", asked={}, is_greater_better=False,
    )  # fmt: skip

    def train(candidate: Candidate) -> float:
        run = make(candidate.folder, private_state_dir=str(candidate.keys), **candidate.options)
        run.train()
        run.save_model()
        return run.evaluate()["eval_loss"]

    best = tuning.run(train)
    assert best is not None
    release(best, output_dir, metric="eval_loss")
    tuning.finish()
