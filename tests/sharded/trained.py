"""`DPTrainer` on models in shards: sharded by transformers while they are loaded, or by accelerate.

Jobs are CASE/PART, where PART is whole, first (three of six steps) or second (a resume); HOW is plain, transformers or
accelerate. accelerate shards on accelerators alone; on CPUs it is told that it may.
"""

from __future__ import annotations

import faulthandler
import hashlib
import os
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import BertForSequenceClassification

from hf_dpopt.common.sharding import is_sharded, whole_of
from tests.helpers import tiny

HANGS_AFTER = 240  # seconds; where each process waits is then printed
CASES: dict[str, dict[str, Any]] = {
    "gaussian": {},
    "blt_dp2": dict(
        noise_mechanism="blt",
        noise_kwargs={"num_buffers": 2},
        sampling="auto",
        preconditioner="dp2_rmsprop",
        preconditioner_kwargs={"delay": 2},
    ),  # fmt: skip
    "filtered": dict(optim="dp_adam_bc", filter="first_order_v1"),
    "lora": dict(noise_mechanism="banded", noise_kwargs={"num_bands": 2}, sampling="auto"),
    "checked": dict(skip_self_check=False),
    "eval": dict(eval_strategy="steps", eval_steps=2, per_device_eval_batch_size=4, eval_data_privacy="public"),
    "average": dict(average_iterate="exponential"),
}


def allow_fsdp_on_cpus() -> None:
    """Let accelerate take processes on CPUs for a mode that it shards in."""
    from accelerate import state

    made = state.AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        made(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = state.DistributedType.FSDP, fsdp_plugin

    state.AcceleratorState.__init__ = init  # type: ignore[method-assign]


def load(how: str, case: str, source: Path) -> nn.Module:
    options: dict[str, Any] = {}
    if how == "transformers":
        from transformers.distributed import DistributedConfig

        plan = {"bert.encoder.layer.*": "free_full_weight"}
        options = dict(distributed_config=DistributedConfig(fsdp_size=dist.get_world_size(), fsdp_plan=plan))
    model: nn.Module = BertForSequenceClassification.from_pretrained(source, **options)
    if case == "lora":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(3)
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["query", "value"], task_type="SEQ_CLS"))
    return model


def train(out: Path, source: Path, how: str, case: str, part: str) -> dict[str, Any]:
    """Train a case, or a part of its steps; the whole weights at the end, and which parameters were in shards."""
    model = load(how, case, source)
    options = dict(
        private_state_dir=str(out / case / "keys"), max_steps=6, learning_rate=1e-2, expected_batch_size=9,
        per_device_train_batch_size=3, sampling="poisson",
    )  # fmt: skip
    options |= CASES[case]
    if case == "eval":
        options["eval_dataset"] = [{**row, "input_ids": row["input_ids"][::-1]} for row in tiny.records(100)[64:]]
    if how == "accelerate":
        # accelerate's default, in whose place whole files are written
        wrapped = {
            "transformer_layer_cls_to_wrap": ["BertLayer"],
            "version": 2,
            "state_dict_type": "SHARDED_STATE_DICT",
        }
        options |= dict(fsdp=True, fsdp_config=wrapped)
    if part != "whole":
        options |= dict(save_strategy="steps", save_steps=2)
    trainer = tiny.trainer(out / case / "run", model=model, **options)
    if part == "first":
        trainer.add_callback(tiny.StopAt(3))
    trainer.train(resume_from_checkpoint=True if part == "second" else None)
    sharded = [name for name, p in trainer.model.named_parameters() if is_sharded(p)]
    trained = {n: whole_of(p.detach()).clone() for n, p in trainer.model.named_parameters() if p.requires_grad}
    trainer.save_model()
    return {
        "weights": trained,
        "sharded": sharded,
        "log": trainer.state.log_history,
        "self_check": trainer._session.self_check,
    }


def main(out: Path, source: Path, how: str, jobs: list[str]) -> None:
    torch.set_num_threads(1)
    os.urandom = hashlib.shake_256(b"shards").digest  # type: ignore[assignment]  # the same root key in every run
    faulthandler.dump_traceback_later(HANGS_AFTER, exit=True)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    if how == "accelerate":
        allow_fsdp_on_cpus()
    for job in jobs:
        case, _, part = job.partition("/")
        try:
            found = train(out, source, how, case, part or "whole")
        except Exception as error:
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        if int(os.environ.get("RANK", 0)) == 0:
            torch.save(found, out / f"{case}-{part or 'whole'}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()
