"""Run by `tests.huggingface.two_nodes.launch` on two nodes: private runs whose private folders are on the disks of the nodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import torch
import torch.distributed as dist

from hf_dpopt import DPConfigError
from hf_dpopt.common import collectives
from hf_dpopt.convex import HeadConfig, HeadRun, make_head_plan
from tests.helpers import tiny

FIXED = "22" * 32
USERS = {
    "privacy_unit": "user", "user_id_column": "author", "records_per_user": 8, "expected_batch_size": 4,
    "per_device_train_batch_size": 16, "unsafe_fixed_noise_key": FIXED,
}  # fmt: skip

SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}


class Killed(BaseException):
    pass


def die(state, model):
    raise Killed


def collate(rows):
    return tiny.collate([{k: v for k, v in row.items() if k in ("input_ids", "label")} for row in rows])


def authored(num: int = 64) -> datasets.Dataset:
    return datasets.Dataset.from_list([r | {"author": f"user {i % 11}"} for i, r in enumerate(tiny.records(num))])


def trainer(root: Path, name: str, *, local: bool = False, **changes: Any) -> Any:
    """A trainer whose private folder is on the disk of the node.

    Args:
        local: whether ``output_dir`` is there, too; else it is shared.
    """
    return tiny.trainer(
        root / ("disk" if local else "shared") / name / "out", private_state_dir=str(root / "disk" / f"{name}-keys"),
        **{"max_steps": 4, "data_collator": collate, **changes},
    )  # fmt: skip


def note(root: Path, name: str, **facts: Any) -> None:
    (root / "facts").mkdir(exist_ok=True)
    (root / "facts" / f"{name}-{collectives.rank()}.json").write_text(json.dumps(facts))


def train(root: Path, name: str, *, resume: bool = False, **changes: Any) -> None:
    made = trainer(root, name, **changes)
    output = made.train(resume_from_checkpoint=resume or None)
    run = made._session.run
    torch.save(tiny.weights(made.model), root / f"{name}-{collectives.rank()}.pt")
    note(
        root, name, world=collectives.world_size(), epsilon=output.metrics["epsilon"], planned=made.plan.epsilon(),
        charged=list(run.charged), users=None if made._planned.users is None else made._planned.users.index.num_users,
        recovered=None if run.recovery is None else [run.recovery.first, run.recovery.last],
    )  # fmt: skip


def refused(root: Path, name: str, *, folder: str = "", resume: Any = None, **changes: Any) -> None:
    try:
        trainer(root, folder or name, **changes).train(resume_from_checkpoint=resume)
    except DPConfigError as error:
        note(root, name, error=str(error))


def unlike(records: Any) -> Any:
    """The same on the first node, in another order on the second."""
    order = list(range(len(records)))[:: -1 if collectives.rank() else 1]
    return records.select(order) if isinstance(records, datasets.Dataset) else [records[i] for i in order]


def killed(root: Path, name: str, step: int, **changes: Any) -> None:
    """Die after a step, with checkpoints of all even ones."""
    try:
        trainer(root, name, callbacks=[tiny.At("step_end", die, step)], **SAVING, **changes).train()
    except Killed:
        dist.barrier()


def without_a_disk_in_common(root: Path) -> None:
    """Each machine has an output_dir of its own, and the second has no checkpoint."""
    killed(root, "one", 3, local=True)
    refused(root, "one_alone", folder="one", resume=True, local=True, **SAVING)


def head(root: Path) -> None:
    config = HeadConfig(
        head_radius=1.0, feature_norm=1.0, expected_batch_size=8, num_steps=4, noise_multiplier=1.0, target_delta=1e-3
    )
    plan = make_head_plan(config, num_examples=64)
    try:
        HeadRun(plan, output_dir=root / "disk" / "head", private_state_dir=root / "disk" / "head-keys")
    except DPConfigError as error:
        note(root, "head", error=str(error))


def main(root: Path) -> None:
    train(root, "records", train_dataset=tiny.records())
    train(root, "users", train_dataset=authored(), model=tiny.model(dropout=0.0), **USERS)
    refused(root, "unlike_users", train_dataset=unlike(authored()), **USERS)
    refused(root, "unlike_users_in_memory", train_dataset=unlike(list(authored())), **USERS)
    refused(root, "unlike_records", train_dataset=unlike(tiny.records()))
    refused(root, "fewer_records", train_dataset=tiny.records(64 - collectives.rank()))
    killed(root, "killed", 3)
    train(root, "killed", resume=True, **SAVING)
    without_a_disk_in_common(root)
    head(root)
