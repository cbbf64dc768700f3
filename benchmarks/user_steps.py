"""Clipping users beside clipping records, and local training; in one run.

    python benchmarks/user_steps.py --output ../docs/user_steps.json        # in benchmarks/

Clipping: the same rows, as records and as users of 2, 4 or 8 rows each, one user in parts, and a round of users of
uneven sizes in physical batches of eight (four) rows; the ratio is within a repetition. Local training: users per second of small users on LoRA.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from step_cost import Case, seconds

from hf_dpopt.clipping.units import Units
from hf_dpopt.run.batches import LogicalBatch, add_batch
from hf_dpopt.users import UserBatch
from hf_dpopt.users.local import LocalTraining, LocalUserBatch

SIZES = (8, 8, 8, 7, 5, 4, 3, 3, 2, 2, 2, 1, 1, 1, 1, 1, 1)  # of the users of a round, as real ones are; 58 records


def clip(case: Case, sizes: tuple[int, ...] | None) -> None:
    rows = case.batch["labels"].size(0)
    sums = case.engine.empty_sum()
    case.engine.add_clipped_sum(sums, lambda: case.losses(case.batch), rows, None if sizes is None else Units(sizes))
    sums.result()


def in_parts(case: Case) -> None:
    """One user whose rows do not fit: two halves."""
    rows = case.batch["labels"].size(0)
    halves = [{k: v[part] for k, v in case.batch.items()} for part in (slice(0, rows // 2), slice(rows // 2, rows))]
    sums = case.engine.empty_sum()
    total = case.engine.gradient_of([lambda half=half: case.losses(half) for half in halves])
    case.engine.add_clipped(sums, {name: g.unsqueeze(0) for name, g in total.items()})
    sums.result()


def whole(case: Case, batch: LogicalBatch) -> None:
    """All physical batches of a round."""
    sums = case.engine.empty_sum()
    for some in batch.physical(case.batch["labels"].size(0), collate):
        add_batch(sums, case.engine, case.losses, some, sums_users=isinstance(batch, UserBatch))
    sums.result()


def collate(records: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {name: torch.stack([record[name] for record in records]) for name in records[0]}


def clipping(name: str, finetuning: str, repetitions: int) -> list[dict[str, Any]]:
    case = Case(name, finetuning, "cpu", bf16=False)
    rows = case.batch["labels"].size(0)
    ways: dict[str, Any] = {f"users of {m} rows": (m,) * (rows // m) for m in (2, 4, 8) if rows % m == 0}
    found = []
    records = [{k: v[i % rows] for k, v in case.batch.items()} for i in range(sum(SIZES))]
    round_of_users, round_of_records = UserBatch(records, 1, SIZES, None), LogicalBatch(records, 1)
    for label, sizes in {**ways, "one user in two parts": None, f"a round of {len(SIZES)} users": SIZES}.items():
        if sizes is SIZES:
            run, plain = (lambda: whole(case, round_of_users)), (lambda: whole(case, round_of_records))
        else:
            run = (lambda: in_parts(case)) if sizes is None else (lambda sizes=sizes: clip(case, sizes))
            plain = lambda: clip(case, None)  # noqa: E731
        pairs = [(seconds(case, run), seconds(case, plain)) for _ in range(repetitions + 1)][1:]
        found.append(
            {
                "model": name, "finetuning": finetuning, "way": label, "rows": rows,
                "records_ms": 1e3 * statistics.median(r for _, r in pairs),
                "ratio": statistics.median(u / r for u, r in pairs),
            }
        )  # fmt: skip
        print(found[-1], flush=True)
    return found


def local(name: str, repetitions: int, num_users: int, records: int, tokens: int) -> dict[str, Any]:
    case, rng = Case(name, "lora", "cpu", bf16=False), np.random.default_rng(0)
    vocabulary, is_causal = case.model.config.vocab_size, "gpt2" in name
    rows = [
        {"input_ids": rng.integers(5, vocabulary, tokens).tolist(), "label": i % 2} for i in range(num_users * records)
    ]

    def collate_rows(some: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        ids = torch.tensor([row["input_ids"] for row in some])
        labels = ids if is_causal else torch.tensor([row["label"] for row in some])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}

    training = LocalTraining(learning_rate=0.01, batch_size=4)

    def round_of() -> None:
        sums = case.engine.empty_sum()
        seeds = list(range(num_users))
        batch = LocalUserBatch(rows, 1, [records] * num_users, seeds, training)
        for users in batch.physical(records, collate_rows):
            users.add_to(sums, case.engine, case.losses)
        sums.result()

    taken = [seconds(case, round_of) for _ in range(repetitions + 1)][1:]
    sizes = {"users": num_users, "records": records, "tokens": tokens}
    found = {"model": name, **sizes, "users_per_second": num_users / statistics.median(taken)}
    print(found, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["roberta-768x6", "gpt2-768x6"])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    models = [(name, finetuning) for name in options.models for finetuning in ("full", "lora")]
    steps = [row for model in models for row in clipping(*model, options.repetitions)]
    rounds = [local(name, options.repetitions, 8, 8, 16) for name in ("demo", "gpt2-768x6")]
    if options.output is not None:
        about = {"torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.machine()}
        numbers = {"about": about, "clipping": steps, "local": rounds}
        options.output.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
