"""What runs of both kinds of head keep: one charge before a record is read, resume bit for bit, nothing of the data."""

from __future__ import annotations

import functools
import json
import re

import pytest
import torch

from hf_dpopt.accounting import delta as deltas
from hf_dpopt.common.errors import DPBudgetExceeded, DPConfigError
from hf_dpopt.convex import adagrad, head_training
from hf_dpopt.run.ledger import Ledger
from tests.convex.heads import M, clipped, in_subspace, plain, run

clean = functools.partial(in_subspace, adagrad="clean")  # with a secret matrix in its state
HEADS = pytest.mark.parametrize("config", [plain, in_subspace, clean], ids=["plain", "subspace", "clean"])


class Killed(BaseException):
    pass


@HEADS
@pytest.mark.parametrize("at", [1, 6, 12])  # V is refreshed before steps 6 and 11
def test_a_killed_run_goes_on_bit_for_bit(tmp_path, monkeypatch, keys, at, config):
    monkeypatch.setattr(head_training, "SAVE_EVERY", -1.0)
    with monkeypatch.context() as patch:
        owner, name = (head_training, "projected") if config is plain else (adagrad, "project_in_norm")
        steps, project = [], getattr(owner, name)

        def die(*args, **kwargs):
            steps.append(1)
            if len(steps) == at:
                raise Killed
            return project(*args, **kwargs)

        patch.setattr(owner, name, die)
        with pytest.raises(Killed):
            run(tmp_path, config(num_steps=12))
    assert Ledger.read(tmp_path / "out/privacy/ledger.jsonl").num_charged == 1
    assert not (tmp_path / "out/privacy/statement.md").exists()
    _, resumed = run(tmp_path, config(num_steps=12))
    assert Ledger.read(tmp_path / "out/privacy/ledger.jsonl").num_charged == 1  # it was one run
    monkeypatch.setattr(head_training, "new_chain", lambda: keys[0])
    _, whole = run(tmp_path / "again", config(num_steps=12))
    assert torch.equal(resumed, whole)


@HEADS
def test_a_run_is_charged_once_before_a_record_is_looked_at(tmp_path, monkeypatch, config):
    look = head_training.gradient_sum

    def looked(*args):
        assert Ledger.read(tmp_path / "out/privacy/ledger.jsonl").num_charged == 1
        return look(*args)

    monkeypatch.setattr(head_training, "gradient_sum", looked)
    made, _ = run(tmp_path, config())
    assert Ledger.read(tmp_path / "out/privacy/ledger.jsonl").num_charged == 1
    assert made.plan.epsilon(2) > made.plan.epsilon()
    with pytest.raises(DPBudgetExceeded, match=f"epsilon to {made.plan.epsilon(2):.4g}"):
        run(tmp_path, config())
    with pytest.raises(DPConfigError, match="another private mechanism"):
        run(tmp_path, config(num_steps=41))


@HEADS
def test_nothing_but_ledger_and_statement_is_written_and_nothing_of_the_data(tmp_path, monkeypatch, config):
    monkeypatch.setattr(head_training, "SAVE_EVERY", -1.0)
    monkeypatch.chdir(tmp_path)
    said = []
    for seed in (0, 1):
        folder = tmp_path / str(seed)
        run(folder, config(), private=clipped(config(), seed=seed))
        files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        assert {re.sub("[0-9a-f]{16}", "ID", name) for name in files} == {
            "private/runs/ID/lock", "private/runs/ID/log.jsonl",  # of charges, as the ledger
            "out/privacy/head.json", "out/privacy/ledger.jsonl", "out/privacy/ledger.jsonl.lock",
            "out/privacy/statement.md",
        }  # fmt: skip
        ledger = folder / "out/privacy/ledger.jsonl"
        assert ledger.read_text().count("\n") == 4  # header, plan, chain, one charge
        digest, report = Ledger.read(ledger).digest(), json.loads((folder / "out/privacy/head.json").read_text())
        assert report.pop("ledger_digest") == digest and report.pop("statement_sha256")
        said.append(((folder / "out/privacy/statement.md").read_text().replace(digest, ""), report))
    assert said[0] == said[1] and {path.name for path in tmp_path.iterdir()} == {"0", "1"}


@HEADS
def test_a_run_goes_on_with_features_of_the_same_width_only(tmp_path, config):
    run(tmp_path, config(), finish=False)
    narrow = {"private": clipped(config(has_bias=False)), "public": clipped(config(has_bias=False), M, seed=7)}
    with pytest.raises(DPConfigError, match="num_features"):
        run(tmp_path, config(), **narrow)


@HEADS
def test_a_killed_run_keeps_the_delta_it_began_with(tmp_path, monkeypatch, config):
    """Also if the default is another one in the release that goes on."""
    asked = config(target_delta=None)
    with monkeypatch.context() as patch:
        patch.setattr(deltas, "default_delta", lambda n: 1e-3)
        before, weights = run(tmp_path, asked, finish=False)
    after, again = run(tmp_path, asked)
    assert before.plan.delta == after.plan.delta == 1e-3 and torch.equal(weights, again)
