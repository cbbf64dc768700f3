"""A run that is killed anywhere pays nothing: the same weights, the planned epsilon, and at most one step's update."""

from __future__ import annotations

import functools
import shutil

import pytest
import torch
from typer.testing import CliRunner

from hf_dpopt import DPConfigError, DPStorageError
from hf_dpopt.cli.app import app
from hf_dpopt.run.ledger import Ledger
from hf_dpopt.run.run_log import RunLog
from tests.helpers import tiny
from tests.run import preempted
from tests.run.preempted import LOSES, NUM_STEPS, assert_same, kill, resume

OF_A_STEP = ("before the charge", "in the charge", "after the charge", "after the noise", "in the entry",
             "after the entry", "after the optimizer")  # fmt: skip


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """(setting, lost steps) -> the trainer of a run that nothing disturbed."""
    return functools.cache(
        lambda setting, lost=frozenset(): preempted.undisturbed(tmp_path_factory.mktemp("reference"), setting, lost)
    )


def _check(trainer, left, want, lost):
    assert_same(trainer, want)
    assert trainer.privacy_spent().num_steps == NUM_STEPS
    assert trainer.privacy_spent().epsilon == trainer.plan.epsilon() <= 6.0
    ledger = Ledger.read(left / "out/privacy/ledger.jsonl")
    (chain,) = ledger.chains
    assert chain.lost == lost
    statement = (left / "out/privacy/statement.md").read_text()
    assert ("charged and made no update" in statement) == bool(lost)
    assert not (left / "out/_journal").exists()  # nothing is left to go on with
    assert not [*left.rglob("*.key")]


@pytest.mark.slow_but(4)
@pytest.mark.parametrize(
    "point, step",
    [*((point, 5) for point in OF_A_STEP), ("in a save", 6), ("after a save", 6), ("in a save", NUM_STEPS),
     ("before the charge", 1), ("in the entry", 1), ("after the optimizer", 1), ("after the charge", NUM_STEPS)],
)  # fmt: skip
def test_a_kill_anywhere_costs_at_most_one_update(tmp_path, references, point, step):
    left = tmp_path / "left"
    kill(tmp_path / "alive", left, "gaussian", point, step)
    lost = frozenset({step} if point in LOSES else ())
    _check(resume(left, "gaussian"), left, references("gaussian", lost), lost)


@pytest.mark.slow_but(2)
@pytest.mark.parametrize(
    "setting", [name for name in preempted.SETTINGS if name not in ("gaussian", *preempted.IN_SHARDS)]
)
def test_every_kind_of_run_goes_on_twice(tmp_path, references, setting):
    """Killed before its first checkpoint, and again with a step charged and not written down."""
    once, twice = tmp_path / "once", tmp_path / "twice"
    kill(tmp_path / "alive", once, setting, "after the optimizer", 2)
    kill(once, twice, setting, "after the noise", 5, resumes=True)
    _check(resume(twice, setting), twice, references(setting, frozenset({5})), {5})


@pytest.mark.parametrize("setting", ["dp2", "nu_dpftrl"])
def test_several_lost_steps(tmp_path, references, setting):
    """Of DP^2 with a delay of two steps, all releases that a scale would have been made of."""
    folders = [tmp_path / f"left{i}" for i in range(3)]
    kill(tmp_path / "alive", folders[0], setting, "in the charge", 1, save_strategy="no")
    kill(folders[0], folders[1], setting, "in the entry", 2, resumes=True, save_strategy="no")
    kill(folders[1], folders[2], setting, "after the noise", 6, resumes=True, save_strategy="no")
    want = references(setting, frozenset({1, 2, 6}))
    _check(resume(folders[2], setting, save_strategy="no"), folders[2], want, {1, 2, 6})


def test_the_answer_to_the_query_comes_from_the_journal(tmp_path, references):
    left = tmp_path / "left"
    kill(tmp_path / "alive", left, "one_query", "after the query", 1)
    _check(resume(left, "one_query"), left, references("one_query", frozenset({1})), {1})


def test_a_query_that_was_lost_is_not_asked_again(tmp_path, caplog):
    left = tmp_path / "left"
    kill(tmp_path / "alive", left, "one_query", "in the query", 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_dpopt.run.step.ask", lambda *a, **k: pytest.fail("the query was asked again"))
        trainer = resume(left, "one_query")
    assert "is not asked again" in caplog.text
    assert trainer.privacy_spent().epsilon == trainer.plan.epsilon()
    assert not any(v.any() for v in trainer._session.stages.preclip.state_dict()["moments"].values())
    assert_same(trainer, preempted.undisturbed(tmp_path / "whole", "one_query", frozenset({1}), loses_opening=True))


def test_a_kill_in_the_middle_of_a_replay_changes_nothing(tmp_path, references):
    once, twice = tmp_path / "once", tmp_path / "twice"
    kill(tmp_path / "alive", once, "banded", "after the noise", 5, save_strategy="no")
    kill(once, twice, "banded", "after a save", 3, resumes=True)  # of a checkpoint that is written in the replay
    want = references("banded", frozenset({5}))
    _check(resume(twice, "banded"), twice, want, {5})


def test_a_save_that_fails_at_the_end_can_be_made_up_for(tmp_path, references, monkeypatch):
    """The last step is charged and nothing of it saved: keys and journal stay until the run is really over."""
    trainer = preempted.make(tmp_path, "gaussian")
    save = type(trainer)._save_optimizer_and_scheduler

    def save_until_full(self, *args):
        if self.state.global_step == NUM_STEPS:
            raise OSError(28, "No space left on device")
        save(self, *args)

    with preempted.known_keys(), monkeypatch.context() as patch:
        patch.setattr(type(trainer), "_save_optimizer_and_scheduler", save_until_full)
        with pytest.raises(DPStorageError, match="No space"):
            trainer.train()
    _check(resume(tmp_path, "gaussian"), tmp_path, references("gaussian"), set())


def test_nothing_is_read_or_charged_in_a_replay(tmp_path, monkeypatch):
    left = tmp_path / "left"
    kill(tmp_path / "alive", left, "users", "after the optimizer", 5, save_strategy="no")
    trainer = preempted.make(left, "users")
    read, charged = [], []
    records, charge = trainer.train_dataset, RunLog.charge

    class Counting(list):
        def __getitem__(self, i):
            read.append((trainer.state.global_step, i))
            return super().__getitem__(i)

    trainer.train_dataset = Counting(records)
    monkeypatch.setattr(RunLog, "charge", lambda *a: charged.append(a[-1]) or charge(*a))
    with preempted.known_keys():
        trainer.train(resume_from_checkpoint=True)
    assert charged == list(range(6, NUM_STEPS + 1))
    assert {step for step, _ in read if step} == set(range(5, NUM_STEPS))


def test_the_doctor_says_what_a_resume_takes_again(tmp_path):
    left = tmp_path / "left"
    kill(tmp_path / "alive", left, "gaussian", "after the charge", 6)
    command = ["doctor", str(left / "out"), "--private-state-dir", str(left / "keys")]
    said = CliRunner().invoke(app, command).output
    assert "a resume takes again at no cost; 1 of them cost epsilon and change no weights" in said
    assert "and the journal, under its key; 2 steps are left" in said and "second time" not in said


def test_without_checkpoint_and_journal_nothing_goes_on(tmp_path):
    left = tmp_path / "left"
    kill(tmp_path / "alive", left, "gaussian", "after the optimizer", 2)
    before = (left / "out/privacy/ledger.jsonl").read_bytes()
    shutil.rmtree(left / "out/_journal")
    with pytest.raises(DPConfigError, match="no journal that leads from the initial weights to step 2.*start over"):
        resume(left, "gaussian")
    assert (left / "out/privacy/ledger.jsonl").read_bytes() == before


def test_a_resume_before_anything_was_charged_is_a_beginning(tmp_path, references):
    """Also where there is no folder yet: a job that is started again always resumes."""
    _check(resume(tmp_path, "gaussian"), tmp_path, references("gaussian"), set())


def test_other_initial_weights_are_refused(tmp_path):
    left = tmp_path / "left"
    kill(tmp_path / "alive", left, "lora", "after the optimizer", 2)
    before = (left / "out/privacy/ledger.jsonl").read_bytes()
    other = preempted.adapted()
    with torch.no_grad():
        next(p for n, p in other.named_parameters() if "lora_A" in n)[0, 0] += 1e-6
    with pytest.raises(DPConfigError, match="began from other weights.*same seed"):
        resume(left, "lora", model=other)
    assert (left / "out/privacy/ledger.jsonl").read_bytes() == before


ANYHOW = {"target_epsilon": None, "noise_multiplier": 1.0}  # a run that starts over costs more than was planned


def test_a_chain_goes_on_with_its_own_records_alone(tmp_path):
    """A chain of steps has one order of the records: with two, a record may come back sooner than its noise allows."""
    first, second = tiny.records(64), tiny.records(64)[32:] + tiny.records(64)[:32]
    kill(tmp_path / "a", tmp_path / "b", "banded", "before the charge", 7, train_dataset=first, **ANYHOW)
    over = {"train_dataset": second, "save_strategy": "no", **ANYHOW}
    kill(tmp_path / "b", tmp_path / "c", "banded", "after the optimizer", 6, **over)
    with pytest.raises(DPConfigError, match="not those that this run began with"):
        resume(tmp_path / "c", "banded", train_dataset=second, **ANYHOW)
    resume(tmp_path / "c", "banded", train_dataset=first, **ANYHOW)
    ledger = Ledger.read(tmp_path / "c/out/privacy/ledger.jsonl")
    assert ledger.charged == (8, 6), "the first chain goes on from its own checkpoint"


def test_a_branch_goes_on_by_its_own_journal(tmp_path):
    """The answer to the query is in the checkpoint that the branch began from, and in no journal."""
    kill(tmp_path / "a", tmp_path / "b", "one_query", "after the optimizer", 5, **ANYHOW)
    shutil.rmtree(tmp_path / "b/out/_journal")
    kill(tmp_path / "b", tmp_path / "c", "one_query", "after the optimizer", 5, resumes=True, **ANYHOW)
    trainer = resume(tmp_path / "c", "one_query", **ANYHOW)
    charged = Ledger.read(tmp_path / "c/out/privacy/ledger.jsonl").charged
    assert trainer.state.global_step == NUM_STEPS and charged == (5, NUM_STEPS - 3)


def test_checkpoints_for_the_journal_take_no_place_of_others(tmp_path):
    step = 4 * sum(p.numel() for p in preempted.model().parameters()) / 1e9
    options = {"save_steps": 25, "max_steps": 30, "save_total_limit": 1, **ANYHOW}
    trainer = preempted.make(tmp_path, "gaussian", journal_limit=11.5 * step, **options)
    seen = set()

    names = lambda: tuple(sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*")))  # noqa: E731
    trainer.add_callback(tiny.At("save", lambda *_: seen.add(names())))
    trainer.train()
    assert any(len(names) == 1 and names != ("checkpoint-25",) for names in seen), seen  # some are forced
    assert {path.name for path in (tmp_path / "out").glob("checkpoint-*")} <= {"checkpoint-25", "checkpoint-30"}


def test_a_journal_that_is_deleted_begins_anew_with_the_next_step(tmp_path):
    delete = tiny.At("step_end", lambda *_: shutil.rmtree(tmp_path / "out/_journal"), 3)
    trainer = preempted.make(tmp_path, "gaussian", save_strategy="no", callbacks=[delete])
    trainer.train()
    assert trainer.state.global_step == NUM_STEPS


def test_a_run_with_public_gradients_saves_resumes_and_is_released(tmp_path):
    """What its preconditioner keeps are numbers of public records, which no scan takes for private ones."""
    options = {"preconditioner": "adadps", "public_dataset": tiny.records(128)[64:], "data_collator": tiny.collate}
    kill(tmp_path / "a", tmp_path / "b", "gaussian", "after the optimizer", 5, **options)
    trainer = resume(tmp_path / "b", "gaussian", **options)
    trainer.save_model()
    assert trainer.state.global_step == NUM_STEPS and (tmp_path / "b/out/model.safetensors").is_file()
