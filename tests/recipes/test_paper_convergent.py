"""The experiments on arXiv:2205.13710: figure and harness, on small data made here."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_dpopt.convex.last_iterate import ProjectedSGD, last_iterate_epsilon
from recipes.paper.convergent import figure1, low_rank, utility
from recipes.paper.convergent.sgd import FAR, iterates

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


def small_run(**changes: Any) -> utility.Run:
    values = dict(
        task="sst2", accounting="last iterate", epsilon=4.0, num_steps=200, radius=1.0, rate=1.0, l2=1e-2, seed=0,
        batch=64,
    )  # fmt: skip
    return utility.Run(**{**values, **changes})


@pytest.fixture(scope="module")
def data() -> utility.Data:
    rng = torch.Generator().manual_seed(0)
    labels = torch.randint(2, (900,), generator=rng)
    features = torch.randn(900, 8, generator=rng) * 0.3
    features[:, 0] += 2.0 * labels - 1
    features = torch.nn.functional.normalize(features, dim=1)
    parts = [utility.Split(features[i], labels[i]) for i in (slice(0, 600), slice(600, 700), slice(700, 900))]
    return utility.Data(*parts, num_labels=2)


def test_both_ways_keep_the_budget_and_learn(data: utility.Data) -> None:
    for accounting in utility.GRIDS:
        run = small_run(accounting=accounting, epsilon=8.0)
        result = utility.train(run, data)
        assert result["test"] > 0.9
        setting = dataclasses.replace(run.setting(600), noise_multiplier=result["noise_multiplier"])
        bound = last_iterate_epsilon(setting, utility.DELTA)
        spent = bound.epsilon if accounting == "last iterate" else bound.composition
        assert 7.9 < spent <= 8.0


def test_features_have_norm_one_with_the_constant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utility, "HELD_OUT", 5)

    def embeddings(texts: list[str], model: Path) -> torch.Tensor:
        return torch.eye(4)[[len(text) % 4 for text in texts]]

    monkeypatch.setattr(utility, "embeddings", embeddings)
    folder = tmp_path / "ag-news"
    folder.mkdir()
    for name, num in (("train", 20), ("test", 6)):
        (folder / f"{name}.tsv").write_text(
            "".join(f'{"x" * i} "\t{("Business", "Sci/Tech")[i % 2]}\n' for i in range(num))
        )
    found = utility.read_data(tmp_path, "ag_news", Path("model"), tmp_path)
    assert (len(found.train), len(found.held_out), len(found.test), found.num_labels) == (15, 5, 6, 2)
    norms = found.train.features.double().norm(dim=1)
    assert norms.max() <= 1 and norms.min() > 0.99


def test_without_a_ball_noise_of_other_dimensions_never_meets_a_record(repo: Path) -> None:
    """arXiv:2008.06570, Theorem 5.1: outside of the subspace weights walk at random, and a ball lets them push."""
    rng = torch.Generator().manual_seed(0)
    x = torch.nn.functional.pad(torch.nn.functional.normalize(torch.randn(200, 3, generator=rng), dim=1), (0, 61))
    walks = []
    for diameter in (FAR, 4.0):
        sgd = ProjectedSGD(
            num_examples=200, expected_batch_size=100, num_steps=100, noise_multiplier=4.0, diameter=diameter,
            lipschitz=math.sqrt(2), smoothness=0.5, step_size=2.0,
        )  # fmt: skip
        walks.append(torch.stack(list(iterates(x, (x[:, 0] > 0).long(), 2, sgd, 0))))
    free, bounded = walks
    steps = free[1:, :, 3:] - free[:-1, :, 3:]
    assert float(steps.std()) == pytest.approx(2.0 / 100 * 4.0 * math.sqrt(2), rel=0.05)
    assert abs(float(steps.mean())) < 0.01
    assert bounded.flatten(1).norm(dim=1).max() <= 2 + 1e-9
    assert float(free[-1, :, :3].norm()) > 2 * float(bounded[-1, :, :3].norm())  # what carries the signal
    slopes = json.loads((repo / "docs" / "reproductions" / "convergent_low_rank.json").read_text())["slopes"]
    assert abs(slopes["rank 4, no ball"]["mean"]) < 0.2 and slopes["rank 4, in a ball"]["mean"] > 0.4


def test_a_curve_keeps_its_budget_and_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_rank, "NUM_STEPS", 60)
    curve = low_rank.CURVES["rank 4, in a ball, l2 = 0.01, last weights"]
    assert 1.95 < last_iterate_epsilon(low_rank.setting(curve, 0.3), low_rank.DELTA).epsilon <= 2.0
    assert 0 < low_rank.excess.__wrapped__(curve, 4, 0.3, 0) < math.log(2) / 2
