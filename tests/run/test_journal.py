"""The journal of releases is the run's, whole, and in its ledger, or it is refused; it is published nowhere."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers.trainer
from huggingface_hub.utils import filter_repo_objects

from hf_dpopt import DPConfigError
from hf_dpopt.run.journal import JOURNAL, STEP, Journal
from hf_dpopt.run.ledger import Ledger
from hf_dpopt.run.run_log import RunLog, find_run
from tests.helpers import tiny
from tests.run import preempted


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A run without a checkpoint that died after step 5; and one of another key."""
    folders = [tmp_path_factory.mktemp("killed") for _ in (0, 1)]
    for number, folder in enumerate(folders):
        preempted.kill(
            folder / "alive", folder / "left", "gaussian", "after the optimizer", 5, key=number, save_strategy="no"
        )
    return [folder / "left" for folder in folders]


@pytest.fixture
def left(killed, tmp_path):
    shutil.copytree(killed[0], tmp_path / "left")
    return tmp_path / "left"


def _own(folder):
    """The chain and the journal of a folder."""
    found = find_run(folder / "out", folder / "keys")
    chain = found.keys.load(found.ledger.last_chain.chain_id)
    return chain, Journal(folder / "out", chain.chain_id, limit=1e9)


def _entry(folder, step, kind="step"):
    (path,) = (folder / "out" / JOURNAL).glob(f"*-{step:09d}-{kind}.release")
    return path


def _resume(folder, **changes):
    return preempted.resume(folder, "gaussian", save_strategy="no", **changes)


def _flip(path, position):
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def _flipped_value(folder):
    _flip(_entry(folder, 3), 400)


def _flipped_first_byte(folder):
    _flip(_entry(folder, 3), 0)


def _flipped_base(folder):
    _flip(_entry(folder, 0, "base"), 40)


def _missing_entry(folder):
    _entry(folder, 3).unlink()


def _of_another_step(folder):
    shutil.copy(_entry(folder, 4), _entry(folder, 3))


def _of_another_run(folder, other):
    shutil.rmtree(folder / "out" / JOURNAL)
    shutil.copytree(other / "out" / JOURNAL, folder / "out" / JOURNAL)


def _of_another_run_renamed(folder, other):
    names = sorted(path.name for path in (folder / "out" / JOURNAL).iterdir())
    _of_another_run(folder, other)
    for path, name in zip(sorted((folder / "out" / JOURNAL).iterdir()), names, strict=True):
        path.rename(path.with_name(name))


def _not_charged(folder):
    *_, journal = _own(folder)
    journal.write(STEP, 6, {"w": torch.zeros(3)})


def _noted_as_lost(folder):
    with RunLog.open(folder / "out", folder / "keys") as log:
        log.lose(log.state.last_chain.chain_id, 5)


def _of_other_tensors(folder):
    """As the run would write it, of a step that is charged, and of another model."""
    *_, journal = _own(folder)
    journal.write(STEP, 5, {"w": torch.zeros(3)})


def _a_folder(folder):
    path = _entry(folder, 3)
    path.unlink()
    path.mkdir()


def _a_link_to_itself(folder):
    path = _entry(folder, 3)
    path.unlink()
    path.symlink_to(path.name)


FORGERIES = {
    _a_folder: "cannot be read .*regular file",
    _a_link_to_itself: "cannot be read .*symbolic links",
    _flipped_value: "step 3 is not what was written",
    _flipped_first_byte: "step 3 is not what was written",
    _flipped_base: "step 0 is not what was written",
    _missing_entry: "step 3 is missing, and later ones are there",
    _of_another_step: "step 3 is not what was written",
    _of_another_run: "no journal that leads from the initial weights to step 5",
    _of_another_run_renamed: "step 0 is not what was written",
    _not_charged: "knows of no release of step 6",
    _noted_as_lost: "knows of no release of step 5",
    _of_other_tensors: "step 5 does not fit the model",
}


@pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__)
def test_a_journal_that_is_not_the_runs_own_is_refused(left, killed, forge):
    forge(*([left, killed[1]] if "another_run" in forge.__name__ else [left]))
    before = (left / "out/privacy/ledger.jsonl").read_bytes()
    with pytest.raises(DPConfigError, match=f"{FORGERIES[forge]}.*([Pp]ut the f|[Rr]emove |[Ss]tart over)"):
        _resume(left)
    assert (left / "out/privacy/ledger.jsonl").read_bytes() == before


def test_a_torn_last_entry_counts_as_not_written(left):
    path = _entry(left, 5)
    path.write_bytes(path.read_bytes()[:-1])
    trainer = _resume(left)
    assert trainer.privacy_spent().epsilon == trainer.plan.epsilon()
    ledger = Ledger.read(left / "out/privacy/ledger.jsonl")
    assert [chain.lost for chain in ledger.chains] == [{5}]


def test_entries_that_are_cut_off_make_no_loss_of_several_steps(left):
    """Removed whole, the last two look like a journal that was not kept: the run is one without."""
    _entry(left, 4).unlink()
    _entry(left, 5).unlink()
    before = (left / "out/privacy/ledger.jsonl").read_bytes()
    with pytest.raises(DPConfigError, match="no journal that leads from the initial weights to step 5"):
        _resume(left)
    assert (left / "out/privacy/ledger.jsonl").read_bytes() == before


def test_a_checkpoint_that_the_journal_does_not_begin_at_is_gone_on_with_as_before(tmp_path):
    """The journal reaches back to the last checkpoint; an older one begins a chain of its own, and pays."""
    left = tmp_path / "left"
    preempted.kill(tmp_path / "alive", left, "gaussian", "after the optimizer", 7)
    trainer = preempted.make(left, "gaussian", target_epsilon=9.0)
    trainer.train(resume_from_checkpoint=str(left / "out/checkpoint-3"))
    chains = Ledger.read(left / "out/privacy/ledger.jsonl").charged
    assert chains == (7, 5)


def test_the_journal_is_emptied_by_checkpoints_and_has_one_when_it_is_full(tmp_path):
    sizes, kept = [], []
    entry = 4 * sum(p.numel() for p in preempted.model().parameters())

    def look(state, model):
        files = list((tmp_path / "out" / JOURNAL).iterdir())
        sizes.append(sum(path.stat().st_size for path in files) // entry)
        kept.append(sorted(path.name for path in (tmp_path / "out").glob("checkpoint-*")))

    limit = 10.5 * entry / 1e9
    options = {
        "save_strategy": "no",
        "max_steps": 25,
        "callbacks": [tiny.At("step_end", look)],
        "target_epsilon": 12.0,
    }
    preempted.make(tmp_path, "gaussian", journal_limit=limit, **options).train()
    assert max(sizes) <= 10 and sizes[0] >= 1 and min(sizes[10:]) >= 1
    assert any(kept) and all(len(names) <= 1 for names in kept), (
        "a checkpoint of the journal takes the place of another"
    )


def test_every_entry_is_on_the_disk_before_the_optimizer_steps(tmp_path, monkeypatch):
    synced, seen, fsync = set(), [], os.fsync

    def noting(descriptor):
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def look(state, model):
        folder = tmp_path / "out" / JOURNAL
        assert {folder.stat().st_ino, *(path.stat().st_ino for path in folder.iterdir())} <= synced
        *_, journal = _own(tmp_path)
        seen.append((max(journal.contents().steps), state.global_step + 1))

    monkeypatch.setattr(os, "fsync", noting)
    preempted.make(tmp_path, "gaussian", callbacks=[tiny.At("pre_optimizer_step", look)]).train()
    assert seen == [(step, step) for step in range(1, preempted.NUM_STEPS + 1)]


def test_a_limit_that_holds_few_steps_keeps_no_journal(tmp_path, caplog):
    entry = 4 * sum(p.numel() for p in preempted.model().parameters())
    preempted.make(tmp_path, "gaussian", journal_limit=9 * entry / 1e9, save_strategy="no").train()
    assert "No journal is kept" in caplog.text
    assert not list((tmp_path / "out").glob("checkpoint-*"))


@pytest.mark.parametrize(
    "changes",
    [
        {"journal_limit": 0.0},
        {"target_epsilon": None, "noise_multiplier": 0.0},  # what it would hold is not released
        {"unsafe_fixed_noise_key": "22" * 32},  # never gone on with
        {"save_only_model": True},  # no checkpoint would ever empty it
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_runs_that_keep_none(tmp_path, changes):
    with mock.patch.object(Journal, "_append", side_effect=AssertionError("an entry")):
        preempted.make(tmp_path, "gaussian", **changes).train()
    assert not (tmp_path / "out" / JOURNAL).exists()


def test_no_push_takes_it_and_no_scan_reads_it(left, monkeypatch):
    uploads = []

    class Hub:
        def upload_folder(self, **options):
            uploads.append(options)

    trainer = preempted.make(left, "gaussian", hub_strategy="all_checkpoints")
    monkeypatch.setattr(transformers.trainer, "hf_api", Hub)
    monkeypatch.setattr(type(trainer), "init_hf_repo", lambda self, **k: setattr(self, "hub_model_id", "me/mine"))
    trainer.hub_model_id, trainer.push_in_progress = "me/mine", None
    (left / "out" / JOURNAL / "planted").write_bytes(_own(left)[0].root)  # a key, where nothing looks
    (left / "out" / "checkpoint-3").mkdir()
    trainer.push_to_hub(blocking=False)
    trainer._push_from_checkpoint(str(left / "out" / "checkpoint-3"))
    assert len(uploads) == 3
    for upload in uploads:
        root = upload["folder_path"]
        files = [str(path.relative_to(root)) for path in _walk(root)]
        taken = list(filter_repo_objects(files, ignore_patterns=upload.get("ignore_patterns")))
        assert not any(JOURNAL in name for name in taken)
    assert any(JOURNAL in str(path) for path in _walk(left / "out"))


def _walk(root):
    return [path for path in Path(root).rglob("*") if path.is_file()]


def test_names_keep_their_order_and_chains_tell_journals_apart(tmp_path):
    """What is read has the names in the order in which the step had them: it tells two queries apart."""
    values = {"b": torch.arange(3.0), "a": torch.ones(2, 2), "b (query 2)": torch.zeros(3), "empty": torch.zeros(0, 4)}
    journal = Journal(tmp_path, "chain", limit=1e9)
    journal.begin(0, "base")
    journal.write(STEP, 1, values)
    again = journal.read(Journal(tmp_path, "chain").contents().steps[1])
    assert list(again) == list(values) and all(torch.equal(again[name], values[name]) for name in values)
    for path in (tmp_path / JOURNAL).iterdir():
        path.rename(path.with_name(path.name.replace("chain", "other")))
    other = Journal(tmp_path, "other").contents()
    assert not other.steps and other.damaged == {0, 1}


def test_files_behind_a_link_are_left_alone(tmp_path):
    (tmp_path / "else").mkdir()
    (tmp_path / "else/app.release").touch()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / JOURNAL).symlink_to(tmp_path / "else")
    Journal(tmp_path / "out", "a").begin(2, "")
    assert list((tmp_path / "else").iterdir())


def test_a_deleted_entry_asks_for_a_checkpoint(tmp_path):
    journal = Journal(tmp_path, "a", limit=1e9)
    journal.begin(0, "")
    journal.write(STEP, 1, {"w": torch.zeros(3)})
    assert not journal.is_full
    next((tmp_path / JOURNAL).glob("*-step.release")).unlink()
    assert journal.is_full
    journal.begin(1, "")
    assert not journal.is_full
