"""What a full finetuning of a model of 7 billion weights takes on 8 GPUs, planned without any: docs/scale_7b.md.

    python benchmarks/plan_7b.py --write

The model is made on the meta device and dealt by FSDP2 to eight ranks of a fake process group, so what a rank holds is what
the code that trains would give it. Bytes are the formula of a step; `sent_by_a_step` runs a small model through a real step
over the fake group, counts what is sent, and a test compares. Times are computed from rates: one that was measured here on
a CPU, and for a GPU, where nothing was measured, a goal and an estimate, named as such. Needs torch and transformers.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from hf_dpopt import PrivacyConfig, make_plan
from hf_dpopt.clipping import make_engine
from hf_dpopt.clipping.thresholds import FlatClipping
from hf_dpopt.common.sharding import elements_of, local_of
from hf_dpopt.records.losses import RecordLosses

DOCS = Path(__file__).resolve().parents[1] / "docs"
RANKS, TOKENS, PHYSICAL, LOGICAL = 8, 1024, 8, 1024  # tokens of a record; records of a physical batch, and of a step
GIB = 2**30
PEAK, ASSUMED_MFU = 989e12, 0.4  # bf16 FLOP/s of an H100 or H200 by its datasheet; utilisation that is assumed
GPU_GOAL, GPU_ESTIMATE = 1e10, 1e11  # normals a second: the goal, and a count of operations; neither was measured


def inverse_bands(backend: str) -> dict[str, Any]:
    return dict(noise_mechanism="banded_inverse", noise_kwargs={"num_bands": 16, "backend": backend})


MECHANISMS: dict[str, dict[str, Any]] = {
    "independent": {},
    "16 bands, kept": dict(noise_mechanism="banded", noise_kwargs={"num_bands": 16}),
    "16 bands of the inverse, kept": inverse_bands("history"),
    "16 bands of the inverse, drawn again": inverse_bands("regenerate"),
    "BLT of 4 buffers": dict(noise_mechanism="blt", noise_kwargs={"num_buffers": 4}),
}


@contextlib.contextmanager
def fake_ranks(rank: int, size: int = RANKS) -> Iterator[None]:
    """A process group whose other members answer nothing and are never waited for."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def llama(width: int, layers: int, inner: int, vocabulary: int, heads: int) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
            intermediate_size=inner, max_position_embeddings=TOKENS, tie_word_embeddings=False, use_cache=False,
            bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def big() -> LlamaForCausalLM:
    with torch.device("meta"):
        return llama(4096, 32, 11008, 32000, 32)


def sharded(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Each layer by itself, then the rest, as accelerate does."""
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


# --- memory ----------------------------------------------------------------------------------------------------------


def held(rank: int) -> int:
    """Elements of the weights that a rank holds; an element that lies nowhere is found by the sum over ranks."""
    with fake_ranks(rank):
        return sum(elements_of(p)[1] for p in sharded(big()).parameters())


def copies_kept() -> dict[str, dict[str, float]]:
    """Copies of a gradient that the noise of each mechanism keeps, and normals per coordinate of a step, on average."""
    found = {}
    for name, options in MECHANISMS.items():
        config = PrivacyConfig(
            noise_multiplier=1.0, target_delta=1e-6, expected_batch_size=LOGICAL, **{"sampling": "auto", **options}
        )
        cost = make_plan(config, num_examples=512_000, num_steps=500).cost
        found[name] = {"kept": cost.kept, "draws": cost.draws}
    return found


def largest_layer(model: nn.Module) -> tuple[int, int]:
    """Elements of the largest unit that is whole at a time, and of its largest parameter."""
    layers = [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]  # type: ignore[union-attr]
    return max(*layers, root_of(model)), max(p.numel() for p in model.parameters())


# --- bytes -----------------------------------------------------------------------------------------------------------


def bytes_of_step(num: int, root: int, batches: int, *, backwards: int, size: int = RANKS) -> int:
    """Bytes that a rank sends in a step, a part (n - 1) / n of all that is made whole or cut.

    FSDP2 gathers weights for the forward and for each backward, but for the root unit, which stays whole after the
    forward. Sums of each physical batch are reduce-scattered, as stock FSDP2 does with gradients.

    Args:
        num: elements of the weights, float32 in shards.
        root: those of the root unit: embedding, head, last norm.
        batches: physical batches of a rank.
        backwards: passes from the loss to the inputs in each: 1 for book-keeping, 2 for two passes.
        size: ranks.
    """
    return round(batches * ((1 + backwards) * num - root + num) * 4 * (size - 1) / size)


class Sent(TorchDispatchMode):
    """Counter of what collectives send, by the operator: (n - 1) / n of the whole tensor."""

    def __init__(self, size: int):
        super().__init__()
        self.bytes: dict[str, float] = collections.Counter()
        self._size = size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("c10d."):
            tensors = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, torch.Tensor)]
            whole = max(tensors, key=lambda t: t.numel() * t.element_size())
            self.bytes[name.split(".")[1]] += whole.numel() * whole.element_size() * (self._size - 1) / self._size
        return func(*args, **(kwargs or {}))


def root_of(model: nn.Module) -> int:
    """Elements of what lies in no layer."""
    layers = [sum(p.numel() for p in layer.parameters()) for layer in model.model.layers]  # type: ignore[union-attr]
    return sum(p.numel() for p in model.parameters()) - sum(layers)


def sent_by_a_step(engine: str) -> tuple[dict[str, float], int, int]:
    """Bytes that a rank sends for a physical batch of a small model, by operator; its elements, and those of the root."""
    torch.manual_seed(0)
    model = llama(32, 3, 64, 64, 2)
    num, root = sum(p.numel() for p in model.parameters()), root_of(model)
    with fake_ranks(0):
        sharded(model)
        clipping = make_engine(model, FlatClipping(clipping_norm=1.0), engine)
        ids = torch.randint(3, 60, (2, 8))
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        losses, sums = RecordLosses(model), clipping.empty_sum()
        with Sent(RANKS) as sent:
            clipping.add_clipped_sum(sums, lambda: losses(batch), 2)
        local_of(next(iter(sums.result().values())))
    return dict(sent.bytes), num, root


# --- the plan --------------------------------------------------------------------------------------------------------


def planned() -> dict[str, Any]:
    """Everything the page says."""
    model = big()
    num = sum(p.numel() for p in model.parameters())
    shares = [held(rank) for rank in range(RANKS)]
    assert sum(shares) == num, "an element lies nowhere, or twice"
    most, (layer, parameter) = max(shares), largest_layer(model)
    batches = LOGICAL // RANKS // PHYSICAL
    matrices = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    flops = LOGICAL * TOKENS * (6 * matrices + 12 * 32 * 4096 * TOKENS)
    return {
        "ranks": RANKS, "tokens": TOKENS, "physical": PHYSICAL, "logical": LOGICAL, "weights": num, "of_a_rank": most,
        "bytes": {
            "weights": 4 * most, "sums, of the first physical batch": 4 * most,
            "sums, from the second one on (float64)": 8 * most, "AdamW's moments": 8 * most,
            "largest unit, whole": 4 * layer, "sum of the largest parameter, whole": 4 * parameter,
        },
        "mechanisms": copies_kept(),
        "sent": {
            "book_keeping": bytes_of_step(num, root_of(model), batches, backwards=1),
            "two_pass": bytes_of_step(num, root_of(model), batches, backwards=2),
        },
        "step_s": flops / (RANKS * PEAK * ASSUMED_MFU), "batches": batches,
        "cpu_normals_per_s": cpu_rate(),
    }  # fmt: skip


def cpu_rate() -> float:
    """Normals a second of the stream of new runs on one core, as `noise_rate.py` measured it."""
    rows = json.loads((DOCS / "noise_rate.json").read_text(encoding="utf-8"))["rates"]
    return next(row["normals_per_s"] for row in rows if row["stream"] == "chacha20/1" and row["cores"] == 1)


def page(plan: dict[str, Any]) -> str:
    """The page, of the numbers in scale_7b.json."""
    of_a_rank, parts, seconds = plan["of_a_rank"], plan["bytes"], plan["step_s"]

    def gib(value: float) -> str:
        return f"{value / GIB:.1f}"

    held_always = parts["weights"] + parts["sums, from the second one on (float64)"] + parts["AdamW's moments"]
    lines = [
        "# A model of 7 billion weights on 8 GPUs: the plan",
        "",
        f"Full finetuning of a Llama of {plan['weights'] / 1e9:.2f} billion weights in shards (FSDP2, float32 weights, "
        f"AdamW) on {plan['ranks']} ranks, {plan['logical']} records of {plan['tokens']} tokens a step, in "
        f"{plan['batches']} physical batches of {plan['physical']} on each rank. **Nothing of this was run on a GPU**: it "
        "is what the code gives a rank of a fake process group, and what formulas and rates say; each number says which. "
        "Written by `python benchmarks/plan_7b.py --write` from [scale_7b.json](scale_7b.json).",
        "",
        "## Memory of a rank",
        "",
        "From the shards that FSDP2 deals to each of the eight ranks (the model on the meta device):",
        "",
        "| | GiB |",
        "|---|---:|",
        *(f"| {name} | {gib(value)} |" for name, value in parts.items()),
        f"| **weights, float64 sums and moments** | **{gib(held_always)}** |",
        "",
        "Activations are not counted: with `--gradient_checkpointing` they are the inputs of the layers, "
        f"{plan['physical']} x {plan['tokens']} x 4096 x 32 in bfloat16 ({gib(plan['physical'] * plan['tokens'] * 4096 * 32 * 2)} "
        "GiB, computed), and what one layer and the logits take.",
        "",
        "## Noise",
        "",
        "What it keeps between steps, by the package's cost model, and the time of a rank's share of it in a step:",
        "",
        "| noise | copies kept | GiB of a rank | normals per weight | seconds at 1e10/s (goal) | at 1e11/s (estimate) | one CPU core, measured rate |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, cost in plan["mechanisms"].items():
        normals = cost["draws"] * of_a_rank
        times = [f"{normals / rate:.3g}" for rate in (GPU_GOAL, GPU_ESTIMATE, plan["cpu_normals_per_s"])]
        lines.append(
            f"| {name} | {cost['kept']:.2f} | {gib(4 * cost['kept'] * of_a_rank)} | {cost['draws']:.2f} | {' | '.join(times)} |"
        )
    share = of_a_rank / GPU_GOAL / seconds
    lines += [
        "",
        f"The step itself: {seconds:.0f} s at a utilisation of {ASSUMED_MFU:.0%} of {PEAK / 1e12:.0f} TFLOP/s, which is "
        f"assumed. Independent noise at the goal's rate is {share:.2%} of that.",
        f"A core draws {plan['cpu_normals_per_s'] / 1e6:.0f} million normals a second ([noise_rate.json](noise_rate.json)); "
        "a model on GPUs would draw there.",
        "",
        "## Bytes of a step",
        "",
        "What a rank sends, by the formula that a test compares with a small model over the same fake group; weights travel "
        "in float32, sums too:",
        "",
        "| engine | gathers of the weights per physical batch | GiB per step | at 400 GB/s between GPUs, seconds |",
        "|---|---:|---:|---:|",
    ]
    for engine, sent in plan["sent"].items():
        gathers = 3 if engine == "two_pass" else 2
        lines.append(f"| {engine} | {gathers} | {gib(sent)} | {sent / 400e9:.1f} |")
    lines += [
        "",
        "Stock FSDP2 sends what book-keeping does: two gathers and one reduce-scatter for each physical batch, unless it "
        "is told to keep gradients whole between them. The rate of 400 GB/s is assumed.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/scale_7b.json and docs/scale_7b.md")
    options = parser.parse_args()
    plan = planned()
    text = page(plan)
    if options.write:
        (DOCS / "scale_7b.json").write_text(json.dumps(plan, indent=1) + "\n", encoding="utf-8")
        (DOCS / "scale_7b.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
