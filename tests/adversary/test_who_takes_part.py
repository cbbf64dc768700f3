"""Who takes part in a step, counted: as often as is accounted for, and with so many rows of a user as were allowed."""

from __future__ import annotations

import secrets
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, TruncatedSubsampledGaussianDpEvent
from dp_accounting.dp_event import MixtureOfGaussiansDpEvent
from scipy import stats
from transformers import TrainerCallback

from hf_dpopt import PrivacyConfig, make_plan
from hf_dpopt.accounting.events import flatten
from hf_dpopt.accounting.random_allocation import BallsInBinsDpEvent
from hf_dpopt.sampling import SAMPLERS
from tests.helpers import tiny

ALPHA = 1e-6  # probability of a false alarm of each assertion, whatever the keys
NUM, BATCH, GROUPS, STEPS = 120_000, 15_000, 4, 8
OPTIONS: dict[str, dict[str, Any]] = {
    "cyclic_poisson": {"noise_mechanism": "banded", "noise_kwargs": {"num_bands": GROUPS}},
    "capped_poisson": {"privacy_unit": "user", "user_id_column": "who", "records_per_user": 2},
}


def accounted(event: Any) -> tuple[int, float]:
    """Steps in which a record may take part, and the probability with which it does, by what is charged."""
    ((leaf, count),) = flatten(event)
    match leaf:
        case PoissonSampledDpEvent():
            return count, leaf.sampling_probability
        case TruncatedSubsampledGaussianDpEvent():
            return count, leaf.sampling_probability
        case MixtureOfGaussiansDpEvent():  # of the places of a user
            shifts = zip(leaf.sensitivities, leaf.sampling_probs, strict=True)
            return count, sum(shift * p for shift, p in shifts) / max(leaf.sensitivities)
        case BallsInBinsDpEvent():
            return -(-leaf.num_steps // leaf.num_bins), 1.0
        case GaussianDpEvent():  # nothing is sampled: everybody once in every pass
            return STEPS * BATCH // NUM, 1.0
    raise AssertionError(f"{leaf}: add how often it says that a record takes part")


@pytest.mark.parametrize("name", SAMPLERS)
def test_records_take_part_as_often_as_is_accounted_for(name: str) -> None:
    """Participations of all records in 8 steps under two keys: binomial, with the rate that epsilon is computed from.

    There are 240,000 chances or more, so a rate that is 3 % too large is 11 standard errors away (cyclic: 14) and is
    missed with probability below 1e-9. False alarm: `ALPHA` for each sampler and key.
    """
    options = {"sampling": name, "noise_multiplier": 1.0, "expected_batch_size": BATCH, **OPTIONS.get(name, {})}
    plan = make_plan(PrivacyConfig(**options, target_delta=1e-7), num_examples=NUM, num_steps=STEPS)
    count, rate = accounted(plan.event)
    if name == "cyclic_poisson":
        assert (count, rate) == (STEPS // GROUPS, GROUPS * BATCH / NUM), "the test is for four groups"
    for _ in range(2):
        key = secrets.token_bytes(32)
        found = sum(len(plan.sampler.draw(key, step)) for step in range(STEPS))
        if rate == 1:
            assert found == count * NUM
            continue
        law = stats.binom(count * NUM, rate)
        assert law.ppf(ALPHA / 2) <= found <= law.isf(ALPHA / 2), f"{found}, and {law.mean():.0f} are accounted for"
        assert rate * count * NUM == pytest.approx(BATCH * STEPS), (
            "what is accounted for is the batch that was asked for"
        )


class Rows(TrainerCallback):
    """Rows that reach the model in each step, by their owners; start-up checks are left out."""

    def __init__(self, owners: list[int]):
        self.owners = owners
        self.steps: list[dict[int, set[int]]] = []
        self.now: dict[int, set[int]] = defaultdict(set)

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.now.clear()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.steps.append(dict(self.now))
        self.now.clear()

    def collate(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        for row in rows:
            self.now[self.owners[row["number"]]].add(row["number"])
        return tiny.collate(rows)


@pytest.mark.parametrize("limit", [1, 2, 3])
@pytest.mark.parametrize("sampling", ["fixed_order", "capped_poisson"])
def test_a_user_takes_part_with_so_many_rows_as_were_allowed(sampling: str, limit: int, tmp_path: Path) -> None:
    """Users of one row to two more than the limit, all of whom take part: not one row more, and not one less."""
    owned = {user: 1 + user % (limit + 2) for user in range(2 * limit + 4)}
    data = tiny.records(sum(owned.values()))
    owners = [user for user, size in owned.items() for _ in range(size)]
    data = [row | {"author": user, "number": i} for i, (row, user) in enumerate(zip(data, owners, strict=True))]
    everybody = len(owned) * (limit if sampling == "capped_poisson" else 1)
    seen = Rows(owners)
    tiny.trainer(
        tmp_path / "out", train_dataset=data, data_collator=seen.collate, callbacks=[seen], privacy_unit="user",
        user_id_column="author", records_per_user=limit, sampling=sampling, expected_batch_size=everybody, max_steps=3,
        private_state_dir=str(tmp_path / "keys"),
    ).train()  # fmt: skip
    want = {user: min(size, limit) for user, size in owned.items()}
    assert [{user: len(rows) for user, rows in step.items()} for step in seen.steps] == [want] * 3
    if sampling == "capped_poisson":
        assert all(step == seen.steps[0] for step in seen.steps), "the rows of a user are chosen once"
