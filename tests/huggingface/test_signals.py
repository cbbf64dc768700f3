"""SIGTERM and SIGUSR1 end a run after a step, with a checkpoint and exit code 75; Ctrl-C in it, and costs nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import threading

import pytest
import torch

from hf_dpopt.huggingface.preemption import SIGNALS, Preempted
from hf_dpopt.run.ledger import Ledger
from tests.helpers import tiny
from tests.run import preempted
from tests.run.preempted import NUM_STEPS, assert_same, resume, undisturbed


def send(number, step):
    """Send this process a signal twice, as launchers do, before the update of a step, so in the middle of it."""
    return tiny.At("pre_optimizer_step", lambda *_: [os.kill(os.getpid(), number) for _ in range(2)], step)


@pytest.fixture
def handlers():
    """The handlers before, which are there afterwards, too."""
    before = [signal.getsignal(number) for number in SIGNALS]
    yield before
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("save_strategy", ["no", "steps"])
def test_a_signal_ends_at_a_step_and_costs_nothing(tmp_path, handlers, number, save_strategy):
    options = {"save_strategy": save_strategy, "logging_strategy": "no"}
    trainer = preempted.make(tmp_path, "nu_dpftrl", callbacks=[send(number, 4)], **options)
    with preempted.known_keys(), pytest.raises(SystemExit) as ended:
        trainer.train()
    assert ended.type is Preempted and ended.value.code == 75
    assert trainer.state.global_step == 4
    assert (tmp_path / "out/checkpoint-4/trainer_state.json").exists()
    assert Ledger.read(tmp_path / "out/privacy/ledger.jsonl").num_charged == 4
    assert_same(resume(tmp_path, "nu_dpftrl", **options), undisturbed(tmp_path / "reference", "nu_dpftrl"))


def test_a_signal_in_the_last_step_ends_with_its_checkpoint(tmp_path, handlers):
    options = {"save_strategy": "no"}
    trainer = preempted.make(tmp_path, "gaussian", callbacks=[send(signal.SIGTERM, NUM_STEPS)], **options)
    with pytest.raises(Preempted):
        trainer.train()
    again = resume(tmp_path, "gaussian", **options)
    assert again.state.global_step == again.privacy_spent().num_steps == NUM_STEPS
    assert all(torch.equal(p, tiny.weights(trainer.model)[name]) for name, p in tiny.weights(again.model).items())


def test_a_signal_after_the_last_step_is_passed_on(tmp_path, handlers, monkeypatch):
    heard = []
    monkeypatch.setattr(signal, "raise_signal", heard.append)  # else it would end this process
    late = tiny.At("train_end", lambda *_: os.kill(os.getpid(), signal.SIGTERM))  # after the last look at it
    preempted.make(tmp_path, "gaussian", callbacks=[late]).train()
    assert heard == [signal.SIGTERM]


def test_a_child_that_was_forked_does_not_swallow_signals(tmp_path, handlers):
    ended = []

    def fork(state, model):
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    preempted.make(tmp_path, "gaussian", callbacks=[tiny.At("step_end", fork, 2)]).train()
    assert ended == [-signal.SIGTERM]


@pytest.mark.parametrize("options", [{"save_only_model": True}, {"save_strategy": "best", "eval_strategy": "steps"}])
def test_what_a_signal_saves_is_enough_to_go_on(tmp_path, handlers, options):
    """Also where the script saves models alone, or the best ones alone, and this is not the best."""
    if "save_strategy" in options:
        options = {**options, "eval_steps": 1, "metric_for_best_model": "loss", "eval_data_privacy": "public"}
        options["eval_dataset"] = tiny.records(70)[64:]
    trainer = preempted.make(tmp_path, "gaussian", callbacks=[send(signal.SIGTERM, 4)], **options)
    trainer._determine_best_metric = lambda **k: False
    with pytest.raises(Preempted):
        trainer.train()
    assert trainer.args.save_only_model == options.get("save_only_model", False)
    again = resume(tmp_path, "gaussian", **options)
    assert again.state.global_step == again.privacy_spent().num_steps == NUM_STEPS


def test_a_handler_of_somebody_else_stays(tmp_path):
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *a: heard.append(a))
    try:
        preempted.make(tmp_path, "gaussian", callbacks=[send(signal.SIGTERM, 2)]).train()
        assert len(heard) == 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_outside_of_the_main_thread_no_handler_is_installed(tmp_path, handlers):
    seen = []

    look = tiny.At("step_end", lambda *_: seen.append([signal.getsignal(number) for number in SIGNALS]))
    trainer = preempted.make(tmp_path, "gaussian", callbacks=[look])
    thread = threading.Thread(target=trainer.train)
    thread.start()
    thread.join()
    assert seen and all(found == handlers for found in seen)


def _interrupt(state, model):
    raise KeyboardInterrupt


@pytest.mark.parametrize("is_main", [True, False])
def test_what_is_interrupted_is_closed_and_goes_on_for_nothing(tmp_path, is_main):
    """Ctrl-C in the middle of a step that was released, in a script, a notebook or a thread."""

    def train() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            preempted.start(tmp_path, "nu_dpftrl", callbacks=[tiny.At("pre_optimizer_step", _interrupt, 4)])

    if is_main:
        train()
    else:
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    assert (tmp_path / "out/privacy/statement.md").exists()
    again = resume(tmp_path, "nu_dpftrl")
    assert_same(again, undisturbed(tmp_path / "reference", "nu_dpftrl"))
    assert again.privacy_spent().num_steps == NUM_STEPS
