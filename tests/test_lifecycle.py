"""D5: kill, resume, branch, repeat. Charged steps >= executed steps, no key used twice, linear resumes bit-equal."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from hf_dpopt import DPBudgetExceeded, DPConfigError
from hf_dpopt.accounting import delta
from hf_dpopt.run.ledger import Ledger
from tests import tiny

NUM_STEPS, NUM_KILLS = 24, 20


class Executed(TrainerCallback):
    """Writes every step whose noisy gradient came to exist, in a file that outlives a kill."""

    def __init__(self, path: Path):
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.trainer = None

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        some = next(p.grad for p in model.parameters()).flatten()[:4].tolist()  # enough to tell two noises apart
        if not any(some):  # a step whose release a kill took
            return
        line = f"{self.trainer._session.run.chain.key_id} {state.global_step + 1} {','.join(map(repr, some))}\n"
        os.write(self.file, line.encode())


def _trainer(folder: Path, **changes):
    executed = Executed(folder / "executed.txt")
    trainer = tiny.trainer(
        folder / "out", max_steps=NUM_STEPS, save_strategy="steps", save_steps=5, learning_rate=1e-3,
        callbacks=[executed], **{"private_state_dir": str(folder / "keys"), **changes},
    )  # fmt: skip
    executed.trainer = trainer
    return trainer


def _last_checkpoint(out: Path) -> str | None:
    """What a stock script asks for, and is never handed half of."""
    return get_last_checkpoint(str(out)) if out.exists() else None


def _in_child(run) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            with open(os.devnull, "w") as null:
                os.dup2(null.fileno(), 1)
                os.dup2(null.fileno(), 2)
                run()
            os._exit(0)
        except BaseException as error:  # the child must never return into pytest
            Path("/tmp").joinpath(f"hf_dpopt_child_{os.getpid()}.txt").write_text(repr(error))
            os._exit(1)
    return pid


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.timeout(600)  # twenty starts of a process; a busy machine needs its time
def test_killed_at_twenty_random_points(tmp_path):
    """No step runs uncharged, whenever the process dies, and every restart finds a ledger it can continue."""
    start = time.monotonic()
    child = _in_child(lambda: _trainer(tmp_path / "timing").train()) if (tmp_path / "timing").mkdir() is None else 0
    os.waitpid(child, 0)
    whole = time.monotonic() - start
    folder = tmp_path / "run"
    folder.mkdir()
    kills, lines, keys, counts = 0, [], set(), []
    while kills < NUM_KILLS or len(keys) < 2:
        assert len(counts) < 200, f"after {kills} kills there are {len(keys)} keys"
        checkpoint = _last_checkpoint(folder / "out")
        child = _in_child(lambda checkpoint=checkpoint: _trainer(folder).train(resume_from_checkpoint=checkpoint))
        time.sleep(random.uniform(0.02, whole))  # any moment from before the ledger opens to after the last save
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0, Path(f"/tmp/hf_dpopt_child_{child}.txt").read_text()
            whole *= 0.8
            shutil.rmtree(folder / "out" / f"checkpoint-{NUM_STEPS}", ignore_errors=True)  # go on from an older one
        else:
            kills += 1
        path, before = folder / "out/privacy/ledger.jsonl", len(lines)
        charged = Ledger.read(path).num_charged if path.exists() else 0
        lines = (folder / "executed.txt").read_text().splitlines() if (folder / "executed.txt").exists() else []
        lines = list(dict.fromkeys(lines))  # what is taken again from the journal is the same, bit for bit
        counts.append((charged, len(lines)))
        keys = {line.split()[0] for line in lines}
        if len(lines) == before:
            whole *= 1.2  # the machine has become slower
        assert charged >= len(lines)
    steps = [tuple(line.split()[:2]) for line in lines]
    assert len(set(steps)) == len(steps), "a (key, step) was executed twice"
    noises = [line.split()[2] for line in lines]
    assert len(set(noises)) == len(noises)
    assert counts[-1][0] <= counts[-1][1] + kills, "at most one charged step per kill did not run"
    _trainer(folder).train(resume_from_checkpoint=_last_checkpoint(folder / "out"))


class _Snapshot(TrainerCallback):
    """Copies the whole folder when the checkpoint of a step is on the disk: the machine dies there, in the copy."""

    def __init__(self, folder: Path, to: Path, step: int):
        self.folder, self.to, self.step = folder, to, step

    def on_save(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            shutil.copytree(self.folder, self.to)


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_linear_resume_is_bit_equal(tmp_path, dropout):
    (tmp_path / "whole").mkdir()
    whole = _trainer(tmp_path / "whole", model=tiny.model(dropout))
    whole.add_callback(_Snapshot(tmp_path / "whole", tmp_path / "died", 10))
    whole.train()
    resumed = _trainer(tmp_path / "died", model=tiny.model(dropout))
    resumed.train(resume_from_checkpoint=str(tmp_path / "died/out/checkpoint-10"))
    want = tiny.weights(whole.model)
    assert all(torch.equal(p, want[n]) for n, p in tiny.weights(resumed.model).items())
    assert resumed.privacy_spent() == whole.privacy_spent() and resumed.privacy_spent().num_steps == NUM_STEPS
    assert len(Ledger.read(tmp_path / "died/out/privacy/ledger.jsonl").chains) == 1


def test_resuming_from_an_older_checkpoint_branches_and_adds_up(tmp_path):
    whole = _trainer(tmp_path)
    whole.train()
    branch = _trainer(tmp_path)
    branch.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-10"))
    ledger = Ledger.read(tmp_path / "out/privacy/ledger.jsonl")
    assert ledger.num_charged == NUM_STEPS + 14 == branch.privacy_spent().num_steps
    first, second = ledger.chains
    assert first.key_id != second.key_id and second.parent == first.chain_id and second.start_step == 10
    assert branch.privacy_spent().epsilon > whole.plan.epsilon()
    noises = [line.split()[2] for line in (tmp_path / "executed.txt").read_text().splitlines()]
    assert len(set(noises)) == len(noises)
    assert json.loads((tmp_path / "out/privacy/report.json").read_text())["chains"] == 2


@pytest.mark.slow_but(1)
@pytest.mark.parametrize(
    "changes, field",
    [
        ({"noise_multiplier": 1.5}, "noise_multiplier"),
        ({"clipping_norm": 0.5}, "clipping_norm"),
        ({"expected_batch_size": 8}, "expected_batch_size"),
        ({"sampling": "poisson"}, "sampler"),
        ({"train_dataset": tiny.records(60)}, "a run on another dataset, of 64 records"),
        ({"target_delta": 1e-4}, "delta"),
        ({"clipping": "automatic"}, "clipping"),
    ],
)
def test_resuming_with_another_plan_is_refused(tmp_path, changes, field):
    _trainer(tmp_path).train()
    before = (tmp_path / "out/privacy/ledger.jsonl").read_bytes()
    with pytest.raises(DPConfigError, match=rf"{field}.*[Cc]ontinue with the same options|{field}"):
        _trainer(tmp_path, **changes).train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-10"))
    assert (tmp_path / "out/privacy/ledger.jsonl").read_bytes() == before


def test_a_resume_keeps_the_delta_of_a_release_with_another_default(tmp_path, monkeypatch):
    """Nobody gave one, then or now; the recorded one is part of the mechanism, the default of today is not."""
    with monkeypatch.context() as patch:
        patch.setattr(delta, "default_delta", lambda n: 1e-2)
        _trainer(tmp_path, target_delta=None).train()
    assert delta.default_delta(64) == 1e-3
    resumed = _trainer(tmp_path, target_delta=None)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-10"))
    assert resumed.plan.delta == resumed.privacy_spent().delta == 1e-2


def test_an_edited_ledger_stops_a_resume_and_a_missing_one_is_written_again(tmp_path):
    _trainer(tmp_path).train()
    path = tmp_path / "out/privacy/ledger.jsonl"
    content = path.read_text()
    path.write_text(content.replace('"step":7', '"step":6', 1))
    with pytest.raises(DPConfigError, match="edited"):
        _trainer(tmp_path).train(resume_from_checkpoint=True)
    path.unlink()
    with pytest.raises(DPConfigError, match="ledger"):  # where the log of the run is not either
        _trainer(tmp_path, private_state_dir=str(tmp_path / "none")).train(resume_from_checkpoint=True)
    again = _trainer(tmp_path)
    again.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-20"))  # it is written again from the log
    assert Ledger.read(path).num_charged == NUM_STEPS + 4 == again.privacy_spent().num_steps


def test_a_branch_over_the_budget_is_refused_and_mended(tmp_path):
    """The two ways out that the message offers both work."""
    budget = {"noise_multiplier": None, "target_epsilon": 3.0}
    _trainer(tmp_path, **budget).train()
    checkpoint = str(tmp_path / "out/checkpoint-10")
    with pytest.raises(DPBudgetExceeded, match="--target_epsilon"):
        _trainer(tmp_path, **budget).train(resume_from_checkpoint=checkpoint)
    more = _trainer(tmp_path, noise_multiplier=None, target_epsilon=6.0)
    more.train(resume_from_checkpoint=checkpoint)
    assert 3.0 < more.privacy_spent().epsilon <= 6.0
    assert more.plan.noise_multiplier == json.loads((tmp_path / "out/privacy/report.json").read_text())["plan"]["noise_multiplier"]  # fmt: skip


def test_each_chain_of_a_fixed_order_has_participations_of_its_own(tmp_path):
    """Two chains of half an epoch each can both show the same record: the cost is that of two epochs, not of one."""
    options = {"sampling": "fixed_order", "adjacency": "zero_out", "expected_batch_size": 4, "max_steps": 6}
    first = tiny.trainer(tmp_path, **options)
    first.train()
    once = first.privacy_spent().epsilon
    first.train()
    twice = first.privacy_spent()
    assert twice.num_steps == 12 < first.plan.sampler.steps_per_epoch
    assert twice.epsilon == pytest.approx(first.plan.epsilon((6, 6)))
    assert twice.epsilon > 1.2 * once
    with pytest.raises(DPBudgetExceeded):
        over = tiny.trainer(tmp_path, **options | {"noise_multiplier": None, "target_epsilon": once * 1.1})
        over.train()


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    """Its step number fits, its weights were never paid for here."""
    for name, sigma in (("mine", 1.0), ("other", 0.0)):
        (tmp_path / name).mkdir()
        _trainer(tmp_path / name, noise_multiplier=sigma).train()
    with pytest.raises(DPConfigError, match="was not written by a run of.*initial model"):
        _trainer(tmp_path / "mine").train(resume_from_checkpoint=str(tmp_path / "other/out/checkpoint-10"))


def test_a_budget_is_not_kept_on_top_of_a_run_without_noise(tmp_path):
    _trainer(tmp_path, noise_multiplier=0.0).train()
    with pytest.raises(DPConfigError, match="another output_dir"):
        _trainer(tmp_path, noise_multiplier=None, target_epsilon=8.0)
