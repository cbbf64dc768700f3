"""Thirty jobs and more, and what is advised for them: `python -m tests.plan.advice_table --write` writes advice.json.

A change of a rule changes rows of that file; they are read before they are committed.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from hf_dpopt.plan.advice import TrainingJob, advise

PATH = Path(__file__).with_name("advice.json")


def jobs() -> list[TrainingJob]:
    """SST-2, MNLI, MRPC and E2E as they are run; sizes, budgets and passes at which a rule could go wrong."""
    made = [
        TrainingJob(num_units=67_349, target_epsilon=epsilon, kind=kind)  # type: ignore[arg-type]
        for kind in ("lora", "full", "head")
        for epsilon in (0.5, 1.0, 3.0, 8.0)
    ]
    made += [TrainingJob(num_units=67_349, target_epsilon=8.0, passes=passes) for passes in (0.1, 1.0, 10.0, 50.0)]
    made += [
        TrainingJob(num_units=67_349, target_epsilon=8.0, kind="full", model_size=size)
        for size in (400_000, 125_000_000, 355_000_000)
    ]
    made += [
        TrainingJob(num_units=392_702, target_epsilon=8.0, passes=18.0, kind="full", model_size=125_000_000),
        TrainingJob(num_units=3_668, target_epsilon=8.0),
        TrainingJob(num_units=3_668, target_epsilon=8.0, passes=40.0),
    ]
    made += [
        TrainingJob(num_units=42_061, target_epsilon=epsilon, target_delta=1e-5, passes=10.0, kind=kind,  # type: ignore[arg-type]
            objective="generation", model_size=size)
        for kind, size, epsilon in (
            ("full", 5_300_000, 8.0), ("full", 5_300_000, 3.0), ("lora", 5_300_000, 8.0), ("full", 124_000_000, 8.0),
        )
    ]  # fmt: skip
    made += [TrainingJob(num_units=n, target_epsilon=8.0) for n in (1, 1_000, 1_000_000, 100_000_000)]
    made += [
        TrainingJob(
            num_units=n, target_epsilon=epsilon, target_delta=1e-5, passes=passes, has_trained_head=True
        )
        for n, epsilon, passes in (
            (67_349, 8.0, 0.75), (67_349, 8.0, 3.0), (67_349, 3.0, 0.75), (67_349, 1.0, 3.0), (3_668, 8.0, 8.0),
        )
    ]  # fmt: skip
    return made


def facts(job: TrainingJob) -> dict[str, Any]:
    """A job as plain values; of a trained head only where there is one."""
    values = dataclasses.asdict(job)
    return values if values.pop("has_trained_head") is False else {**values, "has_trained_head": True}


def row(job: TrainingJob) -> dict[str, Any]:
    """A job, and what matters of the advice."""
    advice = advise(job)
    outlook = advice.outlook
    return {
        "job": facts(job),
        "batch": advice.batch,
        "steps": outlook.num_steps,
        "learning_rate": advice.learning_rate,
        "noise_over_signal": float(f"{outlook.step_ratio:.2g}"),
        "useful_steps": float(f"{outlook.useful_steps:.2g}"),
        "verdict": outlook.verdict,
    }


def main() -> None:
    """Print the table, or write it."""
    rows = [row(job) for job in jobs()]
    if "--write" in sys.argv[1:]:
        PATH.write_text("[\n" + ",\n".join(json.dumps(r) for r in rows) + "\n]\n", encoding="utf-8")
    for r in rows:
        job = r["job"]
        print(
            f"{job['num_units']:11,} eps {job['target_epsilon']:<4g} passes {job['passes']:<4g} {job['kind']:5}"
            f"{job['objective']:15} {job['model_size'] / 1e6:6.3g}M {'head ' * job.get('has_trained_head', False):5}B {r['batch']:5} T {r['steps']:6} "
            f"lr {r['learning_rate']:<8g} noise {r['noise_over_signal']:<7g} useful {r['useful_steps']:<7g} {r['verdict']}"
        )


if __name__ == "__main__":
    main()
