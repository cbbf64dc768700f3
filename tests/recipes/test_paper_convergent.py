"""Figure 1 of arXiv:2205.13710 with real constants."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_dpopt.convex.last_iterate import last_iterate_epsilon
from recipes.paper.convergent import figure1

pytestmark = pytest.mark.slow


def test_the_figure_is_that_of_the_bounds(repo: Path) -> None:
    """The numbers that are kept are computed again, at the ends; bounds are ordered as they have to be."""
    numbers = json.loads((repo / "docs" / "reproductions" / "convergent_figure1.json").read_text())
    curves = {(c["bound"], c["radius"]): dict(zip(c["steps"], c["epsilons"], strict=True)) for c in numbers["curves"]}
    many = figure1.setting(0.1, 10**7)
    assert curves["Eq. (3.6), Renyi", 0.1][10**7] == pytest.approx(
        last_iterate_epsilon(many, 1e-5, form="rdp").epsilon, rel=1e-3
    )
    for radius in figure1.RADII:
        by_renyi, by_pld = curves["Eq. (3.6), Renyi", radius], curves["trade-off functions (PLD)", radius]
        paper, cheapest = curves["Eq. (5.3), Renyi", radius], curves["strongly convex, cheapest shifts, Renyi", radius]
        for steps in figure1.STEPS:
            assert by_pld[steps] <= by_renyi[steps] * 1.001 and cheapest[steps] <= paper[steps] * 1.001
            assert by_renyi[steps] <= curves["composition, Renyi", None][steps] * 1.001
        free = numbers["free_after"][str(radius)]
        late = [e for t, e in by_renyi.items() if t > 1.5 * free]
        assert max(late) == pytest.approx(min(late), rel=2e-3)
