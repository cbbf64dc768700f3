"""The page of the GPU queue: a table of what became of each item, and tables of what they measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gpu_items import Item

Record = dict[str, Any]
STEPS = (
    "| model | tokens | finetuning | way | records of a step (physical batch) | ms | records/s | to stock | to compiled stock "
    "| TFLOP/s | MFU | MiB |\n|---|---|---|---|---|---|---|---|---|---|---|---|"
)
NOISE = "| model | finetuning | parameters | ms | normals/s |\n|---|---|---|---|---|"
CLIPPING = (
    "| model | tokens | finetuning | precision | way | batch | ms | to stock |\n|---|---|---|---|---|---|---|---|"
)
MEMORY = (
    "| coordinates | bands | way | block | s per step, mean of a run | kept, MiB | normals per step |\n"
    "|---|---|---|---|---|---|---|"
)


def page(items: Sequence[Item], found: dict[str, Record], about: Record) -> str:
    """The whole page.

    Args:
        items: the queue, in its order.
        found: results by item; what is not in there waits.
        about: device, versions, commit and digest of the code.
    """
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items() if version)
    head = f"{about['device']}, {versions}, commit {about['commit']}, code {about['code']}"
    status = ["| item | status | seconds | |", "|---|---|---|---|"]
    for item in items:
        record = found.get(item.name, {"status": "waits", "seconds": 0.0, "reason": ""})
        status.append(f"| {item.name} | {record['status']} | {record['seconds']:.0f} | {note(record)} |")
    measured = [record["result"] for record in found.values() if isinstance(record.get("result"), dict)]
    tables = [
        ("Whole steps, all in: clipping, noise and AdamW", STEPS, _of_each(measured, "steps", step_lines)),
        ("Noise", NOISE, [noise_line(row) for row in _rows(measured, "noise")]),
        ("Correlated noise: time and memory", MEMORY, [memory_line(row) for row in _rows(measured, "correlated")]),
        ("Clipping alone, without noise and optimizer", CLIPPING, _of_each(measured, "rows", clipping_lines)),
    ]
    parts = ["# The GPU queue", head, "\n".join(status)]
    parts += [f"## {title}\n\n" + "\n".join([top, *lines]) for title, top, lines in tables if lines]
    return "\n\n".join(parts) + "\n"


def note(record: Record) -> str:
    """One phrase on a result: its reason, its tests, or its metrics."""
    result = record.get("result")
    if record["reason"] or not isinstance(result, dict):
        return str(record["reason"])
    if "failures" in result:
        passed = result["tests"] - result["failures"] - result["errors"] - result["skipped"]
        return f"{passed} passed, {result['failures'] + result['errors']} failed, {result['skipped']} skipped"
    if "metrics" in result:
        metrics = {name: value for name, value in result["metrics"].items() if isinstance(value, float)}
        said = ", ".join(f"{name.removeprefix('eval_')} {value:.4g}" for name, value in metrics.items())
        plan = (
            f"epsilon {result['epsilon']:.3g}, {result['steps']} steps of {result['batch']}"
            if "epsilon" in result
            else "stock"
        )
        return f"{plan}: {said}"
    return ""


def _rows(measured: list[Record], name: str) -> list[Record]:
    found = [result.get(name) for result in measured]
    return [row for rows in found if isinstance(rows, list) for row in rows]


def _of_each(measured: list[Record], name: str, lines: Callable[[list[Record]], list[str]]) -> list[str]:
    """Table rows item by item: a ratio of steps that were not interleaved in one process is none."""
    return [line for result in measured for line in lines(_rows([result], name))]


def step_lines(rows: list[Record]) -> list[str]:
    """Table rows of whole steps; ratios are of throughputs, within one model, batch and item."""
    lines = []
    for row in rows:
        same = ("shape", "tokens", "finetuning", "precision", "batch", "records")
        took = {r["way"]: r["ms"] for r in rows if all(r[name] == row[name] for name in same)}
        to = [f"{took[way] / row['ms']:.2f}" if way in took else "-" for way in ("stock", "stock_compiled")]
        mfu = "unknown" if row["mfu"] is None else f"{row['mfu']:.1%}"
        lines.append(
            f"| {row['shape']} | {row['tokens']} | {row['finetuning']}, {row['precision']} | {row['way']} "
            f"| {row['records']} ({row['batch']}) | {row['ms']:.1f} | {1e3 * row['records'] / row['ms']:.0f} "
            f"| {to[0]} | {to[1]} | {row['tflops']:.3g} | {mfu} | {row['mib']:.0f} |"
        )
    return lines


def noise_line(row: Record) -> str:
    """Table row of the noise of one model."""
    return (
        f"| {row['shape']} | {row['finetuning']} | {row['parameters'] / 1e6:.1f} million "
        f"| {row['ms']:.2f} | {row['normals_per_s']:.3g} |"
    )


def memory_line(row: Record) -> str:
    """Table row of one way to make correlated noise."""
    return (
        f"| {row['coordinates'] / 1e6:g} million | {row['bands']} | {row['way']} | {row['block']} "
        f"| {row['seconds']:.3g} | {row['kept_mib']:.1f} | {row['draws']:.2f} |"
    )


def clipping_lines(rows: list[Record]) -> list[str]:
    """Table rows of clipping alone; ratios are of throughputs at one physical batch."""
    lines = []
    for row in rows:
        same = ("shape", "tokens", "finetuning", "precision", "batch")
        took = {r["way"]: r["ms"] for r in rows if all(r[name] == row[name] for name in same)}
        ratio = f"{took['stock'] / row['ms']:.2f}" if "stock" in took else "-"
        lines.append(
            f"| {row['shape']} | {row['tokens']} | {row['finetuning']} | {row['precision']} | {row['way']} "
            f"| {row['batch']} | {row['ms']:.1f} | {ratio} |"
        )
    return lines
