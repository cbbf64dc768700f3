"""The scan of all model classes: its table is that of its results, no class is missing, and its rows can be repeated."""

from __future__ import annotations

import importlib.metadata

import pytest

from tests.adversary.scan import measure, table
from tests.adversary.scan.classes import named_classes

ROWS = ("GPT2LMHeadModel", "BertForTokenClassification", "T5ForConditionalGeneration", "Qwen3MoeForCausalLM")


def test_the_table_is_that_of_the_results():
    page = table.PAGE.read_text(encoding="utf-8")
    assert page == table.with_section(page, table.read()), "run: python -m tests.adversary.scan --table"


def test_no_class_of_transformers_is_missing():
    """A new architecture gets a row by its name. Another version than the scanned one may have other classes."""
    found = table.read()
    scanned, installed = found["versions"]["transformers"], importlib.metadata.version("transformers")
    if installed != scanned:
        pytest.skip(f"docs/scan.json is of transformers {scanned}, and {installed} is installed")
    known, seen = set(named_classes()), {*found["rows"], *found["without_labels"]}
    assert known <= seen, f"run: {found['command']} (for {', '.join(sorted(known - seen))})"
    assert seen <= known, f"run: {found['command']} (these are gone: {', '.join(sorted(seen - known))})"


def test_the_pinned_transformers_is_the_scanned_one(repo):
    """Whoever pins another version looks at its new classes, too."""
    scanned = table.read()["versions"]["transformers"]
    pinned = (repo / "constraints.txt").read_text(encoding="utf-8")
    assert f"\ntransformers=={scanned}\n" in pinned, f"run: {table.read()['command']}"


def test_nothing_that_runs_breaks_the_promise():
    broken = {
        name: row for name, row in table.read()["rows"].items() if table.verdict(row) in (table.BREAKS, table.STOPPED)
    }
    assert not broken


@pytest.mark.parametrize("name", ROWS)
def test_a_row_can_be_repeated(name):
    row, again = table.read()["rows"][name], measure.measure(named_classes()[name])
    assert again is not None
    for kept in ("head", "verdict", "reason", "padding"):
        assert again.get(kept) == row.get(kept)
    assert again.get("lora", {}).get("verdict") == row.get("lora", {}).get("verdict")
    measured = again if again["verdict"] == table.EXACT else again["lora"]
    assert measured["ratio"] <= 1 + 1e-5
    assert measured["least"] >= 1 - 1e-4, "a record that is not clipped shows nothing"
