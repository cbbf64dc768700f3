"""Evaluation on a private set: exact without noise, the law of the noise, one record's influence, budget, selection."""

from __future__ import annotations

import json
import math
from unittest import mock

import dp_accounting
import pytest
import scipy.stats
import torch
from transformers import EarlyStoppingCallback

from hf_dpopt import DPBudgetExceeded, DPConfigError
from hf_dpopt.huggingface import evaluation
from hf_dpopt.plan.evaluation_budget import EvaluationBudget, epsilon_of
from hf_dpopt.records.scores import Scores
from hf_dpopt.run.ledger import Ledger
from hf_dpopt.verify import verify
from tests.helpers import tiny

ALPHA = 1e-6  # false-alarm probability of each random test
OPTIONS = {"eval_data_privacy": "private", "eval_target_epsilon": 4.0}


def held_out(num: int = 30) -> list[dict]:
    """Records that are not those of training."""
    return [{**record, "input_ids": [3, *record["input_ids"]]} for record in tiny.records(num)]


def make(folder, records=None, **changes):
    return tiny.trainer(folder / "run", private_state_dir=str(folder / "keys"),
                        eval_dataset=held_out() if records is None else records, **{**OPTIONS, **changes})  # fmt: skip


class _Silent:
    def normal(self, shape, **place):
        return torch.zeros(shape)


def _without_noise():
    return mock.patch.object(evaluation, "ChaCha20Gaussian", lambda *a: _Silent())


def test_without_noise_metrics_are_the_exact_ones(tmp_path):
    trainer = make(tmp_path, model=tiny.model(dropout=0.0))
    with _without_noise():
        found = trainer.evaluate()
    batch = tiny.collate(held_out())
    labels = batch.pop("labels")
    logits = trainer.model.eval()(**batch).logits
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    predicted = logits.argmax(dim=-1)
    true_positive = int(((predicted == 1) & (labels == 1)).sum())
    wrong = int((predicted != labels).sum())
    assert losses.max() < 3.466, "no loss is cut in this test"
    assert found["eval_loss"] == pytest.approx(losses.mean().item(), rel=1e-5)
    assert found["eval_accuracy"] == pytest.approx((predicted == labels).double().mean().item())
    assert found["eval_f1"] == pytest.approx(2 * true_positive / max(2 * true_positive + wrong, 1))


@pytest.mark.parametrize("num_labels", [2, 3, None])
def test_a_record_moves_the_sum_by_one_at_most_whatever_it_is(num_labels):
    scores, generator = Scores(1.5, num_labels), torch.Generator().manual_seed(0)
    losses = torch.tensor([0.0, 1.5, 99.0, torch.nan, torch.inf, -torch.inf, -3.0, 0.7])
    logits = torch.randn(8, num_labels or 2, generator=generator)
    logits[2:4] = torch.tensor([[torch.inf] * (num_labels or 2), [torch.nan] * (num_labels or 2)])
    labels = torch.tensor([0, 1, 1, 0, 1, 0, 1, -100])
    whole = scores.total_of(losses, logits, labels)
    for i in range(8):
        rest = [j for j in range(8) if j != i]
        moved = whole - scores.total_of(losses[rest], logits[rest], labels[rest])
        assert 0.1 < moved.norm() <= 1 + 1e-12


@pytest.mark.parametrize("shape", [(1, 5), (5,)])
def test_a_record_of_several_labels_does_not_count_several_times(shape):
    """Multi-label targets of a model whose config names no problem: they arrive one record at a time."""
    with pytest.raises(ValueError, match="not one label"):
        Scores(1.5, 5).total_of(torch.tensor([0.7]), torch.arange(5.0).view(1, 5), torch.zeros(shape))


def test_a_record_of_the_set_moves_the_sum_by_one_at_most(tmp_path, monkeypatch):
    """Leave-one-out through the trainer, with a record on which the forward fails."""
    records = [{**r, "input_ids": [min(t, 38) for t in r["input_ids"]]} for r in held_out(6)]
    records[2]["input_ids"][0] = 39

    def fails(losses, batch, whole=evaluation.RecordLosses.__call__):
        if (batch["input_ids"] == 39).any():
            raise ValueError("a forward that fails")
        return whole(losses, batch)

    sums, whole_sum = [], evaluation.EvaluationGuard._sum
    monkeypatch.setattr(evaluation.RecordLosses, "__call__", fails)
    monkeypatch.setattr(evaluation.EvaluationGuard, "_sum", lambda *how: (sums.append(whole_sum(*how)), sums[-1])[1])
    for left_out in (None, *range(6)):
        some = [record for i, record in enumerate(records) if i != left_out]
        make(tmp_path / f"{left_out}", some).evaluate()
    moves = [float((sums[0] - one).norm()) for one in sums[1:]]
    assert max(moves) <= 1 + 1e-6 and moves[2] == 0 and min(moves[:2]) > 0.5


def test_the_noise_is_that_of_the_budget(tmp_path):
    trainer, seen = make(tmp_path), []
    read = Scores.read
    with mock.patch.object(
        Scores, "read", lambda self, released, num: (seen.append(released), read(self, released, num))[1]
    ):
        budget = trainer._evaluation._budget(30)
        scores, total = Scores(3.466, 2), torch.arange(5.0, dtype=torch.float64)
        for _ in range(200):
            trainer._evaluation._release(total, scores, budget, 30)
    noise = (torch.stack(seen) - total) / budget.noise_stddev
    low, high = (scipy.stats.chi2.ppf(p, noise.numel()) for p in (ALPHA / 2, 1 - ALPHA / 2))
    assert low < float(noise.square().sum()) < high
    assert len(set(map(tuple, noise.tolist()))) == len(noise), "noise that was used twice"


@pytest.mark.parametrize(
    ("adjacency", "factor"), [("add_or_remove_one", 1.0), ("replace_one", 2.0), ("zero_out", 1.0)]
)
def test_epsilon_of_evaluations_is_that_of_one_gaussian_mechanism(adjacency, factor):
    budget = EvaluationBudget(3.0, 1e-5, adjacency, 7)
    assert budget.noise_stddev == pytest.approx(factor * budget.noise_multiplier)
    spent = epsilon_of([budget.noise_multiplier] * 7, 1e-5, adjacency)
    exact = dp_accounting.get_epsilon_gaussian(budget.noise_stddev / factor / 7**0.5, 1e-5)
    assert spent == pytest.approx(exact, rel=1e-3) and 2.98 < spent <= 3.0
    assert spent >= exact - 1e-9, "never understated"


def test_what_would_cost_too_much_is_refused_before_anything_is_summed(tmp_path):
    records = held_out(8)
    trainer = make(tmp_path, records, eval_times=2)
    first = trainer.evaluate()
    assert trainer.evaluate() == first, "the same weights have the same answer"
    with torch.no_grad():
        trainer.model.classifier.bias.add_(1.0)
    second = trainer.evaluate()
    metrics = ("eval_loss", "eval_accuracy", "eval_f1")  # each has noise, and is cut off at 0
    assert any(second[name] != first[name] for name in metrics)
    assert first["eval_epsilon"] < second["eval_epsilon"] <= OPTIONS["eval_target_epsilon"]
    with torch.no_grad():
        trainer.model.classifier.bias.add_(1.0)
    sums = mock.patch.object(evaluation.EvaluationGuard, "_sum")
    with sums as summed, pytest.raises(DPBudgetExceeded, match="eval_target_epsilon=4"):
        trainer.evaluate()
    assert not summed.called
    again = make(tmp_path, records, eval_times=2)  # a process that begins later
    with torch.no_grad():
        again.model.classifier.bias.add_(5.0)
    with pytest.raises(DPBudgetExceeded):
        again.evaluate()


@pytest.mark.parametrize(
    "length", [{"max_steps": 20}, {"max_steps": 3}, {"max_steps": -1, "num_train_epochs": 2.5}], ids=str
)
def test_evaluations_after_epochs_are_as_many_as_were_planned(tmp_path, length):
    trainer = make(tmp_path, eval_strategy="epoch", save_strategy="no", **length)
    trainer.train()
    trainer.evaluate()
    charged, budget = Ledger.find(trainer.args.output_dir).evaluations, trainer._evaluation.budget
    # the one at the end has the weights of the last epoch, whose answer is known
    assert budget.num_planned == len(charged) + 1
    assert budget.spent(charged.values()) <= 4.0


def test_the_best_model_and_the_moment_to_stop_are_chosen_by_noisy_metrics(tmp_path):
    trainer = make(tmp_path, callbacks=[EarlyStoppingCallback(early_stopping_patience=5)], eval_strategy="steps",
                   eval_steps=2, save_strategy="steps", save_steps=2, load_best_model_at_end=True,
                   metric_for_best_model="eval_accuracy", greater_is_better=True)  # fmt: skip
    trainer.train()
    lines = [line for line in trainer.state.log_history if "eval_loss" in line]
    assert len(lines) == 3 and all(0 <= line["eval_accuracy"] <= 1 for line in lines)
    best = max(line["eval_accuracy"] for line in lines)
    assert trainer.state.best_metric == best
    trainer.save_model()
    report = json.loads((tmp_path / "run/privacy/report.json").read_text())
    assert report["evaluations"]["num_charged"] == 3 and report["evaluations"]["num_planned"] == 4
    statement = (tmp_path / "run/privacy/statement.md").read_text()
    assert "Metrics on the evaluation set were released with noise: **epsilon = 4" in statement
    assert "both epsilons and both deltas add up" in statement
    assert all(check.status != "failed" for check in verify(tmp_path / "run").checks)


def test_noise_for_one_adjacency_is_not_read_under_another(tmp_path):
    """Under replace_one a record moves the sum twice as far: noise of an evaluation that was made before is too little."""
    guard = make(tmp_path)._evaluation
    guard.budget = EvaluationBudget(2.0, 1e-5, "add_or_remove_one", 1)
    guard._charge(guard.budget, {"set": "eval"})
    assert guard.facts["epsilon_spent"] == pytest.approx(2, rel=1e-2)
    guard.budget = EvaluationBudget(20.0, 1e-5, "replace_one", 1)
    for use in (lambda: guard._charge(guard.budget, {}), lambda: guard.facts):
        with pytest.raises(DPConfigError, match="add_or_remove_one"):
            use()
    assert len(Ledger.find(tmp_path / "run").evaluations) == 1


def test_a_smaller_target_later_does_not_understate_what_was_spent(tmp_path):
    guard = make(tmp_path)._evaluation
    guard._charge(EvaluationBudget(4.0, 1e-5, "zero_out", 1), {"set": "eval"})
    guard.budget = EvaluationBudget(1.0, 1e-5, "zero_out", 1)
    facts = guard.facts
    assert 3.9 < facts["epsilon_spent"] <= facts["target_epsilon"]
    assert facts["noise_multiplier"] == EvaluationBudget(4.0, 1e-5, "zero_out", 1).noise_multiplier


def test_one_adapter_on_two_models_has_two_answers(tmp_path):
    trainer = make(tmp_path, eval_times=2)
    for name, p in trainer.model.named_parameters():
        p.requires_grad = "classifier" in name
    first = trainer.evaluate()
    with torch.no_grad():
        trainer.model.get_input_embeddings().weight.add_(1.0)
    assert trainer.evaluate()["eval_loss"] != first["eval_loss"]


class Killed(BaseException):
    """The end of a process."""


def test_what_was_charged_and_not_answered_is_lost_and_not_asked_again(tmp_path):
    """The kill may have come after the sum was made, so its noise is not drawn for a second one."""
    kill = mock.patch.object(evaluation.EvaluationGuard, "_release", side_effect=Killed)
    with kill, pytest.raises(Killed):
        make(tmp_path, model=tiny.model(dropout=0.0), eval_times=2).evaluate()
    trainer = make(tmp_path, model=tiny.model(dropout=0.0), eval_times=2)
    with mock.patch.object(evaluation.EvaluationGuard, "_sum") as summed:
        found = trainer.evaluate()
    assert not summed.called and math.isnan(found["eval_loss"]) and math.isnan(found["eval_accuracy"])
    facts = trainer._evaluation.facts
    assert (facts["num_charged"], facts["num_lost"]) == (1, 1) and facts["epsilon_spent"] == found["eval_epsilon"] > 0
    again = trainer.evaluate(metric_key_prefix="again")
    assert 0 <= again["again_accuracy"] <= 1 and again["again_epsilon"] > found["eval_epsilon"]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"eval_target_epsilon": None}, "has no budget for the people in the evaluation set"),
        ({"eval_target_epsilon": -1.0}, "-1"),
        ({"eval_times": 0}, "eval_times"),
        ({"eval_loss_bound": -1.0}, "eval_loss_bound"),
        ({"eval_data_privacy": "public"}, "eval_target_epsilon=4.0 is for a private evaluation set"),
        ({"compute_metrics": lambda found: {}}, "sees exact predictions"),
        ({"metric_for_best_model": "eval_rouge"}, "no metric of a private evaluation set"),
        ({"privacy_unit": "user", "user_id_column": "user"}, "one record of each user"),
        (
            {"tuned_runs": 10.0, "noise_multiplier": None, "target_epsilon": 8.0},
            "with tuned_runs=10: what the choice between runs costs",
        ),
    ],
)
def test_what_would_release_more_is_refused(tmp_path, changes, match):
    with pytest.raises(DPConfigError, match=match):
        make(tmp_path, **changes).evaluate()


def test_several_sets_are_evaluated_one_by_one(tmp_path):
    trainer = make(tmp_path, {"a": held_out(), "b": held_out(20)}, eval_times=3)
    found = trainer.evaluate()
    assert {"eval_a_loss", "eval_b_loss", "eval_b_epsilon"} <= found.keys()
    charged = Ledger.find(trainer.args.output_dir).evaluations
    assert [one.query["set"] for one in charged.values()] == ["eval_a", "eval_b"]
    assert trainer.evaluate()["eval_a_loss"] == found["eval_a_loss"]  # these weights are answered already
    assert len(Ledger.find(trainer.args.output_dir).evaluations) == 2
    assert (
        trainer.evaluate("b")["eval_loss"] == found["eval_b_loss"]
    )  # a prefix of its own, as the stock Trainer has it
    assert len(Ledger.find(trainer.args.output_dir).evaluations) == 2
    again = make(tmp_path, {"a": held_out(), "b": held_out(20)}, eval_times=3)  # a process that begins later
    assert again.evaluate("b")["eval_loss"] == found["eval_b_loss"] and again.evaluate("a") != again.evaluate("b")


def test_exact_ways_are_closed(tmp_path):
    trainer = make(tmp_path)
    with pytest.raises(DPConfigError, match="gives exact values of single records"):
        trainer.predict(held_out())


def test_a_budget_that_is_none_is_found_before_a_step(tmp_path):
    with pytest.raises(DPConfigError, match="eval_times"):
        make(tmp_path, eval_times=0)
