"""What the scan found, as the section of docs/support.md that is written from docs/scan.json."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[3] / "docs"
RESULTS = DOCS / "scan.json"
PAGE = DOCS / "support.md"
BEGIN, END = "<!-- scan: begin -->\n", "<!-- scan: end -->\n"
EXACT, BREAKS, REFUSED, STOPPED, ERROR, NOT_RUNNABLE = "exact", "breaks", "refused", "stopped", "error", "not runnable"


def read() -> dict[str, Any]:
    """The committed results."""
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def write(found: dict[str, Any]) -> None:
    """Writes the results, a row per line, so that a new scan shows what has changed."""
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(found["rows"].items()))
    head = {name: value for name, value in found.items() if name not in ("rows", "without_labels")}
    names = json.dumps(sorted(found["without_labels"]))
    text = json.dumps(head, indent=1)[:-2] + f',\n "without_labels": {names},\n "rows": {{\n{rows}\n }}\n}}\n'
    json.loads(text)
    RESULTS.with_suffix(".new").write_text(text, encoding="utf-8")
    RESULTS.with_suffix(".new").replace(RESULTS)


def write_page(found: dict[str, Any]) -> None:
    """Puts the section into docs/support.md, in place of the one that is there."""
    PAGE.write_text(with_section(PAGE.read_text(encoding="utf-8"), found), encoding="utf-8")


def with_section(page: str, found: dict[str, Any] | None) -> str:
    """The page with the section of these results; None takes it away."""
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    return before + ("" if found is None else BEGIN + section(found) + END) + after


def verdict(row: dict[str, Any]) -> str:
    """Full finetuning where it runs, else LoRA: "exact", "LoRA", or why neither runs; what is wrong goes first."""
    tried = [row["verdict"], row.get("lora", {}).get("verdict")]
    if wrong := next((kind for kind in (BREAKS, STOPPED, ERROR) if kind in tried), None):
        return wrong
    return "LoRA" if tried[0] == REFUSED and tried[1] == EXACT else row["verdict"]


def why(row: dict[str, Any]) -> str:
    """The reason for the verdict."""
    by_lora = verdict(row) in (BREAKS, STOPPED, ERROR) and row["verdict"] != verdict(row)
    return "with LoRA: " + row["lora"]["reason"] if by_lora else row.get("reason", "")


def section(found: dict[str, Any]) -> str:
    """The section, in Markdown."""
    rows = found["rows"]
    by_verdict: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, row in sorted(rows.items()):
        by_verdict[verdict(row)][name] = row
    counts = {
        kind: len(by_verdict.get(kind, {})) for kind in (EXACT, "LoRA", BREAKS, REFUSED, STOPPED, ERROR, NOT_RUNNABLE)
    }
    parts = [
        "\n## Every model class of transformers\n",
        f"Written by `{found['command']}` ({_dates(rows)}; transformers {found['versions']['transformers']}, torch "
        f"{found['versions']['torch']}) from `docs/scan.json`, which holds a row for "
        f"each of the {len(rows)} classes "
        "behind an `AutoModelFor*` whose forward takes labels. Each is made tiny (random weights, dropout 0), given four "
        "records of unlike lengths, and trained by the real `DPTrainer` with forced draws: one step with all of them, "
        "then one without each. *Exact*: in float64 no record moved the clipped sum by more than a clipping norm "
        "(1 + 1e-5), with every record clipped. Classes that see and read were given text alone where that is enough; "
        "heads of pictures, sounds and choices a cross entropy as `per_example_loss_func`. A row says so, and whether "
        "float32 was needed (models that round to it inside).\n",
        _counts(counts),
        _names("Exact, full finetuning", by_verdict[EXACT]),
        _names("Exact with LoRA; full finetuning is refused", by_verdict["LoRA"]),
        _reasons("Why full finetuning is refused there", by_verdict["LoRA"]),
        _reasons("Refused, with and without LoRA, before a step was charged", by_verdict[REFUSED]),
        _reasons("One record moves the sum by more than a clipping norm", by_verdict[BREAKS]),
        _reasons("Refused in a step, which tells of the record in it", by_verdict[STOPPED]),
        _reasons("Errors that are no refusal, where the stock Trainer runs", by_verdict[ERROR]),
        _reasons("Not runnable here", by_verdict[NOT_RUNNABLE]),
    ]
    return "\n".join(part for part in parts if part)


def _dates(rows: dict[str, Any]) -> str:
    """How many rows were measured on which day."""
    found = Counter(row["date"] for row in rows.values())
    return ", ".join(f"{num} rows of {date}" for date, num in sorted(found.items()))


def _counts(counts: dict[str, int]) -> str:
    names = {
        EXACT: "exact, full finetuning", "LoRA": "exact with LoRA alone", REFUSED: "refused", NOT_RUNNABLE: "not runnable",
        BREAKS: "break the promise", STOPPED: "refused in a step", ERROR: "end in an error",
    }  # fmt: skip
    kept = {names[kind]: num for kind, num in counts.items() if num}
    return (
        "| " + " | ".join(kept) + " |\n|" + "---|" * len(kept) + "\n| " + " | ".join(map(str, kept.values())) + " |\n"
    )


def _names(title: str, rows: dict[str, Any]) -> str:
    if not rows:
        return ""
    by_head: dict[str, list[str]] = defaultdict(list)
    for name, row in rows.items():
        by_head[row["head"]].append(name)
    lines = [f"| {head} | {len(names)} | {', '.join(names)} |" for head, names in sorted(by_head.items())]
    return f"**{title}.**\n\n| head | | classes |\n|---|---|---|\n" + "\n".join(lines) + "\n"


def _reasons(title: str, rows: dict[str, Any]) -> str:
    if not rows:
        return ""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, row in rows.items():
        by_reason[plain(why(row), name)].append(name)
    ordered = sorted(by_reason.items(), key=lambda item: (-len(item[1]), item[0]))
    lines = [f"| {reason} | {len(names)} | {', '.join(names)} |" for reason, names in ordered]
    return f"**{title}.**\n\n| reason | | classes |\n|---|---|---|\n" + "\n".join(lines) + "\n"


def plain(reason: str, name: str) -> str:
    """The reason without what is particular to one class, so that equal reasons meet; safe in a table."""
    reason = reason.replace(name, "this class")
    reason = re.sub(r"\b[\w.]+ \((\w+)\) (normalises|looks)", r"a layer (\1) \2", reason)
    reason = re.sub(r"\b\w+(Model|Config|ForConditionalGeneration|PreTrainedModel)\b", "the model", reason)
    reason = re.sub(r"0x[0-9a-f]+|\d+(\.\d+)?(e[-+]\d+)?", "N", reason)
    return reason.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
