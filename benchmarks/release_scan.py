"""Cost of the release scan beside that of writing: a checkpoint is saved again and again, and scanned.

    python benchmarks/release_scan.py [millions of parameters, 11 by default] [--thorough]

Weights (safetensors), Adam's state (`torch.save`), and a tokenizer are written, flushed to the disk, and scanned with
the keys of three chains, in the process that wrote them, as at a save, or with --thorough as before a push. The
medians of all saves but the first; the first one also reads the tokenizer and looks it up in the training records.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from hf_dpopt.report.release_scan import Block, ReleaseScan, TrainingRecords

SAVES = 5
VOCABULARY = {f"token{i:05d}": i for i in range(50_000)}


def write(folder: Path, step: int, weights: dict[str, torch.Tensor]) -> float:
    """Write a checkpoint; return the seconds it took until it was on the disk."""
    started = time.perf_counter()
    checkpoint = folder / f"checkpoint-{step}"
    checkpoint.mkdir()
    save_file(weights, checkpoint / "model.safetensors")
    state = {
        i: {"step": torch.tensor(1.0), "exp_avg": w, "exp_avg_sq": w.clone()} for i, w in enumerate(weights.values())
    }
    torch.save({"state": state, "param_groups": [{"lr": 1e-3}]}, checkpoint / "optimizer.pt")
    (checkpoint / "tokenizer.json").write_text(json.dumps(VOCABULARY, indent=1), encoding="utf-8")
    for file in checkpoint.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return time.perf_counter() - started


def main() -> None:
    millions = float(next(iter(sys.argv[1:]), 11))
    torch.set_num_threads(1)
    side = 1024
    count = max(1, round(millions * 1e6 / side**2))
    weights = {f"layers.{i}.weight": torch.randn(side, side) for i in range(count)}
    records = [f"Record {i} says that {i * 7919 % 10007} of the {i % 97} were seen." for i in range(20_000)]
    training = TrainingRecords(lambda: (Block(records[i : i + 512]) for i in range(0, len(records), 512)))
    scan = ReleaseScan([os.urandom(32) for _ in range(15)], training=training, is_thorough="--thorough" in sys.argv)
    writing, scanning = [], []
    with tempfile.TemporaryDirectory() as place:
        for step in range(SAVES):
            writing.append(write(Path(place), step, {name: w + step for name, w in weights.items()}))
            started = time.perf_counter()
            assert scan.findings(Path(place) / f"checkpoint-{step}") == []
            scanning.append(time.perf_counter() - started)
            for file in (Path(place) / f"checkpoint-{step}").iterdir():
                file.unlink()
    typical = statistics.median(scanning[1:]), statistics.median(writing[1:])
    print(
        f"{count * side**2 / 1e6:.1f}M parameters: writing {typical[1]:.3f} s, scanning {typical[0]:.3f} s, "
        f"{typical[0] / typical[1]:.1%}; the first save {writing[0]:.3f} s and {scanning[0]:.3f} s"
    )


if __name__ == "__main__":
    main()
