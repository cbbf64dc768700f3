"""The plan of a model of 7 billion weights on 8 GPUs: its page is that of its numbers, and they are those of the code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def plans(script) -> Any:
    return script("plan_7b")


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return json.loads((DOCS / "scale_7b.json").read_text(encoding="utf-8"))


def test_the_page_has_the_numbers_of_its_file(plans, recorded):
    assert (DOCS / "scale_7b.md").read_text(encoding="utf-8") == plans.page(recorded)


def test_the_shares_of_the_ranks_are_those_of_the_code(plans, recorded):
    """The first and the last rank; the parts hold what each weight takes."""
    num, most = recorded["weights"], recorded["of_a_rank"]
    assert plans.held(0) == most and 0 < plans.held(plans.RANKS - 1) <= most
    assert num / 8 <= most <= 1.001 * num / 8
    assert recorded["bytes"]["weights"] == 4 * most and recorded["bytes"]["AdamW's moments"] == 8 * most


def test_the_noise_is_that_of_the_cost_model(plans, recorded):
    found = plans.copies_kept()
    assert found == recorded["mechanisms"]
    assert found["independent"] == {"kept": 0.0, "draws": 1.0}
    assert found["16 bands, kept"]["kept"] == 15 and found["16 bands of the inverse, drawn again"]["kept"] == 0
    assert 15 < found["16 bands of the inverse, drawn again"]["draws"] <= 16


@pytest.mark.parametrize("engine, backwards", [("book_keeping", 1), ("two_pass", 2)])
def test_the_bytes_of_a_step_are_those_that_are_sent(plans, engine, backwards):
    """A real step of a small model, over eight ranks that answer nothing; agreements of a few bytes are left out."""
    sent, num, root = plans.sent_by_a_step(engine)
    formula = plans.bytes_of_step(num, root, 1, backwards=backwards)
    assert sum(sent.values()) == pytest.approx(formula, abs=64)
    assert sent["_reduce_scatter_base_"] == 4 * num * 7 / 8  # as many as stock FSDP2 sends of gradients
