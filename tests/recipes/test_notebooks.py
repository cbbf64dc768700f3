"""The notebooks run from top to bottom; what they store was printed by such a run, without paths of a machine."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((REPO / "notebooks").glob("*.ipynb"))
SMALL = {"classify": 400}  # records


def _cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_of_one_whole_run(path):
    cells = _cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    printed = "".join("".join(output.get("text", "")) for output in outputs)
    assert "Self-check passed" in printed and "epsilon" in printed
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert not re.findall(r"(?<![\w.])/(?:home|root|tmp|work|Users)/\S*", json.dumps(outputs))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_pages_lead_to_it(path):
    assert f"../notebooks/{path.name}" in "".join(page.read_text() for page in (REPO / "docs").glob("*.md"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_with_few_records(path, tmp_path):
    code = "\n\n".join("".join(cell["source"]) for cell in _cells(path))
    code, found = re.subn(r"^(num_\w+) = \w+", rf"\1 = {SMALL[path.stem]}", code, flags=re.MULTILINE)
    assert found == 1
    (tmp_path / "recipes").symlink_to(REPO / "recipes")
    (tmp_path / "notebooks").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "notebooks", text=True, capture_output=True,
        env=os.environ | {"PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Self-check passed" in done.stdout and "after; epsilon" in done.stdout
