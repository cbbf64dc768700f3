"""The GPU queue: it goes on where it stopped, no item stops another one, and its numbers are those of the formulas."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import shlex
import sys
import time
from pathlib import Path

import pytest
from torch.utils.flop_counter import FlopCounterMode

from recipes import glue

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
WRITES = "import json; json.dump(dict(steps=[], n=1), open('{output}', 'w'))"
FIELDS = {
    "item",
    "key",
    "command",
    "tiny",
    "device",
    "versions",
    "commit",
    "code",
    "ended",
    "status",
    "reason",
    "seconds",
}


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


@pytest.fixture
def call(queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    about = {"device": "cpu, 1 cores", "versions": {"python": "3", "torch": "2"}}
    monkeypatch.setattr(queue, "facts", lambda device: about)  # seconds of imports, and its own test below

    def run(items, *options: str) -> tuple[int, dict[str, dict]]:
        where = ["--output", str(tmp_path / "out"), "--work", str(tmp_path / "work"), "--device", "cpu"]
        status = queue.main([*where, *options], items)
        records = json.loads((tmp_path / "out" / "gpu_queue.json").read_text())
        return status, {record["item"]: record for record in records}

    return run


def test_a_failed_and_a_slow_item_stop_no_other(item, call, monkeypatch, queue, capsys):
    monkeypatch.setattr(queue, "GRACE", 1.0)
    items = [
        item("breaks", "raise SystemExit('the reason')"),
        item("silent", "pass"),
        item("slow", f"{WRITES}\nopen('{{output}}').close(); import time; time.sleep(60)", minutes=0.02),
        item("lacks", WRITES, needs=("no_such_module", "json")),
        item("lacks-data", WRITES, files=("{data}/no/file.tsv",)),
        item("works", WRITES),
    ]
    start = time.monotonic()
    status, found = call(items)
    assert status == 1 and time.monotonic() - start < 15
    assert {name: record["status"] for name, record in found.items()} == {
        "breaks": "failed", "silent": "failed", "slow": "timed out", "lacks": "skipped", "lacks-data": "skipped",
        "works": "done",
    }  # fmt: skip
    assert "the reason" in found["breaks"]["said"] and found["silent"]["reason"] == "left no result"
    assert found["slow"]["reason"].startswith("took more than 1 s")
    assert found["lacks"]["reason"] == "needs no_such_module, not installed here"
    assert "no/file.tsv, not there" in found["lacks-data"]["reason"]
    assert all(FIELDS <= record.keys() for record in found.values())
    assert found["works"]["result"] == {"steps": [], "n": 1} and found["works"]["versions"]["torch"] == "2"
    printed = capsys.readouterr().out
    assert "| slow | timed out |" in printed and "| lacks | skipped | 0 | needs no_such_module" in printed


def test_a_second_call_does_what_is_missing(item, call, queue, monkeypatch, tmp_path):
    count = f"open({str(tmp_path / 'runs')!r}, 'a').write('{{name}} ')"
    items = [item(name, f"{count.format(name=name)}; {WRITES}") for name in ("one", "two")]
    items.append(item("bad", f"{count.format(name='bad')}; raise SystemExit(1)"))
    call(items, "--only", "one")
    call(items)
    call(items)
    assert (tmp_path / "runs").read_text() == "one two bad "
    call(items, "--retry")
    assert (tmp_path / "runs").read_text() == "one two bad bad "
    changed = [dataclasses.replace(items[0], command=(*items[0].command, "an option")), *items[1:]]
    call(changed)
    assert (tmp_path / "runs").read_text() == "one two bad bad one "
    monkeypatch.setattr(queue, "code_digest", lambda: "other code")
    call(items, "--only", "two")
    assert (tmp_path / "runs").read_text() == "one two bad bad one two "


def test_without_a_gpu_nothing_is_written(queue, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(queue, "facts", lambda device: None)
    assert queue.main(["--output", str(tmp_path / "out")]) == 0
    assert "no CUDA device" in capsys.readouterr().out and not (tmp_path / "out").exists()


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
            assert glue.parse(asked[2:])[2].target_epsilon in (8, 3, 1), item.name
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


@pytest.mark.parametrize(
    "device, precision, tflops",
    [
        ("NVIDIA H200", "bf16", 989), ("NVIDIA H100 PCIe", "bf16", 756), ("NVIDIA H100 80GB HBM3", "fp32", 67),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312), ("NVIDIA L4", "bf16", None), ("cpu", "bf16", None),
    ],
)  # fmt: skip
def test_peaks_are_looked_up_by_name(queue, device, precision, tflops):
    flops = importlib.import_module("flops")
    assert flops.peak_flops(device, precision) == (None if tflops is None else 1e12 * tflops)
    share = flops.utilisation(1e12, 0.01, device, precision)
    assert share == (None if tflops is None else pytest.approx(100 / tflops))
