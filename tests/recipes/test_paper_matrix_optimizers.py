"""The comparison of optimizers for matrices: its runs are what they say, and its table is made of complete cells."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel

from recipes.paper.matrix_optimizers import alignment, compare, task, training
from recipes.paper.matrix_optimizers.training import METHODS, TUNING_SEED, Run
from recipes.paper.runs import KeptRuns
from recipes.paper.top_layer.task import States, Task

WIDTH, NUM = 8, 60


@pytest.fixture(scope="module")
def tasks():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50, hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="eager",
    )  # fmt: skip
    layer = BertModel(config, add_pooling_layer=False).eval().encoder.layer[0]
    lengths = torch.randint(2, 6, (NUM,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    records = States(torch.randn(int(offsets[-1]), WIDTH).bfloat16(), offsets, torch.arange(NUM) % 2)
    topics = task.means(records)
    return {
        "lora": Task(records, records, records, records, layer),
        "full": Task(records, records, records, records, layer),
        "topics": Task(topics, topics, topics, topics, nn.Identity()),
        "phrases": Task(topics, topics, topics, topics, nn.Identity()),
    }


def test_a_record_of_topics_is_the_mean_of_its_states(tasks):
    states, topics = tasks["lora"].train, tasks["topics"].train
    begin, end = states.offsets[7:9].tolist()
    torch.testing.assert_close(topics.states_LD[7], states.states_LD[begin:end].float().mean(0).bfloat16())
    assert len(topics) == NUM and torch.equal(topics.labels_N, states.labels_N)


def test_topics_are_read_by_name(tmp_path):
    (tmp_path / "x.tsv").write_text('A "quoted\tone\tSci/Tech\nb\tWorld\n', encoding="utf-8")
    assert task.read_topics(tmp_path / "x.tsv") == (['A "quoted\tone', "b"], [3, 0])


@pytest.mark.parametrize("name", task.TASKS)
def test_what_is_trained(tasks, name):
    run = Run(task=name, method="DP-AdamW", epsilon=3.0, rate=0.1, seed=0, num_steps=2, batch=9)
    trained = {n for n, p in training.make_model(tasks[name], run).named_parameters() if p.requires_grad}
    assert "head.weight" in trained
    assert any("lora_A" in n for n in trained) == (name == "lora")
    assert any("intermediate.dense.weight" in n for n in trained) == (name == "full")


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_and_the_seed_says_all(tasks, method, monkeypatch):
    monkeypatch.setattr(training, "DELTA", 1e-3)
    run = Run(task="topics", method=method, epsilon=300.0, rate=0.05, seed=0, num_steps=4, batch=20)
    results = [training.train(tasks, run) for _ in range(2)]
    assert results[0] | {"seconds": 0} == results[1] | {"seconds": 0} and results[0]["noise"] > 0


def test_the_tuning_seed_is_scored_on_other_records(tasks, monkeypatch):
    monkeypatch.setattr(training, "DELTA", 1e-3)
    empty = States(torch.zeros(1, WIDTH).bfloat16(), torch.tensor([0, 1]), torch.tensor([9]))  # nobody finds a class 9
    other = {"topics": Task(tasks["topics"].train, tasks["topics"].train, empty, empty, nn.Identity())}
    run = Run(task="topics", method="DP-AdamW", epsilon=300.0, rate=0.05, seed=TUNING_SEED, num_steps=1, batch=20)
    assert training.train(other, run)["accuracy"] > 0
    assert training.train(other, Run(**(vars(run) | {"seed": 0})))["accuracy"] == 0


def test_the_table_has_the_complete_cells_with_paired_differences(tmp_path, monkeypatch, capsys):
    """Made-up scores: the best rate is 2 ^ 3 times the start, Muon is one point better in all seeds but one."""
    asked = []

    def made_up(run):
        asked.append(run)
        off = abs(np.log2(run.rate / compare.START[run.task]) - 3)
        better = 0.01 * (run.method == "DP-Muon") * (run.seed != 1)
        return {"accuracy": 0.8 - 0.01 * off + better + 0.001 * (run.seed % 10), "noise": 1.0, "seconds": 0.0}

    runs = KeptRuns(tmp_path / "matrix_optimizers.jsonl", made_up, lambda run, result: "")
    for method in ("DP-AdamW", "DP-Muon"):
        compare.cell(runs, "topics", method, 3.0, 5)
    assert {run.rate for run in asked if run.seed < 5} == {8 * compare.START["topics"]}
    (num_steps, batch), start = compare.STEPS_OF["topics"], compare.START["topics"]
    run = Run(task="topics", method="DP-MuonBC", epsilon=3.0, rate=0.0, seed=0, num_steps=num_steps, batch=batch)
    training.tune(runs, run, start)
    monkeypatch.setattr("sys.argv", ["x", "--output_dir", str(tmp_path), "--only_table"])
    compare.main()
    rows = json.loads((tmp_path / "matrix_optimizers.json").read_text())["rows"]
    assert [row["method"] for row in rows] == ["DP-AdamW", "DP-Muon"]  # the other one has no reported seeds
    assert rows[1]["over_dp_adamw"] == pytest.approx(0.8) and rows[1]["verdict"] == "win"
    assert "+0.80 +- 0.56 win" in capsys.readouterr().out


def test_alignment_knows_the_gradient_before_the_noise(tasks):
    """A signal of rank one far above the noise: denoised, it is nearer than released; without noise, it is the same."""
    signal = torch.outer(torch.randn(30), torch.randn(50))
    for stddev in (1e-6, 0.5):
        watch = alignment.Watch(("w",))
        for step in range(1, 4):
            watch(step, {"w": signal}, {"w": signal + stddev * torch.randn(30, 50)}, stddev**2)
        seen = {name: np.mean(values) for name, values in watch.found["w"].items()}
        if stddev < 0.5:
            assert [seen[x] for x in ("released", "denoised", "average, denoised")] == pytest.approx([1] * 3, abs=1e-4)
        else:
            assert seen["released"] < seen["average"] and seen["released"] + 0.05 < seen["denoised"]
            assert seen["above the edge"] == pytest.approx(1, abs=0.4)
            assert seen["signal to noise"] == pytest.approx(float(signal.norm()) / (0.5 * 1500**0.5), rel=1e-3)


def test_alignment_of_a_run(tasks, monkeypatch):
    monkeypatch.setattr(training, "DELTA", 1e-3)
    hidden, head = alignment.measure(tasks, "topics", 300.0, num_steps=3, batch=20)
    assert (hidden["matrix"], head["matrix"]) == ("hidden.weight", "head.weight")
    assert all(-1 <= row[name] <= 1 for row in (hidden, head) for name in ("released", "denoised", "turned"))
