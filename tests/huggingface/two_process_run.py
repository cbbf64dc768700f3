"""Run in two ranks, and alone: writes what each rank saw and released."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from hf_dpopt.common import collectives
from hf_dpopt.run.journal import Journal
from tests.helpers import tiny
from tests.run import preempted

FIXED = "22" * 32


class Gradients(tiny.Gradients):
    def __init__(self):
        super().__init__()
        self.served: list[list[int]] = []  # records of each step

    def on_step_begin(self, *args, **kwargs):
        self.served.append([])


def run(folder: Path, name: str, resume: bool = False, **changes) -> None:
    records = [r | {"index": i, "author": f"user {i % 11 if i < 40 else 3}"} for i, r in enumerate(tiny.records())]
    seen = Gradients()

    def collate(rows):
        if seen.served and rows and "index" in rows[0]:  # before the first step the collator is tried
            seen.served[-1].extend(r["index"] for r in rows)
        return tiny.collate(rows)

    trainer = tiny.trainer(
        folder / name, model=tiny.model(dropout=0.0), train_dataset=records, data_collator=collate,
        callbacks=[seen], private_state_dir=str(folder / f"{name}-keys"), skip_self_check=True,
        **{"per_device_train_batch_size": 64, "max_steps": 5, "learning_rate": 1e-2, **changes},
    )  # fmt: skip
    output = trainer.train(resume_from_checkpoint=resume or None)
    rank = collectives.rank()
    torch.save({"grads": seen.steps, "weights": tiny.weights(trainer.model)}, folder / f"{name}-{rank}.pt")
    facts = {
        "world": collectives.world_size(),
        "served": seen.served,
        "epsilon": output.metrics["epsilon"],
        "strategy": trainer.plan.strategy.digest(),
        "planned": trainer.plan.epsilon(),
        "drawn": [trainer._session.run.draw(s).tolist() for s in range(1, 6)],
        "wrapped": type(trainer.model_wrapped).__name__,
        "numbers": [v for log in trainer.state.log_history for k, v in log.items() if k.startswith("private_")],
    }
    (folder / f"{name}-{rank}.json").write_text(json.dumps(facts))


class Die(TrainerCallback):
    """Dies after a step, on all ranks; what is on the disk then is copied before."""

    def __init__(self, folder: Path, to: Path, step: int):
        self.folder, self.to, self.step = folder, to, step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            if collectives.rank() == 0:
                shutil.copytree(self.folder, self.to)
            if collectives.world_size() > 1:
                dist.barrier()
            raise preempted.Killed


def killed(folder: Path, setting: str, lost: int) -> None:
    """Die two steps after a checkpoint, with the last step charged and not written down, and go on."""
    write = Journal.write

    def skipping(journal: Journal, kind: str, step: int, *rest) -> None:
        if step != lost:
            write(journal, kind, step, *rest)

    alive, left, whole = (folder / f"killed-{name}" for name in ("alive", "left", "whole"))
    with mock.patch.object(Journal, "write", skipping), contextlib.suppress(preempted.Killed):
        preempted.start(alive, setting, callbacks=[Die(alive, left, lost)])
    trainer = preempted.resume(left, setting)
    undisturbed = preempted.undisturbed(whole, setting, frozenset({lost}))
    rank, want = collectives.rank(), tiny.weights(undisturbed.model)
    facts = {
        "taken_again": [
            trainer._session.run.recovery.first,
            trainer._session.run.recovery.last,
            sorted(trainer._session.run.recovery.lost),
        ],
        "is_equal": all(torch.equal(p, want[name]) for name, p in tiny.weights(trainer.model).items()),
        "spent": trainer.privacy_spent().epsilon,
        "planned": trainer.plan.epsilon(),
    }
    torch.save({"weights": tiny.weights(trainer.model)}, folder / f"killed-{rank}.pt")
    (folder / f"killed-{rank}.json").write_text(json.dumps(facts))


def main(folder: Path) -> None:
    killed(folder, "dp2_correlated", lost=5)
    run(folder, "sum", noise_multiplier=0.0, unsafe_fixed_noise_key=FIXED)
    run(folder, "noise", noise_multiplier=1.0, unsafe_fixed_noise_key=FIXED)
    run(
        folder, "empty", noise_multiplier=1.0, expected_batch_size=1, unsafe_fixed_noise_key=FIXED
    )  # draws 4, 0, 1, 0, 0
    run(folder, "private", noise_multiplier=1.0, dataloader_num_workers=0)
    run(folder, "blt", noise_multiplier=1.0, unsafe_fixed_noise_key=FIXED, noise_mechanism="blt")
    run(folder, "banded", noise_multiplier=1.0, noise_mechanism="banded", noise_kwargs={"num_bands": 2})
    correlated = {"noise_multiplier": 1.0, "noise_mechanism": "nu_dpftrl", "save_strategy": "steps", "save_steps": 3}
    run(folder, "resumed", max_steps=3, **correlated)
    run(folder, "resumed", resume=True, max_steps=5, **correlated)
    dp2 = {
        "noise_multiplier": 1.0, "preconditioner": "dp2_rmsprop", "optim": "dp_adam_bc",
        "filter": "first_order_v1", "preconditioner_kwargs": {"delay": 2, "clipping_norm": 5.0},
    }  # fmt: skip
    run(folder, "dp2", unsafe_fixed_noise_key=FIXED, **dp2)
    factored = {
        **dp2,
        "preconditioner_kwargs": {"delay": 2, "factored": True},
        "optim": "dp_galore",
        "optim_args": "rank=4",
    }
    saving = {"save_strategy": "steps", "save_steps": 3}
    run(folder, "factored", max_steps=3, **factored, **saving)
    run(folder, "factored", resume=True, max_steps=5, **factored, **saving)
    run(
        folder, "adadps", noise_multiplier=1.0, unsafe_fixed_noise_key=FIXED, preconditioner="adadps", optim="sgd",
        public_dataset=tiny.records(80)[64:], public_batch_size=6,
    )  # fmt: skip
    run(
        folder, "query", noise_multiplier=1.0, unsafe_fixed_noise_key=FIXED, preconditioner="one_query", optim="sgd",
        noise_mechanism="nu_dpftrl",
    )  # fmt: skip
    run(
        folder, "metrics", noise_multiplier=1.0, unsafe_fixed_noise_key=FIXED, log_private_metrics=0.3,
        expected_batch_size=4,
    )  # fmt: skip
    users = {
        "privacy_unit": "user", "user_id_column": "author", "records_per_user": 20, "expected_batch_size": 5,
        "noise_multiplier": 1.0, "unsafe_fixed_noise_key": FIXED, "clipping_norm": 0.1,
    }  # fmt: skip
    run(folder, "users", per_device_train_batch_size=3, **users)
    run(folder, "local", local_training={"learning_rate": 0.5, "batch_size": 4}, noise_mechanism="nu_dpftrl", **users)
