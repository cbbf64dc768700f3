"""Cells of the matrix over two processes: sums, noise, stages and memory are those of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.ranks import launch
from tests.sharded import cells
from tests.sharded.compare import compare

# one value of every factor with an engine, and what each engine does by itself; `some_cells` and `all_cells` are commands
NAMES = [
    "book_keeping-full-gaussian-plain", "book_keeping-tied-blt-dp2_factored", "book_keeping-lora-banded-dp2",
    "book_keeping-full-gaussian-users", "book_keeping-tied-gaussian-galore", "book_keeping-full-tree-filter_in_adam",
    "two_pass-tied-gaussian-dp2_adam_bc", "two_pass-llama-restarted-filter", "two_pass-full-nu_dpftrl-quantile",
    "empty", "checkpointing", "float64",
]  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Cell -> what one process and what two processes give."""
    folders = [tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")]
    for size, folder in enumerate(folders, 1):  # one process without any group is the reference
        launch(lambda folder=folder: cells.main(folder, NAMES), size, folder)
    return {name: tuple(torch.load(folder / f"{name}.pt") for folder in folders) for name in NAMES}


@pytest.mark.timeout(300)
@pytest.mark.xdist_group("sharded_matrix")
@pytest.mark.parametrize("name", NAMES)
class TestCells:
    def test_the_shards_hold_what_one_process_does(self, found, name):
        one, two = found[name]
        assert "error" not in one and "error" not in two, (one.get("error"), two.get("error"))
        gradients, weights = compare(one, two)
        assert gradients <= (1e-10 if name == "float64" else 1e-6) and weights <= 1e-6, (gradients, weights)

    def test_memory_of_a_rank_halves(self, found, name):
        one, two = (parts["parts"] for parts in found[name])
        for part in one:
            most = 0.95 if part == "moments" and "galore" in name else 0.55  # what is projected is small, and whole
            assert two[part] <= most * one[part], (part, one, two)


def test_all_cells_have_a_name_of_their_own():
    assert set(NAMES) | set(cells.some_cells()) <= cells.all_cells().keys()
