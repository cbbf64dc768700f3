"""Memory of whole trainings: the table of docs/results.md is that of its file."""

from __future__ import annotations

import json
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_table_of_memory_is_that_of_the_results(script):
    memory = script("training_memory")
    rows = json.loads((DOCS / "training_memory.json").read_text(encoding="utf-8"))["rows"]
    assert {row["way"] for row in rows} == set(memory.WAYS)
    assert memory.table(rows) in (DOCS / "results.md").read_text(encoding="utf-8")
