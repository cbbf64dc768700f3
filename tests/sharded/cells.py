"""Cells of the matrix engine x finetuning x noise x stage, run over shards (FSDP2, gloo) or on one process.

    python -m tests.sharded.cells one OUT                                                  # the reference
    python -m torch.distributed.run --standalone --nproc_per_node 2 -m tests.sharded.cells two OUT   # over two ranks

Each cell trains a few steps and writes, from rank 0, the whole gradients of every step, the whole weights and what is
kept per rank. Both processes run all cells of a call, so that the cost of starting is paid once.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import GPT2LMHeadModel, LlamaForCausalLM

from hf_dpopt import PrivacyConfig, PrivateRun, make_plan, private_step
from hf_dpopt.clipping import make_engine
from hf_dpopt.common.sharding import local_of, whole_of
from hf_dpopt.optim import DPAdamBC
from hf_dpopt.optim.galore import DPGaLore
from hf_dpopt.postprocess import IndependentNoise
from hf_dpopt.postprocess.low_pass import LowPassFilter
from hf_dpopt.records.losses import RecordLosses
from hf_dpopt.run.stages import Stages
from hf_dpopt.users.user_batches import UsersBatch
from tests.helpers import tiny

KEY = "22" * 32
STEPS = 5
PHYSICAL = 3


def bert() -> nn.Module:
    return tiny.model(dropout=0.0)


def gpt2(*, checkpointing: bool = False) -> nn.Module:
    """A GPT-2 whose head is tied to its embedding, with a width that two ranks do not divide."""
    model = tiny.made(GPT2LMHeadModel, vocab_size=41, n_embd=20, n_layer=2)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def llama() -> nn.Module:
    sizes = dict(vocab_size=41, intermediate_size=24, num_hidden_layers=2, num_key_value_heads=1)
    return tiny.made(LlamaForCausalLM, **sizes, bos_token_id=0, eos_token_id=0)


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = get_peft_model(bert(), LoraConfig(r=4, target_modules=["query", "value"], task_type="SEQ_CLS"))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    return model


def tokens(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    batch = tiny.collate(rows)
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch


def sharded(model: nn.Module) -> nn.Module:
    """The model over the ranks there are: each block by itself, then the rest, as accelerate and transformers do."""
    if not dist.is_initialized():
        return model
    base: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    parts = {"bert": lambda: base.bert.encoder.layer, "transformer": lambda: base.transformer.h}
    found = next((blocks for name, blocks in parts.items() if hasattr(base, name)), lambda: base.model.layers)
    for block in found():
        fully_shard(block)
    fully_shard(model)
    return model


@dataclasses.dataclass(frozen=True)
class Cell:
    """One cell of the matrix.

    Args:
        make: makes the model, the same on every rank.
        engine: clipping engine.
        collate: makes a batch of rows.
        optimizer: "adamw", "adam_bc", "filtered" or "galore".
        filters: a low-pass filter after the noise.
        users: rows of a record belong to a user, of 3 rows each.
        batch: expected records of a logical batch.
        dtype: of the weights.
        options: of `PrivacyConfig`.
    """

    make: Callable[[], nn.Module] = bert
    engine: str = "book_keeping"
    collate: Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]] = tiny.collate
    optimizer: str = "adamw"
    filters: bool = False
    users: bool = False
    batch: int = 16
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


MODELS: dict[str, dict[str, Any]] = {
    "full": dict(),
    "tied": dict(make=gpt2, collate=tokens),
    "llama": dict(make=llama, collate=tokens),
    "lora": dict(make=lora),
}
NOISE: dict[str, dict[str, Any]] = {
    "gaussian": {},
    "none": dict(noise_multiplier=0.0),
    "blt": dict(noise_mechanism="blt", noise_kwargs={"num_buffers": 3}),
    "banded": dict(noise_mechanism="banded", noise_kwargs={"num_bands": 3}),
    "nu_dpftrl": dict(noise_mechanism="nu_dpftrl"),
    "tree": dict(noise_mechanism="tree"),
    "restarted": dict(noise_mechanism="banded", noise_kwargs={"num_bands": 2}, noise_restart_every=2),
}
DP2 = dict(preconditioner="dp2_rmsprop", preconditioner_kwargs={"delay": 2})
FACTORED = dict(preconditioner="dp2_rmsprop", preconditioner_kwargs={"delay": 2, "factored": True})
EXTRA = dict(preconditioner="dp2_rmsprop", preconditioner_kwargs={"delay": 2, "variant": "extra_query"})
STAGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "dp2": dict(options=DP2),
    "dp2_factored": dict(options=FACTORED),
    "dp2_extra_query": dict(options=EXTRA),
    "dp2_adam_bc": dict(options=DP2, optimizer="adam_bc"),
    "quantile": dict(options=dict(preconditioner="quantile")),
    "filter": dict(filters=True),
    "filter_in_adam": dict(optimizer="filtered"),
    "galore": dict(optimizer="galore"),
    "users": dict(users=True),
}
OTHERS: dict[str, dict[str, Any]] = {
    "empty": dict(batch=1),
    "checkpointing": dict(make=functools.partial(gpt2, checkpointing=True), collate=tokens, engine="two_pass"),
    "float64": dict(dtype=torch.float64, options=dict(noise_multiplier=0.0)),
    "dp2_and_blt": dict(options={**DP2, **NOISE["blt"]}),
    "quantile_and_banded": dict(options={"preconditioner": "quantile", **NOISE["banded"]}),
    "per_layer": dict(options=dict(clipping="per_layer")),
}


def all_cells() -> dict[str, Cell]:
    """Name -> cell, of the full matrix."""
    cells = {name: Cell(**kind) for name, kind in OTHERS.items()}
    for engine in ("book_keeping", "two_pass"):
        for model, of_model in MODELS.items():
            for noise, options in NOISE.items():
                for stage, of_stage in STAGES.items():
                    kind = {"engine": engine, **of_model, **of_stage}
                    kind["options"] = {**of_stage.get("options", {}), **options}
                    cells[f"{engine}-{model}-{noise}-{stage}"] = Cell(**kind)
    return cells


def some_cells() -> list[str]:
    """Names of the cells of the suite: every value of every factor with every engine, and the others."""
    names = list(OTHERS)
    for engine in ("book_keeping", "two_pass"):
        names += [f"{engine}-{model}-gaussian-plain" for model in MODELS]
        names += [f"{engine}-full-{noise}-plain" for noise in NOISE if noise != "gaussian"]
        names += [f"{engine}-tied-gaussian-{stage}" for stage in STAGES if stage not in ("plain", "users")]
        names += [f"{engine}-full-gaussian-users", f"{engine}-lora-blt-dp2"]
    return names


def optimizer_of(cell: Cell, model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    match cell.optimizer:
        case "adam_bc":
            return DPAdamBC(trained, lr=1e-2)
        case "filtered":
            return DPAdamBC(trained, lr=1e-2, filter=low_pass())
        case "galore":
            return DPGaLore(trained, lr=1e-2, rank=4, refresh_every=2)
    return torch.optim.AdamW(trained, lr=1e-2, eps=1e-4)


def low_pass() -> LowPassFilter:
    return LowPassFilter.parse("first_order_v1", noise=IndependentNoise())


def users_batch(rows: list[dict[str, Any]]) -> UsersBatch:
    """Two rows for each of the records: users of two rows."""
    both = [row for one in rows for row in (one, {**one, "label": 1 - one["label"]})]
    return UsersBatch(tiny.collate(both), (2,) * len(rows), torch.full((len(both),), 0.5, dtype=torch.float64))


def train(name: str, cell: Cell, out: Path) -> dict[str, Any]:
    """Train the cell; what rank 0 would write, with whole tensors."""
    size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    model = sharded(cell.make().to(cell.dtype))
    model.train()
    options: dict[str, Any] = dict(
        noise_multiplier=1.0, target_delta=1e-3, expected_batch_size=cell.batch, unsafe_fixed_noise_key=KEY
    )
    options |= cell.options
    if cell.users:
        options |= dict(privacy_unit="user", records_per_user=2)
    records = tiny.records()
    plan = make_plan(PrivacyConfig(**options), num_examples=len(records), num_steps=STEPS)
    engine = make_engine(model, plan.clipper, cell.engine)
    run = PrivateRun(
        plan, output_dir=out / name, private_state_dir=out / f"{name}-k", parameters=engine.parameters
    )  # fmt: skip
    losses, optimizer = RecordLosses(model), optimizer_of(cell, model)
    stages = Stages(run, engine, optimizer, [low_pass()] if cell.filters else ())
    collate: Callable[[list[dict[str, Any]]], Any] = users_batch if cell.users else cell.collate

    def physical(mine: Sequence[int]) -> Iterator[Any]:
        for i in range(0, len(mine), PHYSICAL):
            yield collate([records[j] for j in mine[i : i + PHYSICAL]])

    gradients = []
    for t in range(1, STEPS + 1):
        drawn = run.draw(t)[rank::size].tolist()
        private_step(
            stages.engine, losses, physical(drawn), run=run, step=t, after_noise=stages.after_noise,
            stand_in=collate(records[:1]),
        )  # fmt: skip
        gradients.append(whole({n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
        optimizer.step()
        optimizer.zero_grad()
    kept = run.noise.bytes_kept()
    parts = {
        "noise": kept,
        "parameters": sum(4 * local_of(p).numel() for p in model.parameters()),
        "moments": sum(_bytes(value) for state in optimizer.state.values() for value in state.values()),
    }
    weights = whole({n: p for n, p in model.named_parameters() if p.requires_grad})
    run.close()
    return {"gradients": gradients, "weights": weights, "parts": parts}


def _bytes(value: Any) -> int:
    return 4 * local_of(value).numel() if isinstance(value, torch.Tensor) and value.dim() else 0


def whole(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: whole_of(value.detach()).clone() for name, value in tensors.items()}


def main(out: Path, names: Sequence[str]) -> None:
    """Run cells, and write what each gives, or why it cannot be run."""
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    cells, rank = all_cells(), int(os.environ.get("RANK", 0))
    for name in names:
        try:
            found = train(name, cells[name], out)
        except Exception as error:  # a cell that is refused is refused on every rank
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        if rank == 0:
            torch.save(found, out / f"{name}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    main(directory, sys.argv[2:] or some_cells())
