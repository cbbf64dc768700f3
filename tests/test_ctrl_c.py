"""Ctrl-C ends a script after a step, with a checkpoint and exit code 130; a session at a prompt gets KeyboardInterrupt."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from hf_dpopt.common import collectives
from hf_dpopt.common.log import logger
from hf_dpopt.run.ledger import Ledger
from tests import preempted, ranks, tiny
from tests.preempted import NUM_STEPS

LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def _as_in_a_terminal() -> Iterator[None]:
    """Processes that a shell starts in the background ignore Ctrl-C, and so would those of the tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Pause(TrainerCallback):
    """Waits in the middle of a step, until the test has sent what it sends."""

    def __init__(self, folder: Path, step: int = 4):
        self.folder, self.step = folder, step

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step + 1 == self.step:
            (self.folder / "ready").touch()
            _wait_for(self.folder / "sent")


def _wait_for(path: Path) -> None:
    end = time.monotonic() + LIMIT_S
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.01)


def _train(folder: Path, prepare: Callable[[], Any], options: dict[str, Any]) -> None:
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    logger.handlers.clear()
    prepare()
    with preempted.known_keys():
        preempted.make(folder, "nu_dpftrl", callbacks=[Pause(folder)], **options).train()


def _interrupted(
    folder: Path, pauses: tuple[float, ...] = (), prepare: Callable[[], Any] = lambda: None, **options: Any
) -> tuple[int, str]:
    """Exit code and output of a process that gets SIGINT in its fourth step, and again after each pause."""
    process = multiprocessing.get_context("fork").Process(target=_train, args=(folder, prepare, options))
    process.start()
    assert process.pid is not None
    _wait_for(folder / "ready")
    os.kill(process.pid, signal.SIGINT)
    for pause in pauses:
        time.sleep(pause)
        os.kill(process.pid, signal.SIGINT)
    if not any(pause > 1 for pause in pauses):  # else the process ends in the middle of the step
        (folder / "sent").touch()
    process.join(LIMIT_S)
    assert process.exitcode is not None
    return process.exitcode, (folder / "output").read_text()


def _assert_ends_as_undisturbed(folder: Path, want: Any, **options: Any) -> None:
    again = preempted.make(folder, "nu_dpftrl", **options)
    with preempted.known_keys():
        again.train(resume_from_checkpoint=True)
    weights, spent = want
    assert all(torch.equal(p, weights[name]) for name, p in tiny.weights(again.model).items())
    assert again.privacy_spent() == spent and spent.num_steps == NUM_STEPS
    assert Ledger.read(folder / "out/privacy/ledger.jsonl").charged == (NUM_STEPS,)


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("pauses", [(), (0.2,), (0.1, 0.1)], ids=["once", "by the launcher, too", "three times"])
def test_ctrl_c_ends_at_a_step_and_costs_nothing(tmp_path, pauses):
    options = {"save_strategy": "no"}
    code, output = _interrupted(tmp_path, pauses, **options)
    assert code == 130 and "Traceback" not in output
    assert "Stopping after this step" in output and "Stopped after step 4 of 8" in output
    assert Ledger.read(tmp_path / "out/privacy/ledger.jsonl").charged == (4,)
    _assert_ends_as_undisturbed(tmp_path, preempted.reference(tmp_path / "reference", "nu_dpftrl"), **options)


def test_a_second_ctrl_c_ends_at_once(tmp_path):
    """In the middle of the fourth step, which was released: the journal has it, so it is not lost."""
    code, output = _interrupted(tmp_path, (1.2,))
    assert code == 130 and "Traceback" not in output
    assert not (tmp_path / "out/checkpoint-4").exists()
    _assert_ends_as_undisturbed(tmp_path, preempted.reference(tmp_path / "reference", "nu_dpftrl"))


def _at_a_prompt() -> None:
    sys.ps1 = ">>> "


def test_at_a_prompt_it_interrupts_the_step(tmp_path):
    code, output = _interrupted(tmp_path, prepare=_at_a_prompt)
    assert code == 1 and "KeyboardInterrupt" in output and "Stopp" not in output
    _assert_ends_as_undisturbed(tmp_path, preempted.reference(tmp_path / "reference", "nu_dpftrl"))


def _raise_interrupt(state, model):
    raise KeyboardInterrupt


def _send_interrupt(state, model):
    if collectives.world_size() == 1 or collectives.rank() == 1:
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("is_main", [True, False])
def test_what_is_interrupted_is_closed(tmp_path, monkeypatch, is_main):
    """As in a notebook or in a thread: the same process goes on with a new trainer."""
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    before = signal.getsignal(signal.SIGINT)

    def train() -> None:
        with preempted.known_keys(), contextlib.suppress(KeyboardInterrupt):
            preempted.make(
                tmp_path, "nu_dpftrl", callbacks=[tiny.At("pre_optimizer_step", _raise_interrupt, 4)]
            ).train()

    if is_main:
        train()
    else:
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    assert signal.getsignal(signal.SIGINT) is before
    assert (tmp_path / "out/privacy/statement.md").exists()
    _assert_ends_as_undisturbed(tmp_path, preempted.reference(tmp_path / "reference", "nu_dpftrl"))


def test_after_the_last_step_it_is_the_scripts(tmp_path):
    """The run has ended then, so its keys are gone."""
    trainer = preempted.make(tmp_path, "gaussian", callbacks=[tiny.At("train_end", _send_interrupt)])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.state.global_step == NUM_STEPS
    assert not (tmp_path / "out/_journal").exists()


def test_workers_that_load_records_leave_it_to_the_main_process(tmp_path):
    """A terminal sends it to all processes in the foreground."""

    def with_its_workers() -> None:
        os.setpgrp()

    process = multiprocessing.get_context("fork").Process(
        target=_train, args=(tmp_path, with_its_workers, {"dataloader_num_workers": 2})
    )
    process.start()
    _wait_for(tmp_path / "ready")
    os.killpg(process.pid, signal.SIGINT)  # type: ignore[type-var,arg-type]
    (tmp_path / "sent").touch()
    process.join(LIMIT_S)
    output = (tmp_path / "output").read_text()
    assert process.exitcode == 130 and "Traceback" not in output, output[-2000:]


@pytest.mark.slow
def test_all_ranks_end_with_the_same_code(tmp_path):
    def run() -> None:
        interrupt = tiny.At("pre_optimizer_step", _send_interrupt, 4)
        trainer = preempted.make(tmp_path, "gaussian", callbacks=[interrupt], per_device_train_batch_size=16)
        with pytest.raises(SystemExit) as ended:
            trainer.train()
        assert ended.value.code == 130 and trainer.state.global_step == 4

    ranks.launch(run, 2, tmp_path / "logs")
    assert (tmp_path / "out/checkpoint-4/trainer_state.json").exists()
