"""Whole steps of a model in shards (FSDP2) on one device, beside the same model that is not: what the machinery costs.

    python benchmarks/sharded.py --device cuda --output sharded.json

A group of one process: nothing is sent, all else of a step over shards is there. Stock steps are the non-private ones of
both; rows are those of `gpu.py --parts steps`, interleaved. Needs torch, transformers, numpy, scipy and cryptography.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from cases import CLIPPING_NORM, SHAPES, Case, peak_mib, synchronize
from flops import flops_per_record, utilisation
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from whole_step import StepRow

from hf_dpopt.clipping import make_engine
from hf_dpopt.clipping.thresholds import FlatClipping
from hf_dpopt.common.collectives import current_ranks
from hf_dpopt.common.sharding import give_back, local_of
from hf_dpopt.noise import independent_noise
from hf_dpopt.randomness.chacha import ChaCha20Gaussian
from hf_dpopt.randomness.sharded import ShardedSource

Step = Callable[[], None]


def shard(model: nn.Module, device: str) -> None:
    """Each block by itself, then the rest, as accelerate does."""
    mesh = init_device_mesh(device, (1,))
    for path in ("roberta.encoder.layer", "transformer.h", "model.layers"):
        try:
            blocks = list(model.get_submodule(path).children())
        except AttributeError:
            continue
        for block in blocks:
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


class Ways:
    """Steps of one model, in shards or whole.

    Args:
        case: the model with its batch.
        num_batches: physical batches of a step.
    """

    def __init__(self, case: Case, num_batches: int):
        self._case, self._num_batches, self._num_taken = case, num_batches, 0
        self._trained = {n: p for n, p in case.model.named_parameters() if p.requires_grad}
        self._optimizer = torch.optim.AdamW(self._trained.values(), lr=1e-5, fused=case.device == "cuda")
        self._source = ShardedSource(ChaCha20Gaussian(os.urandom(32)), current_ranks())
        self._noise = independent_noise(1.0).stream(self._source, CLIPPING_NORM)
        self._engine = make_engine(case.model, FlatClipping(clipping_norm=CLIPPING_NORM), "book_keeping")

    def stock(self) -> None:
        backward = self._case.stock(1 / self._num_batches)
        for _ in range(self._num_batches):
            backward()
        self._update()

    def private(self) -> None:
        self._num_taken += 1
        clipped = self._engine.empty_sum()
        for _ in range(self._num_batches):
            self._engine.add_clipped_sum(clipped, self._case.losses, self._case.shape.batch)
        give_back(self._case.model)
        sums = clipped.result()
        self._source.place(sums)
        self._noise.add_({name: local_of(total) for name, total in sums.items()}, self._num_taken)
        for name, p in self._engine.parameters.items():
            p.grad = sums[name].div_(self._num_batches * self._case.shape.batch).to(p.dtype)
        self._update()

    def _update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


def measure(name: str, batch: int, options: argparse.Namespace, device_name: str) -> list[StepRow]:
    """Rows of all ways, interleaved."""
    shape = dataclasses.replace(SHAPES[name], batch=batch, tokens=options.tokens)
    num_batches, bf16 = max(1, options.records // batch), options.precision == "bf16"
    cases = {where: Case(shape, "full", device=options.device, bf16=bf16) for where in ("", "_fsdp2")}
    shard(cases["_fsdp2"].model, options.device)
    made = {where: Ways(case, num_batches) for where, case in cases.items()}
    steps: dict[str, Step] = {
        f"{kind}{where}": getattr(ways, kind) for kind in ("stock", "private") for where, ways in made.items()
    }
    memory, times = {}, dict[str, list[float]]()
    for way, step in steps.items():
        step()
        memory[way], times[way] = peak_mib(cases["_fsdp2" if "fsdp2" in way else ""], step), []
    for _ in range(options.repetitions):
        for way, step in steps.items():
            synchronize(options.device)
            start = time.perf_counter()
            step()
            synchronize(options.device)
            times[way].append(time.perf_counter() - start)
    of_record = flops_per_record(cases[""].model, layers=shape.layers, width=shape.width, tokens=shape.tokens)
    rows = []
    for way in steps:
        took, flops = statistics.median(times[way]), of_record * num_batches * batch
        share = utilisation(flops, took, device_name, options.precision)
        rows.append(
            StepRow(
                name, shape.tokens, "full", options.precision, way, batch, num_batches * batch, 1e3 * took,
                memory[way], flops / took / 1e12, share,
            )
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", choices=list(SHAPES), default="roberta-large")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch_tokens", type=int, default=16384, help="of a physical batch")
    parser.add_argument("--records", type=int, default=1024, help="of a whole step")
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    backend = "nccl" if options.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    rows = measure(options.shape, max(1, options.batch_tokens // options.tokens), options, name)
    for row in rows:
        print(f"| {row.shape} | {row.way} | {row.records} ({row.batch}) | {row.ms:.1f} ms | {row.mib:.0f} MiB |")
    if options.output is not None:
        found = {"steps": [dataclasses.asdict(row) for row in rows]}
        options.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
