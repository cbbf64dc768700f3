"""`datasets` and `pyarrow` are optional: a list of records trains without them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
sys.modules["datasets"] = sys.modules["pyarrow"] = None  # from here on they cannot be imported

import transformers
from tests.helpers import tiny

assert not transformers.utils.is_datasets_available()
trainer = tiny.trainer(sys.argv[1], max_steps=2, skip_self_check=False)
trainer.train()
print(trainer.state.global_step, "steps,", "epsilon" in trainer.state.log_history[-1])
assert sys.modules["datasets"] is None and sys.modules["pyarrow"] is None
"""


@pytest.mark.slow
def test_training_without_datasets_and_pyarrow(tmp_path: Path, repo: Path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, cwd=repo, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1] == "2 steps, True"
