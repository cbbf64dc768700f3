"""`recipes/histogram.py`: what a record moves, what the counts cost, and that the run after them counts that."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from safetensors.torch import load_file

from hf_dpopt import DPBudgetExceeded, DPConfigError, DPTrainer, DPTrainingArguments
from hf_dpopt.report.report import read_report
from hf_dpopt.run.dataset_ledger import DatasetLedger
from hf_dpopt.verify import FAILED, verify
from recipes.histogram import FOLDER, LinearCounts, negative_score, release_counts, vectors_of

SIZES = {"label": 3, "length": 2, "cluster": 4}
EVERY = list(itertools.product(*map(range, SIZES.values())))  # all records that there can be
KEY = "1f" * 32


def arguments(folder: Path, **changes: Any) -> DPTrainingArguments:
    values: dict[str, Any] = dict(
        output_dir=str(folder), target_epsilon=4.0, target_delta=1e-3, use_cpu=True, report_to="none",
        disable_tqdm=True, save_strategy="no", private_state_dir=str(folder) + "-keys", max_steps=3,
        per_device_train_batch_size=8, expected_batch_size=20, remove_unused_columns=False,
    )  # fmt: skip
    return DPTrainingArguments(**values | changes)


def columns(records: list[tuple[int, ...]]) -> dict[str, list[int]]:
    return {name: list(values) for name, values in zip(SIZES, zip(*records, strict=True), strict=True)}


def released(folder: Path, num_units: int) -> torch.Tensor:
    """What left the step, in units: the counts with their noise, before they are rounded."""
    return load_file(folder / FOLDER / "model.safetensors")["cells.weight"].flatten().double() * num_units


def test_every_record_has_norm_sqrt_k_and_a_swap_moves_at_most_sqrt_2k():
    vectors = vectors_of(EVERY, list(SIZES.values())).double()
    assert torch.equal(vectors.norm(dim=1), torch.full((len(EVERY),), 3.0, dtype=torch.float64).sqrt())
    apart = torch.cdist(vectors, vectors)
    assert float(apart.max()) == pytest.approx(math.sqrt(6), abs=1e-9)


@pytest.mark.parametrize("cell", [(0, 0, 4), (-1, 0, 0)])
def test_a_record_outside_the_cells_is_refused(cell):
    with pytest.raises(DPConfigError, match="outside the cells"):
        vectors_of([cell], list(SIZES.values()))


def moved_by_neighbours(tmp_path: Path, rows: list[tuple[Any, tuple[int, ...]]], **changes: Any) -> list[float]:
    """Distance of the releases with and without each unit, under the same noise; brute force over the units."""

    def release(name: str, rows: list[tuple[Any, tuple[int, ...]]]) -> torch.Tensor:
        users, records = zip(*rows, strict=True)
        by_user = changes.get("privacy_unit") == "user"
        args = arguments(tmp_path / name, unsafe_fixed_noise_key=KEY, **changes)
        release_counts(columns(list(records)), SIZES, args, 1.0, users=users if by_user else None)
        return released(tmp_path / name, len(set(users)))

    whole = release("whole", rows)
    units = dict.fromkeys(user for user, _ in rows)
    others = [release(f"without-{unit}", [row for row in rows if row[0] != unit]) for unit in units]
    return [float((whole - other).norm()) for other in others]


def test_a_record_moves_what_is_released_by_exactly_the_clip(tmp_path):
    rows = list(enumerate([(0, 0, 0), (0, 0, 0), (2, 1, 3), (1, 0, 2), (2, 1, 0)]))
    assert moved_by_neighbours(tmp_path, rows) == pytest.approx([math.sqrt(3)] * 5, rel=1e-4)


def test_a_user_of_many_records_moves_it_by_no_more(tmp_path):
    rows = [("ann", (0, 0, 0))] * 7 + [("bob", (0, 1, 2)), ("bob", (2, 0, 3)), ("cy", (1, 1, 1)), ("dan", (1, 0, 1))]
    found = moved_by_neighbours(tmp_path, rows, privacy_unit="user", user_id_column="person")
    assert max(found) == pytest.approx(math.sqrt(3), rel=1e-4)
    assert found[1] == pytest.approx(math.sqrt(1.5), rel=1e-4)  # the mean of two records that share no cell


@pytest.mark.parametrize(("adjacency", "factor"), [("add_or_remove_one", 1), ("zero_out", 1), ("replace_one", 2)])
def test_the_noise_has_the_calibrated_size(tmp_path, adjacency, factor):
    """The stddev over 400 cells that no record is in, against one that dp_accounting calibrates; false alarms: 1e-6."""
    wide = {**SIZES, "cluster": 400}
    args = arguments(tmp_path / "run", adjacency=adjacency)
    release_counts(columns([(0, 0, 0)] * 30), wide, args, 1.0)

    def spent(noise_multiplier: float) -> float:
        accountant = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
        return accountant.compose(dp_accounting.GaussianDpEvent(noise_multiplier)).get_epsilon(1e-3)

    plan = read_report(tmp_path / "run" / FOLDER).plan
    assert spent(plan["noise_multiplier"]) == pytest.approx(1.0, rel=1e-3)
    noise = released(tmp_path / "run", 30)[6:]
    wanted = plan["noise_multiplier"] * math.sqrt(3) * factor
    assert float(noise.std()) == pytest.approx(wanted, rel=5 / math.sqrt(2 * len(noise)))


def test_the_counts_are_near_the_true_ones(tmp_path):
    records = [EVERY[i % 5] for i in range(1000)]
    found = release_counts(columns(records), SIZES, arguments(tmp_path / "run"), 3.0)
    for name, values in columns(records).items():
        true = np.bincount(values, minlength=SIZES[name])
        assert found[name].dtype == np.int64 and np.abs(found[name] - true).max() < 20 and found[name].min() >= 0


def after_it(tmp_path: Path, args: DPTrainingArguments) -> DPTrainer:
    """A training that follows the counts."""
    rows = [{"vectors": vectors_of([EVERY[i % 24]], list(SIZES.values()))[0], "labels": 0} for i in range(100)]
    trainer = DPTrainer(
        model=LinearCounts(sum(SIZES.values())), args=args, train_dataset=rows, per_example_loss_func=negative_score
    )
    trainer.train()
    trainer.save_model()
    return trainer


def test_the_run_after_it_pays_for_both(tmp_path):
    """Epsilon of the statement is that of the two mechanisms, composed by dp_accounting from the two reports."""
    args = arguments(tmp_path / "run", privacy_ledger=str(tmp_path / "people.jsonl"), privacy_ledger_epsilon=20.0)
    release_counts(columns([EVERY[i % 24] for i in range(100)]), SIZES, args, 1.0)
    trainer = after_it(tmp_path, args)
    counts, training = (read_report(path).plan for path in (tmp_path / "run" / FOLDER, tmp_path / "run"))
    assert (counts["sampler"]["name"], counts["num_steps"], counts["num_examples"]) == ("poisson", 1, 100)
    step = dp_accounting.PoissonSampledDpEvent(20 / 100, dp_accounting.GaussianDpEvent(training["noise_multiplier"]))
    event = dp_accounting.ComposedDpEvent([
        dp_accounting.GaussianDpEvent(counts["noise_multiplier"]), dp_accounting.SelfComposedDpEvent(step, 3),
    ])  # fmt: skip
    accountant = PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    together = accountant.compose(event).get_epsilon(1e-3)
    claimed = trainer.privacy_spent().epsilon
    assert together * (1 - 1e-4) <= claimed <= 4.0 and claimed == pytest.approx(together, rel=5e-3)
    assert claimed > 1.5  # far above the counts alone
    assert "1 earlier" in (tmp_path / "run" / "privacy" / "statement.md").read_text()
    ledger = DatasetLedger.read(tmp_path / "people.jsonl")
    assert len(ledger.entries) == 2 and ledger.spent >= claimed


def test_both_folders_are_verified(tmp_path):
    args = arguments(tmp_path / "run")
    release_counts(columns([EVERY[i % 24] for i in range(100)]), SIZES, args, 1.0)
    after_it(tmp_path, args)
    for folder in (tmp_path / "run", tmp_path / "run" / FOLDER):
        outcome = verify(folder)
        assert not [check for check in outcome.checks if check.status == FAILED]
        assert any("earlier runs" in check.name for check in outcome.checks) == (folder.name == "run")


def test_counts_that_are_there_are_read_and_others_refused(tmp_path):
    first = release_counts(columns(EVERY), SIZES, arguments(tmp_path / "run"), 1.0)
    args = arguments(tmp_path / "run")
    again = release_counts(columns(EVERY), SIZES, args, 1.0)
    assert all(np.array_equal(first[name], again[name]) for name in SIZES)
    assert args.earlier_runs == [str(tmp_path / "run" / FOLDER)]
    ledger = [json.loads(line) for line in (tmp_path / "run" / FOLDER / "privacy" / "ledger.jsonl").open()]
    assert sum(record["kind"] == "step" for record in ledger) == 1
    swapped = {name: SIZES[name] for name in reversed(SIZES)}  # their order is that of the weights
    for sizes, meaning in (({**SIZES, "cluster": 5}, ""), (swapped, ""), (SIZES, "ages from 30")):
        with pytest.raises(DPConfigError, match="the counts of another run .*(sizes|meaning_of_cells)"):
            release_counts(columns(EVERY), sizes, arguments(tmp_path / "run"), 1.0, meaning=meaning)


def test_counts_without_their_charge_are_refused(tmp_path):
    release_counts(columns(EVERY), SIZES, arguments(tmp_path / "run"), 1.0)
    ledger = tmp_path / "run" / FOLDER / "privacy" / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(lines[: next(i for i, line in enumerate(lines) if json.loads(line)["kind"] == "step")]))
    with pytest.raises(DPConfigError, match="charged fewer steps than the counts"):
        release_counts(columns(EVERY), SIZES, arguments(tmp_path / "run"), 1.0)


def test_counts_that_were_charged_and_lost_are_not_made_again(tmp_path):
    release_counts(columns(EVERY), SIZES, arguments(tmp_path / "run"), 1.0)
    (tmp_path / "run" / FOLDER / "model.safetensors").unlink()
    with pytest.raises(DPBudgetExceeded, match="--earlier_runs"):
        release_counts(columns(EVERY), SIZES, arguments(tmp_path / "run"), 1.0)


def test_counts_are_not_charged_for_a_run_that_would_not_count_them(tmp_path):
    """One that took its steps in this folder already: it began with other earlier runs, or with none."""
    args = arguments(tmp_path / "run")
    release_counts(columns([EVERY[i % 24] for i in range(100)]), SIZES, args, 1.0)
    after_it(tmp_path, args)
    shutil.rmtree(tmp_path / "run" / FOLDER)
    with pytest.raises(DPConfigError, match="a run that does not count these histograms"):
        release_counts(columns([EVERY[i % 24] for i in range(100)]), SIZES, arguments(tmp_path / "run"), 1.0)
    assert not (tmp_path / "run" / FOLDER).exists()


@pytest.mark.parametrize(
    ("changes", "epsilon"), [({}, 4.0), ({}, 0.0), ({"target_epsilon": None, "noise_multiplier": 1.0}, 1.0)]
)
def test_a_part_that_is_no_part_is_refused(tmp_path, changes, epsilon):
    with pytest.raises(DPConfigError, match="no part of target_epsilon"):
        release_counts(columns(EVERY), SIZES, arguments(tmp_path / "run", **changes), epsilon)
    assert not (tmp_path / "run" / FOLDER).exists()
