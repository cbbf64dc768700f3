"""Private counts of records by public cells: one noisy vector for several histograms, counted by the run after it.

A histogram is one step of DP-SGD on a linear loss. With x the vector that has a 1 at the cell of a record in each of k
histograms, the loss ``-<w, x>`` has the gradient ``-x`` of norm ``sqrt(k)``. With a sample rate of 1, that clipping
norm and a learning rate of 1, the weights after one step from 0 are ``(counts + noise) / n``. So `DPTrainer` does all
that matters: the clip, the noise, the charge, the log, the statement and `hf-dpopt verify`. The run that follows names
the folder in its `earlier_runs`, and its epsilon is that of both.

Formal guarantee: all histograms together are one Gaussian mechanism. One record more or less moves their sum by
``sqrt(k)`` in L2, and that is the clipping norm; under `replace_one` the noise is for twice that, and a record that is
swapped moves it by ``sqrt(2k)``. Where users are protected, a user counts as the mean of their records, whose norm is
at most ``sqrt(k)``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.state import AcceleratorState
from datasets import Dataset
from torch import nn

from hf_dpopt import DPBudgetExceeded, DPConfigError, DPTrainer, DPTrainingArguments
from hf_dpopt.accounting.filter import RenyiFilter, best_order, charge_of
from hf_dpopt.plan.choose import make_plan
from hf_dpopt.plan.plan import PrivacyPlan
from hf_dpopt.run.dataset_ledger import DatasetLedger, begin, reservation_of
from hf_dpopt.run.ledger import LEDGER
from recipes import first_part

FOLDER = "histogram"
RECORDS_PER_USER = 1000  # more than that: a random draw of them counts


class LinearCounts(nn.Module):
    """Weights of which the gradient of a record is its vector of cells.

    Args:
        num_cells: cells of all histograms together.
    """

    def __init__(self, num_cells: int):
        super().__init__()
        self.cells = nn.Linear(num_cells, 1, bias=False)
        nn.init.zeros_(self.cells.weight)

    def forward(self, vectors: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        return {"logits": self.cells(vectors)[:, 0]}


def negative_score(outputs: Mapping[str, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
    """Loss of each record, (B,), whose gradient is minus its vector."""
    return -outputs["logits"]


def vectors_of(cells: Sequence[Sequence[int]], sizes: Sequence[int]) -> torch.Tensor:
    """Vectors of records, (B, sum of sizes): a 1 at the cell of each histogram.

    Args:
        cells: for each record its cell in each histogram.
        sizes: number of cells of each histogram.
    """
    if any(not 0 <= cell < size for row in cells for cell, size in zip(row, sizes, strict=True)):
        raise DPConfigError("A record lies outside the cells of a histogram. Give every record a cell of each.")
    starts = torch.tensor([0, *np.cumsum(sizes)[:-1].tolist()])
    vectors = torch.zeros(len(cells), sum(sizes))
    return vectors.scatter_(1, torch.tensor(cells) + starts, 1.0)


def release_counts(
    cells: Mapping[str, Sequence[int]],
    sizes: Mapping[str, int],
    args: DPTrainingArguments,
    epsilon: float,
    *,
    meaning: str = "",
    users: Sequence[Any] | None = None,
    following: PrivacyPlan | None = None,
) -> dict[str, np.ndarray]:
    """Release all histograms with noise, and let the run of `args` that follows count them.

    A folder that holds them already is read, and nothing is charged.

    Args:
        cells: name of a histogram -> cell of each record.
        sizes: name -> number of cells, which is public.
        args: arguments of the run that follows; its output_dir gets a folder, its `earlier_runs` an entry.
        epsilon: budget of the histograms alone, at the delta of `args`; > 0.
        meaning: what the cells stand for, which is published: counts that are there are those of the same meaning.
        users: user of each record, where users are protected.
        following: plan of the run that follows, or of a costlier one, whose room in the ledger of `args` is checked
            before the counts are charged there.

    Returns:
        Name -> noisy counts, int64, >= 0: of records, or of users.

    Raises:
        DPConfigError: if the folder holds counts of other cells, or output_dir a run that does not count these; if
            epsilon is not a part of the budget.
        DPBudgetExceeded: if the counts were charged, and the run was stopped before they were saved; if the ledger
            has no room for both.
    """
    folder = Path(args.output_dir) / FOLDER
    num_units = len(next(iter(cells.values()))) if users is None else len(set(users))
    counting = _arguments(args, folder, num_units, len(cells), epsilon)
    mark = {
        "sizes": [[*pair] for pair in sizes.items()],  # their order is that of the weights
        "meaning_of_cells": meaning,
        "num_units": num_units,
        "target_epsilon": epsilon,
        "delta": args.target_delta,
    }
    found = first_part.read_weights(folder, mark, "the counts")
    if found is None and (Path(args.output_dir) / LEDGER).exists():
        raise DPConfigError(
            f"output_dir={args.output_dir}: has a run that does not count these histograms, or {FOLDER} was taken "
            "away from it. Use another output_dir; what was spent there stays spent."
        )
    if found is None and following is not None and args.privacy_ledger is not None:
        first = make_plan(counting.privacy_config(num_units), num_examples=num_units, num_steps=1)
        _check_room(args, first, following)
    weights = _count(cells, sizes, counting, users, mark) if found is None else found["cells.weight"]
    first_part.count(args, folder)
    noised = weights.detach().cpu().flatten().double() * num_units
    counts = noised.round().clamp(min=0).long().numpy()  # after the noise: post-processing
    return dict(zip(sizes, np.split(counts, np.cumsum(list(sizes.values()))[:-1]), strict=True))


def _check_room(args: DPTrainingArguments, *plans: PrivacyPlan) -> None:
    """Refuse runs of which the ledger of their dataset does not admit all, and begin one for the last of them.

    Nothing is charged.

    Raises:
        DPBudgetExceeded: with what they would cost.
    """
    path, budget = Path(str(args.privacy_ledger)), args.privacy_ledger_epsilon
    costs, others = [reservation_of(plan, [plan.num_steps]) for plan in plans], []
    if path.exists():
        ledger = DatasetLedger.read(path)
        rule, others = ledger.filter, ledger.charges()
    elif budget is None:
        return  # refused when the ledger begins
    else:
        last = costs[-1]  # the order that suits the training: at that of the counts alone it may cost far more
        rule = RenyiFilter(budget, last.delta, best_order(last.event, last.adjacency, budget, last.delta))
    charges = [*others, *(charge_of(one.event, one.adjacency, rule.order) for one in costs)]
    if not rule.admits(charges):
        raise DPBudgetExceeded(
            f"privacy_ledger={path}: counts and training would bring epsilon of all runs there to "
            f"{rule.spent(charges):.4g} at delta {rule.delta:g}, above its budget of {rule.epsilon:g}. Nothing was "
            "charged. Use a smaller --target_epsilon, or for a new ledger a larger --privacy_ledger_epsilon."
        )
    begin(path, costs[-1], budget)


def _count(
    cells: Mapping[str, Sequence[int]],
    sizes: Mapping[str, int],
    args: DPTrainingArguments,
    users: Sequence[Any] | None,
    mark: Mapping[str, Any],
) -> torch.Tensor:
    """Take the step, save the weights, and return them."""
    columns: dict[str, Any] = {"cells": list(map(list, zip(*(cells[name] for name in sizes), strict=True)))}
    columns["labels"] = [0] * len(columns["cells"])  # the trainer wants some
    if users is not None:
        columns[str(args.user_id_column)] = list(users)

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        vectors = vectors_of([row["cells"] for row in rows], list(sizes.values()))
        return {"vectors": vectors, "labels": torch.zeros(len(rows), dtype=torch.long)}

    model = LinearCounts(sum(sizes.values()))
    with _without_outlook(), _precision_apart():
        trainer = DPTrainer(
            model=model,
            args=args,
            train_dataset=Dataset.from_dict(columns),
            data_collator=collate,
            per_example_loss_func=negative_score,
        )
        first_part.train(trainer, "the counts")
        first_part.save(trainer, mark)
    return model.cells.weight


def _arguments(
    args: DPTrainingArguments, folder: Path, num_units: int, num_histograms: int, epsilon: float
) -> DPTrainingArguments:
    """Arguments of the step: those of the whole run where they say who and where."""
    first_part.check_epsilon(args, epsilon, "histogram_share")
    return DPTrainingArguments(
        **{name: getattr(args, name) for name in SHARED},
        output_dir=str(folder),
        target_epsilon=epsilon,
        clipping_norm=math.sqrt(num_histograms),
        expected_batch_size=num_units,  # everybody takes part
        sampling="poisson",
        max_steps=1,
        per_device_train_batch_size=1024,
        learning_rate=1.0,
        optim="sgd",
        lr_scheduler_type="constant",
        advisor="none",
        user_weighting="mean",
        records_per_user=RECORDS_PER_USER if args.privacy_unit == "user" else None,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )


SHARED = (
    "adjacency", "allow_large_delta", "data_dependent_preprocessing", "eval_data_privacy", "log_level",
    "privacy_ledger", "privacy_ledger_epsilon", "privacy_unit", "private_state_dir", "seed", "target_delta",
    "unsafe_fixed_noise_key", "use_cpu", "user_id_column",
)  # fmt: skip


@contextmanager
def _without_outlook() -> Iterator[None]:
    """Leave out the advice for training: one noisy step is all of a histogram."""

    def is_no_advice(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(("Advisor:", "Advice:", "No advice:", "This run is expected"))

    log = logging.getLogger("hf_dpopt")
    log.addFilter(is_no_advice)
    try:
        yield
    finally:
        log.removeFilter(is_no_advice)


@contextmanager
def _precision_apart() -> Iterator[None]:
    """Count in float32 whatever the training uses: a process has one precision, in a state that Accelerators share."""
    shared = AcceleratorState._shared_state
    before = {**shared}
    shared.clear()
    try:
        yield
    finally:
        shared.clear()
        shared.update(before)
