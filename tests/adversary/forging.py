"""Ledgers as somebody who can write to `output_dir` alone can make them: any records, with the right hashes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

LEDGER = Path("privacy") / "ledger.jsonl"


def records_of(out: Path) -> list[dict[str, Any]]:
    """The records of the ledger in a folder, without their hashes."""
    lines = [json.loads(line) for line in (out / LEDGER).read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in ("prev", "sha256")} for line in lines]


def write(out: Path, records: list[dict[str, Any]]) -> None:
    """Write records as a ledger whose hashes fit, in place of the one that is there."""
    text, prev = "", "0" * 64
    for record in records:
        body = record | {"prev": prev}
        prev = hashlib.sha256(_canonical(body).encode()).hexdigest()
        text += _canonical(body | {"sha256": prev}) + "\n"
    path = out / LEDGER
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _canonical(body: dict[str, Any]) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"))
