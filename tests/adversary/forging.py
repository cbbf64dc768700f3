"""Ledgers as somebody who can write to `output_dir` alone can make them: any records, with the right hashes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import scipy.stats
import torch
from transformers import TrainerCallback

from hf_dpopt import DPTrainer
from tests.helpers import tiny

LEDGER = Path("privacy") / "ledger.jsonl"
ALPHA = 1e-6  # probability of a false alarm, per step


def records_of(out: Path) -> list[dict[str, Any]]:
    """The records of the ledger in a folder, without their hashes."""
    lines = [json.loads(line) for line in (out / LEDGER).read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in ("prev", "sha256")} for line in lines]


def sealed(records: list[dict[str, Any]]) -> str:
    """Lines of a ledger whose hashes fit, whatever the records say."""
    text, prev = "", "0" * 64
    for record in records:
        body = {name: value for name, value in record.items() if name != "sha256"} | {"prev": prev}
        prev = hashlib.sha256(_canonical(body).encode()).hexdigest()
        text += _canonical(body | {"sha256": prev}) + "\n"
    return text


def write(out: Path, records: list[dict[str, Any]]) -> None:
    """Write records as a ledger whose hashes fit, in place of the one that is there."""
    path = out / LEDGER
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(sealed(records))


class Releases(TrainerCallback):
    """Keeps what every step released."""

    def __init__(self) -> None:
        self.seen: dict[int, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.seen[state.global_step + 1] = torch.cat([p.grad.flatten().double() for p in model.parameters()])


def train(out: Path, *, stop: int, resume: Any = None, **changes: Any) -> tuple[DPTrainer, dict[int, torch.Tensor]]:
    """Train up to a step, with checkpoints; return the trainer and what every step released."""
    seen = Releases()
    options: dict[str, Any] = dict(
        model=tiny.model(dropout=0.0), max_steps=6, save_strategy="steps", learning_rate=1e-3, clipping_norm=0.1,
        logging_strategy="no",
    ) | changes  # fmt: skip
    made = tiny.trainer(out, **options | {"callbacks": [seen, *changes.get("callbacks", ()), tiny.StopAt(stop)]})
    made.train(resume_from_checkpoint=resume)
    return made, seen.seen


def assert_fresh(made: Any, first: dict[int, torch.Tensor], again: dict[int, torch.Tensor]) -> None:
    """No two releases of one step have the same noise.

    What they differ by holds the fresh draws of both: chi-square from below, at `ALPHA`. Gradients, and what correlated
    noise takes back of earlier draws, only add to the energy.
    """
    stddev = made.plan.draw_stddev * made.plan.sensitivity / made.plan.config.expected_batch_size
    for step in first.keys() & again.keys():
        energy = float((first[step] - again[step]).square().sum()) / (2 * stddev**2)
        assert energy > scipy.stats.chi2.ppf(ALPHA, df=first[step].numel()), f"the noise of step {step} is used twice"


def _canonical(body: dict[str, Any]) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"))
