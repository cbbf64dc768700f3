"""Chains of a run and their secrets: what goes on under which key, what a release must not hold, what a reader makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from hf_dpopt import DPConfigError, PrivateRun
from hf_dpopt.cli.doctor import show_health
from hf_dpopt.plan.plan import PrivacyPlan
from hf_dpopt.report.release_scan import scan_for_secrets
from hf_dpopt.run import keys
from hf_dpopt.run.checkpoint import write_manifest
from hf_dpopt.run.journal import Journal
from hf_dpopt.run.keys import private_dir, secrets_in
from hf_dpopt.run.ledger import LEDGER, Ledger
from tests.helpers import tiny
from tests.run import preempted
from tests.run.one_run import begin, plan_of, release


@pytest.fixture(params=["gaussian", "nu_dpftrl"])
def plan(request) -> PrivacyPlan:
    return plan_of(noise_mechanism=request.param)


def _step(run: PrivateRun, step: int, used: list[tuple[str, int]]) -> None:
    run.draw(step)
    release(run, step)
    used.append((run.chain.key_id, step))


def _save(run: PrivateRun, folder: Path, weights: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text(weights)
    write_manifest(folder, *run.stand())
    return folder


# --- which chain ---


def test_a_checkpoint_of_another_chain_begins_a_new_one(plan, tmp_path):
    """Two chains stand at the same step with other weights, and the last one is asked to go on with the first's.

    Its noise and its batches of the steps to come belong to its own weights; nothing is drawn for both. From its own
    checkpoint it goes on, whatever was trained in between.
    """
    used: list[tuple[str, int]] = []
    first = begin(plan, tmp_path)
    _step(first, 1, used)
    _step(first, 2, used)
    of_first = _save(first, tmp_path / "first" / "checkpoint-2", "first")
    _step(first, 3, used)
    first.close()
    second = begin(plan, tmp_path)
    _step(second, 1, used)
    _step(second, 2, used)
    of_second = _save(second, tmp_path / "second" / "checkpoint-2", "second")
    second.close()

    third = begin(plan, tmp_path, resume_step=2, checkpoint=of_first)
    assert third.chain.chain_id not in (first.chain.chain_id, second.chain.chain_id)
    assert "that of an earlier chain" in third.ledger.last_chain.note
    _step(third, 3, used)
    third.close()
    fourth = begin(plan, tmp_path, resume_step=2, checkpoint=of_second)
    assert fourth.chain.chain_id == second.chain.chain_id
    _step(fourth, 3, used)
    fourth.close()
    assert len(set(used)) == len(used) == 7
    assert Ledger.read(tmp_path / "out" / LEDGER).charged == (3, 3, 1)


@pytest.mark.parametrize("options", ["its own", "those of the training in between"])
def test_a_chain_goes_on_with_its_own_options(plan, tmp_path, options):
    """Not with those that were recorded last: a copy may have been trained anew with others."""
    used: list[tuple[str, int]] = []
    for loss in ("its own", "those of the training in between"):
        run = begin(plan, tmp_path, training={"loss": loss})
        _step(run, 1, used)
        saved = _save(run, tmp_path / loss / "checkpoint-1", loss)
        run.close()
    saved = tmp_path / "its own" / "checkpoint-1"
    if options != "its own":
        with pytest.raises(DPConfigError, match="training.loss: 'its own' in the ledger"):
            begin(plan, tmp_path, training={"loss": options}, resume_step=1, checkpoint=saved)
        return
    resumed = begin(plan, tmp_path, training={"loss": options}, resume_step=1, checkpoint=saved)
    assert resumed.chain.key_id == used[0][0] and resumed.charged == [1, 1]
    resumed.close()


def test_a_finished_run_says_so(tmp_path):
    made = {"private_state_dir": str(tmp_path / "keys"), "save_strategy": "no"}
    tiny.trainer(tmp_path / "out", **made).train()
    with pytest.raises(DPConfigError, match="step 6, which .*If the run is finished, load the model that it saved"):
        tiny.trainer(tmp_path / "out", **made).train(resume_from_checkpoint=True)


def test_a_torn_entry_before_steps_without_a_journal_is_no_edited_one(tmp_path):
    """The kill tore the entry of step 5; steps 6 and 7 kept none. The run goes on from its checkpoint, at their cost."""
    options = {"save_steps": 4, "noise_multiplier": 1.0, "target_epsilon": None}
    alive, left, again = (tmp_path / name for name in ("alive", "left", "again"))
    preempted.kill(alive, left, "gaussian", "in the entry", 5, **options)
    preempted.kill(left, again, "gaussian", "after the optimizer", 7, resumes=True, journal_limit=0.0, **options)
    trainer = preempted.resume(again, "gaussian", **options)
    assert trainer._session.run.recovery is None and trainer._session.run.charged == [7, 4]


# --- secrets ---


def test_every_key_is_among_the_secrets_and_is_found_where_it_was_planted(tmp_path):
    """Keys are found by what is derived of the root while a run opens, saves and goes on, not by a list of names."""
    plan = plan_of(noise_mechanism="nu_dpftrl", noise_kwargs={"nu": 0.1})
    made: list[tuple[bytes, bytes]] = []

    def spying(derive: Any) -> Any:
        def derived(root: bytes, *labels: str) -> bytes:
            made.append((root, derive(root, *labels)))
            return made[-1][1]

        return derived

    with mock.patch.object(keys, "derive_key", spying(keys.derive_key)):
        run = begin(plan, tmp_path, journal_limit=1e9)
        _step(run, 1, [])
        saved = _save(run, tmp_path / "saved" / "checkpoint-1", "weights")
        run.close(is_finished=False)
        run = begin(plan, tmp_path, resume_step=1, checkpoint=saved, journal_limit=1e9)
        _ = run.chain.dropout_key
        run.close(is_finished=False)
    found = secrets_in(tmp_path / "keys")
    derived = {key for root, key in made if root == run.chain.root}
    wanted = {run.chain.root, *derived}
    assert len(derived) >= 3 and wanted <= set(found)
    for number, key in enumerate(sorted(wanted)):
        for spelling in (key, key.hex().encode()):
            folder = tmp_path / f"planted-{number}-{spelling == key}"
            folder.mkdir()
            (folder / "notes.txt").write_bytes(b"before " + spelling + b" after")
            assert scan_for_secrets(folder, found), (number, spelling == key)


# --- who reads makes nothing ---


def test_looking_at_a_run_makes_nothing_and_reads_its_journal_once(tmp_path, capsys):
    left = tmp_path / "left"
    preempted.kill(tmp_path / "alive", left, "gaussian", "after the entry", 5)
    before = sorted(left.rglob("*"))
    contents = mock.Mock(side_effect=Journal.contents, autospec=Journal.contents)
    with mock.patch.object(Journal, "contents", lambda journal: contents(journal)):
        show_health(left / "out", left / "keys")
    assert contents.call_count == 1 and "steps 4 to 5, which a resume takes again" in capsys.readouterr().out
    assert sorted(left.rglob("*")) == before
    empty = tmp_path / "empty"
    empty.mkdir(mode=0o700)
    show_health(left / "out", empty)
    assert not any(empty.iterdir())
    assert secrets_in(private_dir(tmp_path / "none", left, is_read=True)) == []
    assert not (tmp_path / "none").exists()
