"""A ledger that is behind its key: put back to a backup, or copied while the key is shared. No noise is used twice."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_dpopt import DPBudgetExceeded, DPConfigError, DPTrainer
from tests.adversary import forging
from tests.adversary.forging import assert_fresh
from tests.helpers import tiny
from tests.helpers.run_files import ledger
from tests.reliability.faults import watched

BACKUP_AT, STOPPED_AT, NUM_STEPS = 3, 5, 6
MECHANISMS = {
    "gaussian": {},
    "nu_dpftrl": {"noise_mechanism": "nu_dpftrl", "noise_kwargs": {"nu": 0.1}},
}


def train(
    out: Path,
    *,
    backup: Path | None = None,
    stop: int = STOPPED_AT,
    resume: Any = None,
    **changes: Any,
) -> tuple[DPTrainer, dict[int, torch.Tensor]]:
    """A run of at most `stop` of its steps, with a checkpoint (and its backup) after half of them."""
    copies = [] if backup is None else [tiny.At("save", lambda *_: shutil.copytree(out, backup), BACKUP_AT)]
    return forging.train(out, stop=stop, resume=resume, save_steps=BACKUP_AT, callbacks=copies, **changes)


def corrected(num: int = 3) -> list[dict[str, Any]]:
    """The records after somebody has corrected a few labels."""
    return [row | {"label": 1 - row["label"]} if i < num else row for i, row in enumerate(tiny.records())]


def put_back(out: Path, backup: Path) -> None:
    shutil.rmtree(out)
    shutil.move(backup, out)


@pytest.mark.slow_but(2)
@pytest.mark.parametrize("how", ["rolled back", "copied"])
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_steps_that_the_ledger_has_forgotten_get_other_noise_and_are_charged(tmp_path, mechanism, how):
    """Three labels are corrected in between: with the same noise the two releases would differ by gradients alone.

    A fixed order, which correlated noise has here, refuses other records; the same ones draw the same noise as well.
    """
    records = corrected() if mechanism == "gaussian" else tiny.records()
    out, backup = tmp_path / "out", tmp_path / "backup"
    changes = dict(MECHANISMS[mechanism])
    if how == "copied":
        changes["private_state_dir"] = str(tmp_path / "keys")
    _, first = train(out, backup=backup, **changes)
    if how == "rolled back":
        put_back(out, backup)
    again = out if how == "rolled back" else backup
    checkpoint = str(again / f"checkpoint-{BACKUP_AT}")
    made, second = train(again, resume=checkpoint, train_dataset=records, **changes)
    assert sorted(first.keys() & second.keys())[-1] == STOPPED_AT
    assert_fresh(made, first, second)
    assert ledger(again).charged == (STOPPED_AT, STOPPED_AT - BACKUP_AT)
    alone = made.plan.epsilon(STOPPED_AT)
    assert made.privacy_spent().epsilon > alone and made.privacy_spent().num_steps == 2 * STOPPED_AT - BACKUP_AT


def test_a_finished_run_that_is_put_back_is_known_though_its_keys_are_gone(tmp_path):
    out, backup, keys = tmp_path / "out", tmp_path / "backup", tmp_path / "keys"
    train(out, backup=backup, stop=NUM_STEPS, private_state_dir=str(keys))
    assert not list(keys.rglob("*.key"))
    put_back(out, backup)
    budget = {"noise_multiplier": None, "target_epsilon": 1.05 * made_epsilon(tmp_path, NUM_STEPS)}
    with pytest.raises(DPBudgetExceeded, match="6 steps of this run are already charged.*the 3 steps"):
        train(out, resume=str(out / f"checkpoint-{BACKUP_AT}"), private_state_dir=str(keys), **budget)
    assert ledger(out).charged == (NUM_STEPS,), "what ran is charged, also where the run that finds it is refused"
    train(out, resume=str(out / f"checkpoint-{BACKUP_AT}"), stop=NUM_STEPS, private_state_dir=str(keys))
    assert ledger(out).charged == (NUM_STEPS, NUM_STEPS - BACKUP_AT)


def made_epsilon(folder: Path, num_steps: int) -> float:
    """What so many steps cost in the runs above."""
    return tiny.trainer(folder / "unused", max_steps=num_steps, clipping_norm=0.1).plan.epsilon()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_step_is_on_the_disk_before_the_model_sees_a_record_of_it(tmp_path):
    """First in the log beside the key, then in the ledger."""
    done: list[str] = []

    model = tiny.model()
    model.register_forward_pre_hook(lambda *_: done.append("forward"))
    made = tiny.trainer(
        tmp_path / "out", model=model, callbacks=[tiny.At("step_begin", lambda *_: done.append("step"))], max_steps=3, journal_limit=0.0, sampling="fixed_order",
        private_state_dir=str(tmp_path / "keys"), logging_strategy="no",
    )  # fmt: skip
    with watched(lambda name, path: done.append(path.name) if name == "fsync" else None):
        made.train()
    steps = "\n".join(done).split("step\n")[1:]
    assert len(steps) == 3 and all(step.startswith("log.jsonl\nledger.jsonl\nforward\n") for step in steps)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """A run that was stopped at its checkpoint; it is not changed."""
    folder = tmp_path_factory.mktemp("stopped")
    train(folder / "out", stop=BACKUP_AT, private_state_dir=str(folder / "keys"))
    return folder


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"label_smoothing_factor": 0.1}, "training.label_smoothing_factor: 0.0 in the ledger, 0.1 now"),
        ({"model": tiny.model(dropout=0.3)}, "training.config.hidden_dropout_prob: 0.0 in the ledger, 0.3 now"),
        ({"per_example_loss_func": lambda outputs, labels: outputs.logits.sum(1)}, "training.loss"),
        ({"bf16": True}, "training.bf16: False in the ledger, True now"),
    ],
)
def test_what_makes_a_gradient_is_the_same_after_a_resume(stopped, tmp_path, changes, named):
    out = tmp_path / "out"
    shutil.copytree(stopped / "out", out)
    before = (out / "privacy/ledger.jsonl").read_bytes()
    with pytest.raises(DPConfigError, match=f"{named}.*Continue with the same options"):
        train(out, resume=str(out / f"checkpoint-{BACKUP_AT}"), private_state_dir=str(stopped / "keys"), **changes)
    assert (out / "privacy/ledger.jsonl").read_bytes() == before


def test_other_options_are_allowed_where_training_starts_anew(stopped, tmp_path):
    """Its chain is another one, and the options are those of the statement from then on."""
    shutil.copytree(stopped / "out", tmp_path / "out")
    keys = str(tmp_path / "keys")
    train(tmp_path / "out", stop=1, private_state_dir=keys, label_smoothing_factor=0.1)
    assert ledger(tmp_path / "out").charged == (BACKUP_AT, 1)
    assert ledger(tmp_path / "out").plan["training"]["label_smoothing_factor"] == 0.1
