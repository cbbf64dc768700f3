"""The GPU queue: it goes on where it stopped, no item stops another one, and its numbers are those of the formulas."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import shlex
import sys
from pathlib import Path

import pytest
from torch.utils.flop_counter import FlopCounterMode

from recipes import glue

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu_queue")


@pytest.fixture
def item(queue):
    def make(name: str, code: str, **options):
        options = {"minutes": 1, "needs": ()} | options
        return queue.Item(name, ("{python}", "-c", code), **options)

    return make


def test_each_item_can_be_run(queue, repo):
    """Names are unique and fit for files; scripts are there; the options of gpu.py are options that it has."""
    gpu = importlib.import_module("gpu")
    names = [item.name for item in queue.ITEMS]
    assert len(set(names)) == len(names)
    options = argparse.Namespace(work=Path("/w"), data=Path("/d"), device="cpu")
    for item in queue.ITEMS:
        assert item.name.replace("-", "").replace("_", "").isalnum()
        words = queue.command_of(item, queue.places(item, options, "key"), tiny=True)
        assert words[0] == sys.executable
        scripts = [word for word in words if word.endswith(".py") and "/" in word]
        assert scripts and all((repo / script).exists() or script in item.files for script in scripts), item.name
        if words[1] == "recipes/glue.py":
            asked = ["some/model" if words[i - 1] == "--model_name_or_path" else word for i, word in enumerate(words)]
            epsilons = (None,) if "--non_private" in words else (8, 3, 1)
            assert glue.parse(asked[2:])[2].target_epsilon in epsilons, item.name
        if words[1] == "benchmarks/gpu.py":
            parsed = gpu.parser().parse_args(words[2:])
            assert (parsed.shapes, parsed.repetitions, parsed.device) == (["roberta-256x4"], 1, "cpu")


def test_the_smallest_form_of_a_real_item(queue, tmp_path, capsys, monkeypatch):
    """The whole step, all in, in a process of its own."""
    monkeypatch.setattr(queue, "facts", lambda device: {"device": "cpu, 1 cores", "versions": {}})
    where = shlex.split(f"--output {tmp_path} --work {tmp_path / 'work'} --device cpu --tiny --only step-gpt2-full")
    assert queue.main(where) == 0
    (record,) = json.loads((tmp_path / "gpu_queue.json").read_text())
    ways = [row["way"] for row in record["result"]["steps"]]
    assert ways == ["stock", "stock_compiled", "private", "without_noise"]
    assert all(row["ms"] > 0 and row["tflops"] > 0 and row["mfu"] is None for row in record["result"]["steps"])
    assert "Whole steps, all in" in capsys.readouterr().out


@pytest.mark.parametrize("finetuning", ["full", "lora"])
@pytest.mark.parametrize("family", ["roberta-256x4", "gpt2-256x4", "llama-256x4"])
def test_model_flops_are_those_that_are_counted(queue, family, finetuning):
    """The formula beside torch's counter of the products of a stock step, with attention written out."""
    cases, flops = importlib.import_module("cases"), importlib.import_module("flops")
    shape = dataclasses.replace(
        cases.SHAPES[family], batch=2, tokens=32, layers=6, width=128, vocabulary=512, inner=256
    )
    case = cases.Case(shape, finetuning)
    case.model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counted:
        case.stock()()
    formula = 2 * flops.flops_per_record(case.model, layers=6, width=128, tokens=32)
    # LoRA's first layer passes no gradient below its adapters; a classifier's head is left out
    assert formula == pytest.approx(counted.get_total_flops(), rel=0.12 if finetuning == "lora" else 0.02)
