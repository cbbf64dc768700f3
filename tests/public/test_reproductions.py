"""The reproductions of recipes/paper/subspace: what theory says exactly, on runs of a second."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from hf_dpopt.plan.choose import make_plan
from hf_dpopt.plan.config import PrivacyConfig
from recipes.paper.subspace import head, risk
from recipes.paper.subspace.training import Recipe, public_gradients, train
from recipes.paper.texts import AG_NEWS_CLASSES

SMALL = dict(rank=risk.RANK, num_public=16, refresh_every=20, goe_every=20)


def _plan(num_steps=12):
    config = PrivacyConfig(
        target_epsilon=2.0, target_delta=1e-6, expected_batch_size=risk.NUM_RECORDS, sampling="fixed_order",
        adjacency="zero_out",
    )  # fmt: skip
    return make_plan(config, num_examples=risk.NUM_RECORDS, num_steps=num_steps)


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(risk, "NUM_STEPS", 12)


def test_noise_outside_of_the_data_does_not_matter_to_a_linear_model(short):
    """Theorem 5.1: on data of rank 4 in 64 dimensions, DP-GD and projected DP-GD are one and the same run."""
    plain = risk.excess(_plan(), 64, risk.RANK, Recipe(), False, 4.0, 3)
    projected = risk.excess(_plan(), 64, risk.RANK, Recipe("after_noise", **SMALL), False, 4.0, 3)
    assert plain == pytest.approx(projected, rel=1e-3) and plain > 1e-4


def test_in_a_ball_it_does_and_projection_mends_it(short):
    """Noise of 1,024 dimensions fills the radius; noise of 4 does not."""
    plain = risk.excess(_plan(), 1024, risk.RANK, Recipe(), True, 32.0, 3)
    projected = risk.excess(_plan(), 1024, risk.RANK, Recipe("after_noise", **SMALL), True, 32.0, 3)
    assert projected < plain / 10


def test_the_releases_of_goe_are_charged_by_their_share(short):
    private, public, *_ = risk.make_data(8, risk.RANK, 0)
    model = torch.nn.Linear(8, 1, bias=False)
    source = public_gradients(model, risk.losses, public, risk.NUM_PUBLIC, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    recipe = Recipe("before_clip", "goe", **SMALL)
    cost = train(model, risk.losses, private, source, recipe, _plan(), optimizer, 0)
    assert cost["epsilon"] <= 2.0
    assert cost["rho_preconditioner"] / (cost["rho_gradients"] + cost["rho_preconditioner"]) == pytest.approx(0.3)


def _corpus(folder):
    rng, words = np.random.default_rng(0), {c: [f"{c}{i}" for i in range(5)] for c in AG_NEWS_CLASSES}
    for name, num in (("train.tsv", 900), ("test.tsv", 2000)):
        rows = []
        for i in range(num):
            label = AG_NEWS_CLASSES[i % 4]
            rows.append(" ".join(rng.choice(words[label], 6)) + "\t" + label)
        (folder / name).write_text("\n".join(rows) + "\n", encoding="utf-8")


@pytest.mark.parametrize("name", list(head.ROWS))
def test_every_row_of_the_head_runs_and_shares_its_records(name, tmp_path, monkeypatch):
    monkeypatch.setattr(head, "NUM_STEPS", 2)
    monkeypatch.setattr(head, "ADAM_STEPS", 2)
    monkeypatch.setattr(head, "BATCH", 100)
    _corpus(tmp_path)
    head.files.cache_clear()
    data, other = head.split(tmp_path, 0), head.split(tmp_path, 1)
    assert len(data.public["labels"]) == 500 and len(data.private["labels"]) == 400
    assert not torch.equal(data.public["features"], other.public["features"])
    assert torch.equal(data.test["features"], other.test["features"])
    by, grid, _ = head.ROWS[name]
    model = by(data, 0.5, grid[0], 0)
    assert 0 <= head.accuracy(model, data.test) <= 1
    assert sum(p.numel() for p in model.parameters()) == 2_052
    head.files.cache_clear()


def test_the_numbers_in_the_documentation_are_those_of_the_runs(pytestconfig):
    """All files name their command and its seeds, and hold no folder of the machine that they come from."""
    folder = pytestconfig.rootpath / "docs"
    shown = (folder / "reproductions.md").read_text(encoding="utf-8")
    for name, module in (("risk", "risk"), ("features", "task"), ("head", "head"), ("task", "task")):
        path = folder / "reproductions" / f"subspace_{name}.json"
        numbers = json.loads(path.read_text(encoding="utf-8"))
        assert numbers["command"].startswith(f"python -m recipes.paper.subspace.{module}")
        assert "/" not in numbers["command"] and len(numbers["seeds"]) >= (5 if name == "risk" else 3)
        assert path.with_suffix(".png").exists()
        for row in numbers.get("rows", ()):
            assert f"{100 * row['mean']:.1f}" in shown, row["row"]
