"""Step time and peak memory of the private step beside the non-private one, measured in one run.

    python benchmarks/step_cost.py --output docs/step_cost.json

The clipping engines beside Opacus: clipping.py. Large models on a GPU: gpu.py.

Time: medians of interleaved repetitions in one process. Memory: growth over the model and its optimizer, a fresh process
for each number. The private step is the whole of it: clipping, noise from ChaCha20, division, assignment of `p.grad`.
Needs torch, transformers and hf_dpopt only.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, RobertaConfig, RobertaForSequenceClassification

from hf_dpopt.clipping import make_engine
from hf_dpopt.clipping.thresholds import FlatClipping
from hf_dpopt.noise import independent_noise
from hf_dpopt.randomness.chacha import ChaCha20Gaussian
from hf_dpopt.records.losses import RecordLosses

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from recipes.embedded.build import make_model

NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
GPT2 = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def _roberta(vocabulary: int, width: int, layers: int) -> Callable[[], nn.Module]:
    return lambda: RobertaForSequenceClassification(
        RobertaConfig(
            vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, num_attention_heads=max(2, width // 64),
            intermediate_size=4 * width, max_position_embeddings=514, type_vocab_size=1, **NO_DROPOUT,
        )
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {  # name -> model, batch, tokens
    "demo": (make_model, 128, 40),  # of the embedded job
    "roberta-768x6": (_roberta(50265, 768, 6), 8, 128),
    "gpt2-768x6": (lambda: GPT2LMHeadModel(GPT2Config(n_layer=6, **GPT2)), 4, 128),
}


class Case:
    """One model with its batch and the two kinds of step."""

    def __init__(self, name: str, finetuning: str, device: str, bf16: bool):
        make, batch_size, num_tokens = MODELS[name]
        self.device, self.bf16 = device, bf16
        self.model = make().to(device).train()
        if finetuning == "lora":
            from peft import LoraConfig, get_peft_model

            targets = ["c_attn"] if "gpt2" in name else ["query", "value"]
            self.model = get_peft_model(self.model, LoraConfig(r=8, target_modules=targets, modules_to_save=["classifier"]))  # fmt: skip
        ids = torch.randint(5, self.model.config.vocab_size, (batch_size, num_tokens), device=device)
        labels = ids if "gpt2" in name else torch.randint(0, 2, (batch_size,), device=device)
        self.batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-5)
        self.engine = make_engine(self.model, FlatClipping(clipping_norm=0.1))
        self.losses = RecordLosses(self.model)
        self.stream = independent_noise(1.0).stream(ChaCha20Gaussian(os.urandom(32)), 0.1)
        self.step = 0

    def stock(self) -> None:
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.bf16):
            loss = self.model(**self.batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def private(self, noise: bool = True) -> None:
        self.step += 1
        num_records = self.batch["labels"].size(0)

        def forward() -> torch.Tensor:
            with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.bf16):
                return self.losses(self.batch)

        clipped = self.engine.empty_sum()
        self.engine.add_clipped_sum(clipped, forward, num_records)
        sums = clipped.result()
        if noise:
            self.stream.add_(sums, self.step)
        for name, p in self.engine.parameters.items():
            p.grad = sums[name].div_(num_records).to(p.dtype)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def clipping_only(self) -> None:
        self.private(noise=False)


def seconds(case: Case, step: Callable[[], None]) -> float:
    if case.device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if case.device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure_time(case: Case, repetitions: int) -> dict[str, float]:
    kinds = {"stock": case.stock, "clipping": case.clipping_only, "private": case.private}
    for step in kinds.values():  # warm-up: allocator, optimizer state
        step()
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(repetitions):
        for kind, step in kinds.items():
            times[kind].append(seconds(case, step))
    ratios = {k: statistics.median(a / b for a, b in zip(times[k], times["stock"], strict=True)) for k in kinds}
    return {"stock_ms": 1e3 * statistics.median(times["stock"]), "clipping": ratios["clipping"], "private": ratios["private"]}  # fmt: skip


def measure_memory(case: Case, kind: str) -> float:
    """MiB that a step needs beyond the model and the optimizer's state."""
    step = {"stock": case.stock, "private": case.private}[kind]
    if case.device == "cuda":
        step()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    for group in case.optimizer.param_groups:  # the state is allocated here, not in the measured step
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    case.optimizer.step()
    case.optimizer.zero_grad(set_to_none=True)
    gc.collect()
    before = int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts again here: building the model needed more than a step does
    step()
    step()
    peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return (peak - before) / 2**20


def memory_in_fresh_process(options: argparse.Namespace, name: str, finetuning: str, kind: str) -> float:
    command = [sys.executable, __file__, "--memory_of", name, finetuning, kind, "--device", options.device]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(
        command + (["--bf16"] if options.bf16 else []), capture_output=True, text=True, env=environment
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return float(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["demo", "roberta-768x6"])
    parser.add_argument("--finetuning", nargs="+", choices=["full", "lora"], default=["full", "lora"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--output")
    parser.add_argument("--memory_of", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        name, finetuning, kind = options.memory_of
        print(measure_memory(Case(name, finetuning, options.device, options.bf16), kind))
        return
    rows = []
    for name in options.models:
        for finetuning in options.finetuning:
            row = {"model": name, "finetuning": finetuning, "batch": MODELS[name][1], "tokens": MODELS[name][2]}
            row |= measure_time(Case(name, finetuning, options.device, options.bf16), options.repetitions)
            stock, private = (memory_in_fresh_process(options, name, finetuning, k) for k in ("stock", "private"))
            row |= {"stock_mib": stock, "memory": private / stock}
            rows.append(row)
            print(
                f"| {name} | {finetuning} | {row['stock_ms']:.0f} ms | {row['clipping']:.2f} | {row['private']:.2f} | "
                f"{stock:.0f} MiB | {row['memory']:.2f} |", flush=True,
            )  # fmt: skip
    result = {"rows": rows, "device": options.device, "bf16": options.bf16, "threads": torch.get_num_threads(), "torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version(), "repetitions": options.repetitions}  # fmt: skip
    if options.output:
        with open(options.output, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
