"""Somebody who can write to `output_dir` forges its journal: a resume refuses it in words, or goes on."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from hf_dpopt import DPConfigError
from tests.adversary.test_forged_ledgers import NUM_STEPS, RAN, SAVED_AT, Scene, made, scene, train

__all__ = ["made", "scene"]  # fixtures


def _entry(chain: str, kind: str, step: int, tensors: Any = (), values: bytes = b"", **other: Any) -> bytes:
    """An entry with the right checksum."""
    header = {"chain": chain, "kind": kind, "step": step, "tensors": tensors, **other}
    body = json.dumps(header).encode()
    content = struct.pack("<4sI", b"DPJ1", len(body)) + body + values
    return content + hashlib.sha256(content).digest()


def _journal(scene: Scene) -> Path:
    (journal,) = (scene.out / "_journal").iterdir()
    return journal


@pytest.mark.parametrize(
    "shape", [["2", 3], "23", {"1": 2}, [1.5], [True], [10**30, 0], [2**62, 2**62, 0], [-1, -1], [[1]]]
)
def test_shapes_that_no_tensor_has_are_refused(scene, shape):
    chain, path = scene.chain["chain_id"], _journal(scene)
    base = _entry(chain, "base", SAVED_AT, base=f"{chain}:{SAVED_AT}")
    (scene.out / f"checkpoint-{RAN}" / "privacy_ledger.json").unlink()
    path.unlink()
    first, last = _entry(chain, "step", 3, [["weight", shape]], b"\0" * 24), _entry(chain, "step", 4)
    path.with_name(f"{chain}-{SAVED_AT:09d}-000.releases").write_bytes(base + first + last)
    with pytest.raises(DPConfigError, match="journal"):
        train(scene.out, scene.keys, stop=NUM_STEPS, resume=True)


def test_a_file_with_the_name_of_the_next_one_hinders_no_run(scene):
    journal = _journal(scene).parent
    for number in ("1x", "0", "000", "1²"):
        (journal / f"{scene.chain['chain_id']}-{RAN:09d}-{number}.releases").touch()
    made, again = train(scene.out, scene.keys, stop=NUM_STEPS, resume=True)
    assert sorted(again) == [RAN + 1, RAN + 2] and made.privacy_spent().num_steps == NUM_STEPS
