"""The section of docs/reliability.md: the share that was killed, and a verdict on every mutant that was not."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from tests.mutants.places import AREAS
from tests.mutants.verdicts import VERDICTS, key_of

KILLED = ("killed", "timed out")
START, END = "<!-- mutants: python -m tests.mutants --table -->", "<!-- end of mutants -->"


def load(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The head and the rows of a file of results."""
    head, *rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return head, rows


def section(path: Path) -> str:
    """The table of the areas and the table of the survivors, as Markdown."""
    head, rows = load(path)
    ran = [row for row in rows if "kind" in row]
    versions = ", ".join(f"{name} {version}" for name, version in head["versions"].items())
    dates = sorted({row["date"] for row in ran})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}" if dates else "not yet"
    lines = [START, "", f"`{head['command']}`, {when}; {versions}.", ""]
    lines += [f"{_result(rows, ran)}", ""]
    lines += ["| area | sampled | run | killed | survived, same behaviour | survived, harmless | survived, matters |"]
    lines += ["|---|---:|---:|---:|---:|---:|---:|"]
    lines += [_area(area, rows) for area in AREAS]
    lines += [_area("all", rows), "", "Survivors:", ""]
    lines += ["| place | mutant | verdict | why |", "|---|---|---|---|"]
    lines += [_survivor(row) for row in ran if row["kind"] not in KILLED or key_of(row) in VERDICTS]
    return "\n".join([*lines, "", END]) + "\n"


def _result(rows: list[dict[str, Any]], ran: list[dict[str, Any]]) -> str:
    killed = sum(row["kind"] in KILLED for row in ran)
    first = sum(row["kind"] in KILLED and "was" not in row for row in ran)
    same = sum(row["kind"] not in KILLED and _verdict(row) == "same" for row in ran)
    share = f"{100 * killed / max(1, len(ran)):.1f} %"
    real = f"{100 * killed / max(1, len(ran) - same):.1f} %"
    return (
        f"**{len(ran)} of the {len(rows)} sampled mutants were run. {first} were killed in the first run, {killed} are "
        f"killed now: {share}, or {real} of those that behave otherwise than the package.**"
    )


def _verdict(row: dict[str, Any]) -> str:
    return VERDICTS.get(key_of(row), ("open", ""))[0]


def _area(area: str, rows: list[dict[str, Any]]) -> str:
    own = [row for row in rows if area in ("all", row["area"])]
    ran = [row for row in own if "kind" in row]
    killed = sum(row["kind"] in KILLED for row in ran)
    left = Counter(_verdict(row) for row in ran if row["kind"] not in KILLED)
    matters = left["matters"] + left["open"]
    return f"| {area} | {len(own)} | {len(ran)} | {killed} | {left['same']} | {left['harmless']} | {matters} |"


def _survivor(row: dict[str, Any]) -> str:
    verdict, why = VERDICTS.get(key_of(row), ("open", "not looked at yet"))
    if row["kind"] in KILLED:
        verdict += "; killed now"
    after = row["after"] or f"without `{row['text']}`"
    change = f"`{_cell(row['text'])}` → `{_cell(after)}`"
    return f"| `{row['file'].removeprefix('hf_dpopt/')}`, `{row['function'] or 'module'}` | {change} | {verdict} | {why} |"


def _cell(code: str) -> str:
    return " ".join(code.split()).replace("|", "\\|")
