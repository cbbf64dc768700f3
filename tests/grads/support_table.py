"""Writes docs/support.md from the models that the exactness tests run: `python -m tests.grads.support_table`.

Its last section is the scan's, `python -m tests.adversary.scan`, and stays.
"""

from __future__ import annotations

from pathlib import Path

from tests.adversary.scan import table as scan
from tests.grads.models import ADAPTERS, FAMILIES

TABLE = Path(__file__).resolve().parents[2] / "docs" / "support.md"
HEAD = """# What is supported

Written by `python -m tests.grads.support_table` from the models that `tests/grads/test_exactness.py` runs; a test keeps
the two together. *Exact*: the clipped sum equals one plain backward per record, for flat, per-layer and automatic
clipping, in float64 to 1e-10 and in float32 to 1e-5 (automatic: 5e-5), on padded batches.

| model | full finetuning | LoRA | what is special |
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

Refused, by name: AdaLoRA and initialisations that look at the data (un-noised gradients), trainable experts and routers of
mixtures (which tokens an expert sees depends on the other records), trainable token indices, DoRA on embeddings,
BatchNorm, fp16.

Any other layer that maps records to records runs through `hf_dpopt/grads/rules/fallback.py`: exact, one small backward
per record. Layers that only scale or shift tokens (RMSNorm of any class) are recognised by trying them, not by name.
"""


def support_table() -> str:
    families = "".join(f"| {f.label} | exact | exact | {f.why} |\n" for f in FAMILIES.values())
    adapters = "".join(f"| {a.label} | exact |\n" for a in ADAPTERS.values())
    return HEAD + families + ADAPTER_HEAD + adapters + TAIL


if __name__ == "__main__":
    TABLE.write_text(scan.with_section(support_table(), scan.read()), encoding="utf-8")
