"""A launcher that starts one process of several says nothing, so the trainer does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_dpopt.huggingface.processes import warn_if_alone
from recipes import processes

OF_THE_LAUNCHER = {"ACCELERATE_USE_CPU": "True"}
SEVERAL = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
SCRIPT = """
import sys
from tests import tiny
trainer = tiny.trainer(sys.argv[1], max_steps=1)
trainer.train()
sys.stdout.write(f"processes: {trainer.args.world_size}\\n")  # one write: ranks share the pipe
"""


@pytest.mark.parametrize(
    ("environment", "num_processes", "warns"),
    [
        ({}, 1, False),
        (OF_THE_LAUNCHER, 1, False),
        (SEVERAL, 1, False),
        (OF_THE_LAUNCHER | SEVERAL, 1, True),
        (OF_THE_LAUNCHER | SEVERAL, 2, False),
        (OF_THE_LAUNCHER | SEVERAL | {"RANK": "0"}, 1, False),
    ],
)
def test_one_process_of_several_is_told(environment, num_processes, warns, caplog):
    with caplog.at_level("WARNING"):
        warn_if_alone(environment, num_processes)
    assert ("torchrun --nproc_per_node" in caplog.text) == warns


# `--cpu` alone starts one process (accelerate 1.15, no MPI hostfile); without a GPU --multi_gpu starts gloo processes
@pytest.mark.slow_but(1)
@pytest.mark.parametrize(
    ("options", "num", "warns"),
    [
        ("--cpu --num_processes 1", 1, False),
        ("--cpu --num_processes 2", 1, True),
        ("--multi_gpu --num_processes 2 --main_process_port 0", 2, False),
    ],
)
def test_the_launcher_sets_what_it_is_known_by(options: str, num: int, warns: bool, tmp_path: Path, repo: Path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launch = [sys.executable, "-m", "accelerate.commands.launch", *options.split()]
    environment = os.environ | {"PYTHONPATH": str(repo)}
    done = subprocess.run(
        [*launch, str(script), str(tmp_path / "run")], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert ("One process trains, although" in done.stderr) == warns
    assert done.stdout.count(f"processes: {num}") == num


def test_torchrun_hands_every_flag_of_a_recipe_on(monkeypatch: pytest.MonkeyPatch):
    """One of them is the beginning of two of its own, which its parser refuses."""
    from torch.distributed.run import get_args_parser

    commands: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, command: commands.append(command))
    monkeypatch.setattr(processes, "requested", lambda: 2)
    monkeypatch.setattr(sys, "argv", ["recipes/glue.py"])
    monkeypatch.delenv("RANK", raising=False)
    for name, value in {**OF_THE_LAUNCHER, "OMP_NUM_THREADS": "1", **SEVERAL}.items():
        monkeypatch.setenv(name, value)  # which it takes away
    flags = ["--start", "pooled", "--lora_r=8", "--max_steps", "3"]
    processes.start_requested(flags)
    (command,) = commands
    read = get_args_parser().parse_args(command[command.index("torch.distributed.run") + 1 :])
    assert (read.nproc_per_node, read.training_script, read.training_script_args) == ("2", "recipes/glue.py", flags)
