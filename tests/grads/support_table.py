"""Writes docs/support.md from the models that the exactness tests run: `python -m tests.grads.support_table`.

Its last section is the scan's, `python -m tests.adversary.scan`, and stays.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.adversary.scan import table as scan
from tests.grads.heads import HEADS
from tests.grads.models import ADAPTERS, ADAPTERS_RUN_WHOLE, FAMILIES

DOCS = Path(__file__).resolve().parents[2] / "docs"
TABLE, SCRIPTS = DOCS / "support.md", DOCS / "official_scripts.json"
HEAD = """# What is supported

Written by `python -m tests.grads.support_table` from the models that `tests/grads/test_exactness.py` runs; a test keeps
the two together. *Exact*: the clipped sum equals one plain backward per record, for flat, per-layer and automatic
clipping, in float64 to 1e-10 and in float32 to 1e-5 (automatic: 5e-5), on padded batches.

| model | full finetuning | LoRA | what is special |
|---|---|---|---|
"""
HEADS_HEAD = """
Other heads (`tests/grads/test_heads.py`): exact in float64 to 1e-10, with records and with several rows of a user or
document as the unit, and one record moves the sum by at most the clipping norm (1 + 1e-5). Any other head, and any loss:
[losses.md](losses.md).

| model and head | full finetuning | LoRA | what is special |
|---|---|---|---|
"""
ADAPTER_HEAD = """
| adapter (peft) | |
|---|---|
"""
TAIL = """
LoRA on quantised base weights (bitsandbytes: nf4, with or without double quantisation; int8 with
`llm_int8_threshold=0.0`) is exact to 1e-5 too: `tests/grads/test_quantised.py`. LLM.int8() with its default threshold is
refused: one record's outliers change how the others are computed. So are other quantisations, which were not checked.

Refused, by name: AdaLoRA, VeLoRA and initialisations that look at the data (un-noised gradients or activations), OSF and
CPT (hooks on gradients), Lily (its router averages over the batch), Shadow (its layers hand on the batch in one object),
PVeRA and Poly (they draw in a layer that runs a record at a time), AdaMSS with `use_asa`, aLoRA, trainable experts and routers of
mixtures (which tokens an expert sees depends on the other records), DoRA on embeddings, BatchNorm, fp16; dropout inside
a layer or adapter that runs a record at a time. Instead of a refused adapter use LoRA, DoRA or VeRA.

*A record at a time*: through `hf_dpopt/clipping/rules/fallback.py`, exact, with a second forward and a small backward of
the layer for each record. So runs any other layer that maps records to records, and a module with children that uses a
parameter itself (class tokens, positions, scales of layers); its children keep their own rules.
Layers that only scale or shift tokens (RMSNorm of any class) are recognised by trying them, not by name.
"""


SCRIPTS_HEAD = """
## The official scripts

The example scripts of transformers and TRL as they are, with the two names changed ([migrate.md](migrate.md)), run for
two steps on small local data and tiny models: `python -m tests.migration.official_scripts` writes
`docs/official_scripts.json`, and this table shows it. *Private and exact*: it ran to its end with `--target_epsilon 8`,
each row one record, and the self-check before the first step passed (the clipped sum equals a loop over single records).
*Another unit*: refused until the unit is named; *refused*: what it says is quoted. Each way out that is named was run.
Metrics stand in for those of the hub, and a few lines for torchvision where it is not installed. For want of packages
(albumentations, torchcodec, all of torchvision) these were not run: `run_semantic_segmentation.py`,
`run_object_detection.py`, `run_instance_segmentation.py`, `run_audio_classification.py`, `run_speech_recognition_*.py`,
`run_mae.py`, `run_clip.py`.

{versions}

| script | task | result | |
|---|---|---|---|
"""


def scripts_table(results: dict[str, Any]) -> str:
    """What became of the official scripts."""
    known = results["versions"]
    versions = (
        f"The scripts want transformers {known['scripts want transformers']} or later (SHA-256 of all of them: "
        f"`{known['scripts']}`); run with transformers {known['transformers']}, TRL {known['trl']}, datasets "
        f"{known['datasets']}."
    )
    return SCRIPTS_HEAD.format(versions=versions) + "".join(map(_script_row, results["scripts"].items()))


def _script_row(script: tuple[str, dict[str, Any]]) -> str:
    name, row = script
    ways = "; ".join(way["says"] for way in row["ways"])
    seen = row["as_it_is"].get("says", "").split(". ")[0] if not row["as_it_is"]["ran"] else ""
    about = "; ".join(part for part in (row["note"], seen and f'as it is: "{seen}"', ways) if part)
    return f"| `{name}.py` | {row['task']} | {row['result']} | {about} |\n"


def support_table() -> str:
    families = "".join(f"| {f.label} | exact | exact | {f.why} |\n" for f in FAMILIES.values())
    heads = "".join(f"| {h.label} | exact | exact | {h.why} |\n" for h in HEADS.values())
    adapters = "".join(f"| {a.label} | exact |\n" for a in ADAPTERS.values())
    adapters += "".join(f"| {a.label} | exact, a record at a time |\n" for a in ADAPTERS_RUN_WHOLE.values())
    scripts = scripts_table(json.loads(SCRIPTS.read_text(encoding="utf-8")))
    return HEAD + families + HEADS_HEAD + heads + ADAPTER_HEAD + adapters + TAIL + scripts


if __name__ == "__main__":
    TABLE.write_text(scan.with_section(support_table(), scan.read()), encoding="utf-8")
