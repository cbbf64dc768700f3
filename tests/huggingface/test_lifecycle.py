"""What a run that is resumed, or trained again, may change, and what it costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_dpopt import DPBudgetExceeded, DPConfigError
from hf_dpopt.accounting import delta
from tests import tiny


def _trainer(folder: Path, **changes):
    return tiny.trainer(
        folder / "out", max_steps=24, save_strategy="steps", save_steps=5, learning_rate=1e-3,
        private_state_dir=str(folder / "keys"), **changes,
    )  # fmt: skip


@pytest.mark.slow_but(1)
@pytest.mark.parametrize(
    "changes, field",
    [
        ({"noise_multiplier": 1.5}, "noise_multiplier"),
        ({"clipping_norm": 0.5}, "clipping_norm"),
        ({"expected_batch_size": 8}, "expected_batch_size"),
        ({"sampling": "poisson"}, "sampler"),
        ({"train_dataset": tiny.records(60)}, "a run on another dataset, of 64 records"),
        ({"target_delta": 1e-4}, "delta"),
        ({"clipping": "automatic"}, "clipping"),
    ],
)
def test_resuming_with_another_plan_is_refused(tmp_path, changes, field):
    _trainer(tmp_path).train()
    before = (tmp_path / "out/privacy/ledger.jsonl").read_bytes()
    with pytest.raises(DPConfigError, match=rf"{field}.*[Cc]ontinue with the same options|{field}"):
        _trainer(tmp_path, **changes).train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-10"))
    assert (tmp_path / "out/privacy/ledger.jsonl").read_bytes() == before


def test_a_resume_keeps_the_delta_of_a_release_with_another_default(tmp_path, monkeypatch):
    """Nobody gave one, then or now; the recorded one is part of the mechanism, the default of today is not."""
    with monkeypatch.context() as patch:
        patch.setattr(delta, "default_delta", lambda n: 1e-2)
        _trainer(tmp_path, target_delta=None).train()
    assert delta.default_delta(64) == 1e-3
    resumed = _trainer(tmp_path, target_delta=None)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-10"))
    assert resumed.plan.delta == resumed.privacy_spent().delta == 1e-2


def test_a_branch_over_the_budget_is_refused_and_mended(tmp_path):
    """The two ways out that the message offers both work."""
    budget = {"noise_multiplier": None, "target_epsilon": 3.0}
    _trainer(tmp_path, **budget).train()
    checkpoint = str(tmp_path / "out/checkpoint-10")
    with pytest.raises(DPBudgetExceeded, match="--target_epsilon"):
        _trainer(tmp_path, **budget).train(resume_from_checkpoint=checkpoint)
    more = _trainer(tmp_path, noise_multiplier=None, target_epsilon=6.0)
    more.train(resume_from_checkpoint=checkpoint)
    assert 3.0 < more.privacy_spent().epsilon <= 6.0
    assert more.plan.noise_multiplier == json.loads((tmp_path / "out/privacy/report.json").read_text())["plan"]["noise_multiplier"]  # fmt: skip


def test_each_chain_of_a_fixed_order_has_participations_of_its_own(tmp_path):
    """Two chains of half an epoch each can both show the same record: the cost is that of two epochs, not of one."""
    options = {"sampling": "fixed_order", "adjacency": "zero_out", "expected_batch_size": 4, "max_steps": 6}
    first = tiny.trainer(tmp_path, **options)
    first.train()
    once = first.privacy_spent().epsilon
    first.train()
    twice = first.privacy_spent()
    assert twice.num_steps == 12 < first.plan.sampler.steps_per_epoch
    assert twice.epsilon == pytest.approx(first.plan.epsilon((6, 6)))
    assert twice.epsilon > 1.2 * once
    with pytest.raises(DPBudgetExceeded):
        over = tiny.trainer(tmp_path, **options | {"noise_multiplier": None, "target_epsilon": once * 1.1})
        over.train()
