"""Example-level sampling with a guarantee for users: the mixture of Gaussians, and the records that take part."""

from __future__ import annotations

import collections

import numpy as np
import pytest
from scipy import integrate, stats

from hf_dpopt import DPConfigError
from hf_dpopt.accounting import accountants
from hf_dpopt.plan.choose import make_plan
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.sampling import CappedPoissonSampler, PoissonSampler
from tests.helpers import tiny
from tests.reference import clipping as reference
from tests.users.test_training import _trainer


def _delta(epsilon: float, noise: float, q: float, limit: int) -> float:
    """Of one step, by numerical integration of the hockey-stick divergence, in both directions."""
    counts = np.arange(limit + 1)
    weights = stats.binom.pmf(counts, limit, q)

    def p(x):  # with the user
        return float(weights @ stats.norm.pdf(x, counts, noise))

    def r(x):
        return float(stats.norm.pdf(x, 0, noise))

    points = np.linspace(-8 * noise, limit + 8 * noise, 40)
    both = [
        sum(
            integrate.quad(lambda x, a=a, b=b: max(0.0, a(x) - np.exp(epsilon) * b(x)), low, high)[0]
            for low, high in zip(points[:-1], points[1:], strict=True)
        )
        for a, b in ((p, r), (r, p))
    ]
    return max(both)


@pytest.mark.slow_but(1)
@pytest.mark.parametrize(("noise", "q", "limit"), [(1.5, 0.1, 4), (4.0, 0.02, 16), (2.0, 0.5, 2)])
def test_epsilon_of_a_step_is_that_of_the_mixture(noise, q, limit):
    sampler = CappedPoissonSampler(num_examples=1000, expected_batch_size=int(1000 * q), records_per_user=limit)
    found = accountants.epsilon(sampler.event(noise, 1), 1e-4, "add_or_remove_one").epsilon
    assert _delta(found, noise, q, limit) <= 1e-4 * (1 + 1e-6)
    assert _delta(found * 0.995 - 1e-3, noise, q, limit) > 1e-4


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("adjacency", ["add_or_remove_one", "zero_out"])
def test_a_user_costs_more_than_a_record_and_less_than_a_group(adjacency):
    def epsilon(limit: int, noise: float = 20.0) -> float:
        sampler = CappedPoissonSampler(num_examples=2000, expected_batch_size=100, records_per_user=limit)
        return accountants.epsilon(sampler.event(noise, 200), 1e-5, adjacency).epsilon

    records = PoissonSampler(num_examples=2000, expected_batch_size=100).event(20.0, 200)
    alone = accountants.epsilon(records, 1e-5, adjacency).epsilon
    assert epsilon(1) == alone
    values = [epsilon(limit) for limit in (1, 2, 4, 8)]
    assert values == sorted(values) and values[1] > 1.5 * alone
    # as one Gaussian whose sum moves by 8 clips with the probability that any record is sampled
    group = PoissonSampler(num_examples=2000, expected_batch_size=int(2000 * (1 - 0.95**8))).event(20.0 / 8, 200)
    assert values[-1] < accountants.epsilon(group, 1e-5, adjacency).epsilon


def test_no_proof_for_swapped_users():
    config = PrivacyConfig(
        noise_multiplier=1.0, expected_batch_size=10, privacy_unit="user", records_per_user=4, sampling="capped_poisson",
        adjacency="replace_one",
    )  # fmt: skip
    with pytest.raises(DPConfigError, match="capped_poisson.*no privacy proof.*swapped user"):
        make_plan(config, num_examples=100, num_steps=5)


def test_a_user_has_so_many_records_in_the_whole_run(tmp_path):
    seen = tiny.Gradients()
    options = dict(sampling="capped_poisson", records_per_user=2, expected_batch_size=12, max_steps=6)
    trainer = _trainer(tmp_path / "out", callbacks=[seen], **options)
    trainer.train()
    users, run = trainer._planned.users, trainer._session.run
    assert trainer.plan.num_examples == 2 * users.index.num_users == 2 * trainer.plan.num_users
    rows = [users.choose(run, step, run.draw(step)) for step in range(1, 7)]
    taken = collections.Counter(trainer.train_dataset[i]["author"] for i in {i for step in rows for i in step})
    assert max(taken.values()) <= 2
    for step, got in enumerate(seen.steps, start=1):
        records = [{k: v for k, v in trainer.train_dataset[i].items() if k != "author"} for i in rows[step - 1]]
        if not records:
            assert not any(g.any() for g in got.values())
            continue
        want = {n: g / 12 for n, g in reference.clipped_sum(trainer.model, tiny.collate(records), 0.3).items()}
        assert reference.relative_error(got, want) < 1e-5
