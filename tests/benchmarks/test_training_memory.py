"""Memory of whole trainings: the table of docs/results.md is that of its file."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def training_memory() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(DOCS.parent / "benchmarks"))
        yield importlib.import_module("training_memory")


def test_the_table_of_memory_is_that_of_the_results(training_memory):
    rows = json.loads((DOCS / "training_memory.json").read_text(encoding="utf-8"))["rows"]
    assert {row["way"] for row in rows} == set(training_memory.WAYS)
    assert training_memory.table(rows) in (DOCS / "results.md").read_text(encoding="utf-8")
