"""`glue.py --warm_start_epsilon`: the head is trained on frozen features, and both parts are paid for."""

from __future__ import annotations

import json

import pytest
import torch
from datasets import Dataset
from transformers import BertForSequenceClassification, BertModel

from hf_dpopt import DPConfigError, DPTrainer, DPTrainingArguments
from recipes import warm_start as module
from recipes.classifiers import PooledConfig, PooledForSequenceClassification
from recipes.warm_start import warm_start
from tests.helpers import tiny

pytestmark = pytest.mark.slow

N = 400
SIZES = {"intermediate_size": 24, "max_position_embeddings": 512, "initializer_range": 0.5}


def classifier(kind="bert"):
    if kind == "bert":
        return tiny.made(BertForSequenceClassification, **SIZES)
    body = tiny.made(BertModel, **SIZES)
    return PooledForSequenceClassification(PooledConfig(body.config, ["cls", "mean"], [0, 1], num_labels=2), body)


def records():
    """Texts of token 5 or token 6, which even a frozen random encoder tells apart."""
    return Dataset.from_list([{"input_ids": [2, 5 + i % 2, 7 + i % 20, 3], "label": i % 2} for i in range(N)])


def collate(rows):
    batch = {"input_ids": torch.tensor([row["input_ids"] for row in rows])}
    if "label" in rows[0]:
        batch["labels"] = torch.tensor([row["label"] for row in rows])
    return batch


def arguments(folder, **changes):
    values = dict(
        output_dir=str(folder), target_epsilon=8.0, target_delta=1e-3, use_cpu=True, report_to="none",
        disable_tqdm=True, save_strategy="no", skip_self_check=True, num_train_epochs=1,
        per_device_train_batch_size=16, expected_batch_size=16, remove_unused_columns=False,
        private_state_dir=str(folder) + "-keys",
    )  # fmt: skip
    return DPTrainingArguments(**values | changes)


@pytest.mark.parametrize("kind", ["bert", "pooled"])
def test_the_head_learns_and_nothing_else_changes(tmp_path, kind):
    model = classifier(kind)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    warm_start(model, records(), collate, arguments(tmp_path / "run", target_epsilon=80.0), 60.0)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"classifier.weight", "classifier.bias"}
    model.eval()
    with torch.no_grad():
        found = model(**collate(records().remove_columns("label"))).logits.argmax(1)
    assert (found == torch.tensor(records()["label"])).float().mean() > 0.9


@pytest.mark.parametrize("kind", ["bert", "pooled"])
def test_the_model_answers_what_the_head_was_trained_to(tmp_path, monkeypatch, kind):
    """Features are scaled in training: the head that is put back has to make the same logits without."""
    seen = []

    class Spy(DPTrainer):
        def train(self, *args, **kwargs):
            result = super().train(*args, **kwargs)
            with torch.no_grad():
                seen.append(self.model(features=self.train_dataset.features).logits.clone())
            return result

    monkeypatch.setattr(module, "DPTrainer", Spy)
    model = classifier(kind)
    warm_start(model, records(), collate, arguments(tmp_path / "run"), 2.0)
    with torch.no_grad():
        logits = model.eval()(**collate(records().remove_columns("label"))).logits
    torch.testing.assert_close(logits, seen[0], rtol=1e-4, atol=1e-5)


def test_the_run_that_follows_pays_for_both(tmp_path):
    model, args = classifier(), arguments(tmp_path / "run", advisor="none")
    folder = warm_start(model, records(), collate, args, 2.0)
    args.earlier_runs = [folder]
    trainer = DPTrainer(model, args, train_dataset=records(), data_collator=collate)
    trainer.train()
    report = json.loads((tmp_path / "run" / "privacy" / "report.json").read_text())
    assert 7.5 < report["plan"]["epsilon"] <= 8.0
    (run,) = report["plan"]["earlier_runs"]
    own = json.loads((tmp_path / "run" / "warm_start" / "privacy" / "report.json").read_text())
    assert own["plan"]["epsilon"] <= 2.0 and own["ledger_digest"] == run["ledger_digest"]
    alone = DPTrainer(
        classifier(), arguments(tmp_path / "other", advisor="none"), train_dataset=records(), data_collator=collate
    )
    assert trainer.plan.noise_multiplier > alone.plan.noise_multiplier


def test_a_run_that_is_started_again_takes_the_head_that_is_there(tmp_path):
    model = classifier()
    folder = warm_start(model, records(), collate, arguments(tmp_path / "run"), 2.0)
    ledger = (tmp_path / "run" / "warm_start" / "privacy" / "ledger.jsonl").read_bytes()
    again = classifier()
    assert warm_start(again, records(), collate, arguments(tmp_path / "run"), 2.0) == folder
    assert torch.equal(again.classifier.weight, model.classifier.weight)
    assert (tmp_path / "run" / "warm_start" / "privacy" / "ledger.jsonl").read_bytes() == ledger, "nothing is spent"


def other_labels():
    model = classifier()
    model.config.label2id = {"LABEL_1": 0, "LABEL_0": 1}
    return model


def other_weights():
    model = classifier()
    with torch.no_grad():
        model.bert.pooler.dense.weight += 1
    return model


def other_features():
    model = classifier()
    model.config.pooling_layers = [1]
    return model


@pytest.mark.parametrize(
    "make, rows, epsilon, words",
    [
        (other_features, N, 2.0, "features"),
        (other_labels, N, 2.0, "label2id"),
        (other_weights, N, 2.0, "frozen_part"),
        (classifier, N, 3.0, "target_epsilon"),
        (classifier, N - 1, 2.0, "num_records"),
    ],
)
def test_a_head_of_another_run_is_not_taken(tmp_path, make, rows, epsilon, words):
    warm_start(classifier(), records(), collate, arguments(tmp_path / "run"), 2.0)
    with pytest.raises(DPConfigError, match=f"the head of another run .*{words}"):
        warm_start(make(), records().select(range(rows)), collate, arguments(tmp_path / "run"), epsilon)


def test_a_ledger_that_was_put_back_is_no_proof_of_a_head(tmp_path):
    warm_start(classifier(), records(), collate, arguments(tmp_path / "run"), 2.0)
    path = tmp_path / "run" / "warm_start" / "privacy" / "ledger.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-2]))
    with pytest.raises(DPConfigError, match="charged fewer steps than the head"):
        warm_start(classifier(), records(), collate, arguments(tmp_path / "run"), 2.0)


def test_features_are_not_kept_where_they_would_be_published(tmp_path):
    args = arguments(tmp_path / "run", private_state_dir=str(tmp_path / "run" / "keys"))
    with pytest.raises(DPConfigError, match="overlap|inside|lies in"):
        warm_start(classifier(), records(), collate, args, 2.0)
    assert not list((tmp_path).rglob("features-*"))


@pytest.mark.parametrize(
    "changes, epsilon, words",
    [
        ({}, 8.0, "no part of target_epsilon"),
        ({}, -1.0, "no part of target_epsilon"),
        ({"target_epsilon": None, "noise_multiplier": 1.0}, 1.0, "no part of target_epsilon"),
        ({"privacy_unit": "user", "user_id_column": "who"}, 1.0, "for records"),
        ({"tuned_runs": 4.0}, 1.0, "no analysis for a run in two parts"),
    ],
)
def test_bad_parts_are_refused_before_anything_is_written(tmp_path, changes, epsilon, words):
    with pytest.raises(DPConfigError, match=words):
        warm_start(classifier(), records(), collate, arguments(tmp_path / "run", **changes), epsilon)
    assert not (tmp_path / "run").exists()
