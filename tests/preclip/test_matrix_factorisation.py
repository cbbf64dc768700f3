"""DP^2 on matrix factorisation, the MovieLens task of arXiv:2212.00309, with made-up ratings: a record is a rating.

Shape legend: B = ratings, K = factors.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hf_dpopt.clipping import ENGINES, make_engine
from hf_dpopt.clipping.scaling import Diagonal, Scale
from hf_dpopt.clipping.thresholds import FlatClipping
from hf_dpopt.records.losses import RecordLosses
from tests.helpers import tiny

USERS, ITEMS, K, NUM_RATINGS = 30, 40, 4, 900
DELAY = 20


class Factors(nn.Module):
    """A rating is the product of a user's and an item's factors, as in the authors' program; ids are (B, 1)."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.users, self.items = nn.Embedding(USERS, K), nn.Embedding(ITEMS, K)

    def forward(self, user: torch.Tensor, item: torch.Tensor, labels: torch.Tensor | None = None) -> SimpleNamespace:
        return SimpleNamespace(logits=(self.users(user) * self.items(item)).sum(-1).squeeze(1))


def squared_error(outputs, labels_B):
    return (outputs.logits - labels_B).square()


def ratings() -> list[dict]:
    """Of rank 2, between 1 and 5, of users and items that occur unevenly often."""
    generator = torch.Generator().manual_seed(7)
    tastes, traits = torch.rand(USERS, 2, generator=generator), torch.rand(ITEMS, 2, generator=generator)
    rows = []
    for user, item in torch.rand(NUM_RATINGS, 2, generator=generator).square().tolist():
        user, item = int(user * USERS), int(item * ITEMS)
        rows.append({"user": [user], "item": [item], "labels": 1 + 2 * float(tastes[user] @ traits[item])})
    return rows


def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor([row[name] for row in rows]) for name in rows[0]}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("is_divided", [False, True])
def test_the_clipped_sum_is_that_of_the_formula(engine, is_divided):
    """The gradient of a rating is ``2 (p q - r) (q, p)`` in two rows; here divided by D and clipped by hand."""
    model = Factors().double()
    batch = collate(ratings()[:25])  # several of the same user, and of the same item
    batch["labels"] = batch["labels"].double()
    divisors = {n: torch.rand(p.shape, dtype=torch.float64) + 0.1 for n, p in model.named_parameters()}
    if not is_divided:
        divisors = {n: torch.ones_like(d) for n, d in divisors.items()}
    gradients = []
    for user, item, rating in zip(*batch.values(), strict=True):
        p, q = model.users.weight[user[0]].detach(), model.items.weight[item[0]].detach()
        gradient = {name: torch.zeros_like(d) for name, d in divisors.items()}
        gradient["users.weight"][user[0]] = 2 * (p @ q - rating) * q
        gradient["items.weight"][item[0]] = 2 * (p @ q - rating) * p
        gradients.append({name: g / divisors[name] for name, g in gradient.items()})
    norms = torch.stack([sum(g.square().sum() for g in one.values()).sqrt() for one in gradients])
    clip = float(norms.median())
    want = {
        name: sum(one[name] * min(1.0, clip / float(norm)) for one, norm in zip(gradients, norms, strict=True))
        for name in divisors
    }
    made, losses = make_engine(model, FlatClipping(clipping_norm=clip), engine), RecordLosses(model, squared_error)
    scale = Scale({n: Diagonal(1 / d) for n, d in divisors.items()}) if is_divided else None
    sums = made.empty_sum(scale)
    made.add_clipped_sum(sums, lambda: losses(batch), 25)
    for name, total in sums.result().items():
        assert torch.allclose(total, want[name], rtol=1e-10, atol=1e-12), name


def test_dp2_trains_factors_at_the_epsilon_of_dp_sgd(tmp_path):
    """Whatever the noise, the error falls to less than a tenth (0.14 to 0.29 of 9.1 seen); epsilon is that without D."""
    rows, model = ratings(), Factors()
    options = {"delay": DELAY, "clipping_norm": 1.0, "learning_rate_ratio": 0.02, "eps": 1e-3}
    common = dict(
        train_dataset=rows, data_collator=collate, per_example_loss_func=squared_error, label_names=["labels"],
        noise_multiplier=1.0, clipping_norm=1.0, expected_batch_size=150, per_device_train_batch_size=300,
        max_steps=10 * DELAY, optim="sgd", learning_rate=5.0, skip_self_check=False,
    )  # fmt: skip
    trainer = tiny.trainer(
        tmp_path / "dp2", model=model, preconditioner="dp2_rmsprop", preconditioner_kwargs=options,
        **common,
    )  # fmt: skip

    def error() -> float:
        batch = collate(rows)
        with torch.no_grad():
            return float(squared_error(model(batch["user"], batch["item"]), batch["labels"]).mean())

    before = error()
    trainer.train()
    plain = tiny.trainer(tmp_path / "sgd", model=Factors(), **common)
    assert trainer.privacy_spent().epsilon == plain.plan.epsilon()
    assert error() < before / 10
