"""A pipe in the place of any file of a run: every command, and every resume, names it or does without, and none waits."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_dpopt import DPConfigError, DPTrainer
from hf_dpopt.cli.app import app
from tests.helpers import tiny

SECONDS = 20  # a command takes one; a pipe that nobody writes to, for ever
STEPS, STOPPED_AT = 4, 3
SETTING = dict(
    max_steps=STEPS, save_strategy="steps", save_steps=2, logging_strategy="no", noise_mechanism="nu_dpftrl",
    privacy_ledger_epsilon=200.0, eval_data_privacy="private", eval_target_epsilon=4.0,
)  # fmt: skip


class Waited(Exception):
    pass


@pytest.fixture(autouse=True)
def _impatience() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Waited

    before = signal.signal(signal.SIGALRM, ring)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def trainer(root: Path, stop: int = STEPS) -> DPTrainer:
    return tiny.trainer(
        root / "out", model=tiny.model(dropout=0.0), private_state_dir=str(root / "keys"), callbacks=[tiny.StopAt(stop)],
        privacy_ledger=str(root / "people.jsonl"), eval_dataset=tiny.records(20), **SETTING,
    )  # fmt: skip


def make(root: Path) -> None:
    made = trainer(root, STOPPED_AT)
    made.train()
    made.evaluate()
    made.save_model()
    made.create_model_card()


def command(*words: str) -> Callable[[Path], object]:
    def run(root: Path) -> object:
        said = CliRunner().invoke(app, [word.format(root=root) for word in words])
        if isinstance(said.exception, Waited):
            raise said.exception
        return said

    return run


def resume(root: Path) -> None:
    made = trainer(root)
    made.train(resume_from_checkpoint=True)
    made.evaluate()
    made.save_model()
    made.create_model_card()


READERS: dict[str, Callable[[Path], object]] = {
    "doctor": command("doctor", "{root}/out", "--private-state-dir", "{root}/keys"),
    "verify": command("verify", "{root}/out"),
    "scan": command("scan", "{root}/out", "--private-state-dir", "{root}/keys"),
    "ledger": command("ledger", "{root}/people.jsonl"),
    "resume": resume,
    "earlier_runs": lambda root: tiny.trainer(
        root / "next", earlier_runs=[str(root / "out")], noise_mechanism="nu_dpftrl"
    ),
}


def _files(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    make(root)
    return root


@pytest.mark.parametrize("reader", READERS)
def test_no_reader_waits_for_a_pipe(run, tmp_path, reader):
    """Every file that a run left, one after the other, and those that it might read."""
    names = _files(run)
    assert {"people.jsonl", "out/privacy/ledger.jsonl", "out/README.md"} <= set(names)
    names += ["out/checkpoint-2/added.bin", "out/checkpoint-2/model.safetensors.index.json", "out/privacy/audits.json"]
    if reader == "earlier_runs":  # each takes a second
        names = [name for name in names if "privacy/" in name]
    waited = []
    for name in names:
        root = tmp_path / "now"
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(run, root)
        (root / name).unlink(missing_ok=True)
        os.mkfifo(root / name)
        signal.alarm(SECONDS)
        try:
            READERS[reader](root)
        except DPConfigError:
            pass
        except Waited:
            waited.append(name)
        except Exception as error:  # another error of a file that is missing is for others to find
            if isinstance(error.__context__, Waited):
                waited.append(name)
        signal.alarm(0)
    assert not waited
