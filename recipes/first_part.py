"""A small private run before another one, in a folder of its output_dir, with a part of its budget.

The run that follows names it among its `earlier_runs`, so epsilon is that of both together. What it made is kept: a
run that was stopped later goes on with that, and nothing is charged twice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from hf_dpopt import DPBudgetExceeded, DPConfigError, DPTrainer, DPTrainingArguments
from hf_dpopt.common.errors import shown
from hf_dpopt.run.ledger import LEDGER, Ledger

MARK, WEIGHTS = "belongs_to.json", "model.safetensors"


def check_epsilon(args: DPTrainingArguments, epsilon: float, option: str) -> None:
    """Refuse a part that is none of target_epsilon.

    Raises:
        DPConfigError: naming the option that the part comes from.
    """
    if args.target_epsilon is None or not 0 < epsilon < args.target_epsilon:
        raise DPConfigError(
            f"{option}: epsilon={epsilon:g} is no part of target_epsilon={args.target_epsilon}. Give "
            "--target_epsilon, and about an eighth of it to this part."
        )
    if args.tuned_runs is not None:
        raise DPConfigError(f"tuned_runs={args.tuned_runs:g}: has no analysis for a run in two parts. Leave it out.")


def read_weights(folder: Path, mark: Mapping[str, Any], what: str) -> dict[str, torch.Tensor] | None:
    """Weights that were saved before; None if there are none yet.

    Args:
        folder: of the part.
        mark: public values that they belong to, as JSON has them.
        what: what the weights are, for messages.

    Raises:
        DPConfigError: for weights that belong to other values, or a ledger that has not charged them.
    """
    if not (folder / WEIGHTS).is_file():
        return None
    path = folder / MARK
    then = json.loads(path.read_text()) if path.is_file() else {}
    changed = [name for name, value in mark.items() if then.get(name) != value]
    other = [f"{name}: {shown(then.get(name))}, now {shown(mark[name])}" for name in changed]
    if other:
        raise DPConfigError(
            f"{folder} holds {what} of another run ({'; '.join(other)}). Use another output_dir; what was spent there "
            "stays spent."
        )
    ledger = Ledger.read(folder / LEDGER)
    if ledger.plan is None or ledger.num_charged < ledger.plan["num_steps"]:
        raise DPConfigError(
            f"{ledger.path} has charged fewer steps than {what} beside it took: it was put back to an earlier state. "
            "Put the whole ledger back, or use another output_dir."
        )
    return load_file(folder / WEIGHTS)


def train(trainer: DPTrainer, what: str) -> None:
    """Train, with the way out of a part that was stopped before its weights were saved.

    Raises:
        DPBudgetExceeded: if it was stopped on its way before: its steps are spent.
    """
    try:
        trainer.train()
    except DPBudgetExceeded as error:
        folder = trainer.args.output_dir
        raise DPBudgetExceeded(
            f"The run in {folder} was stopped before it saved {what}, and its steps are spent. Start in another "
            f"output_dir with --earlier_runs {folder}, which counts them."
        ) from error


def save(trainer: DPTrainer, mark: Mapping[str, Any]) -> None:
    """Save weights, and before them what they belong to."""
    if trainer.is_world_process_zero():
        Path(str(trainer.args.output_dir), MARK).write_text(json.dumps(mark, indent=1, sort_keys=True) + "\n")
    trainer.save_model()


def count(args: DPTrainingArguments, folder: Path) -> None:
    """Let the run of `args` count the part in a folder."""
    before = args.earlier_runs or []
    args.earlier_runs = [*([before] if isinstance(before, str) else before), str(folder)]
