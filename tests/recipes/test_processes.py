"""The processes that a recipe starts by itself."""

from __future__ import annotations

import os
import sys

import pytest

from recipes import processes

OF_THE_LAUNCHER = {"ACCELERATE_USE_CPU": "True"}
SEVERAL = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


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
