"""Parts of the release scan on their own: the search for keys, credentials, training text, the marker of noise."""

from __future__ import annotations

import base64
import json
import os
import random
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.huggingface import training_text as reader
from hf_dpopt.huggingface.training_text import training_records
from hf_dpopt.report.release_scan import Block, ReleaseScan, TrainingRecords, scan_for_secrets
from hf_dpopt.report.scan import credentials, training_text
from hf_dpopt.report.scan.needles import Needles
from hf_dpopt.run.noise_marker import noise_marker
from tests import tiny
from tests.report.plants import RECORDS


@pytest.mark.parametrize("length", [16, 17, 31, 32, 64])
def test_a_key_is_found_at_every_place_and_no_other_is(length: int) -> None:
    key = os.urandom(length)
    needles = Needles([os.urandom(64), key, os.urandom(length)])
    for before in range(2 * length + 8):
        data = os.urandom(before) + key + os.urandom(random.randrange(80))
        assert needles.in_bytes(data), before
        assert not needles.in_bytes(data.replace(key, key[:-1] + bytes([key[-1] ^ 1])))


def test_a_key_that_looks_like_the_data_is_found() -> None:
    """Zeros make a candidate of every place; the search falls back to looking for the needle itself."""
    key = bytes(28) + os.urandom(4)
    assert Needles([key]).in_bytes(bytes(2_000_000) + key + bytes(99))
    assert not Needles([key]).in_bytes(bytes(2_000_000))


@pytest.mark.parametrize("indent", [None, 0, 2, "\t"])
@pytest.mark.parametrize("values", ["bytes", "signed", "floats", "words"])
def test_lists_in_every_layout(indent: int | str | None, values: str) -> None:
    key = os.urandom(32)
    array = np.frombuffer(key, {"signed": np.int8, "words": "<u8"}.get(values, np.uint8))
    text = json.dumps({"k": (array.astype(float) if values == "floats" else array).tolist()}, indent=indent).encode()
    assert Needles([key]).in_text(text) and not Needles([os.urandom(32)]).in_text(text)


TOKENS = {
    "a Hugging Face token": "hf_{}",
    "a GitHub token": "ghp_{}",
    "a GitLab token": "glpat-{}",
    "an OpenAI or Anthropic key": "sk-ant-api03-{}{}",
    "an npm token": "npm_{}",
    "a Stripe key": "sk_live_{}",
    "a password in an address": "postgres://me:{}@db.example.org",
    "api_key": '"api_key": "{}"',
    "a JSON web token": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.{}",
}


@pytest.mark.parametrize("kind", TOKENS)
def test_credentials_by_their_frame(kind: str) -> None:
    letters = base64.b32encode(os.urandom(40)).decode()[:36]
    assert kind in credentials.find_credentials(f"a = {TOKENS[kind].format(letters, letters)} .".encode())
    assert kind not in credentials.find_credentials(TOKENS[kind].format("x" * 8, "").encode()) or kind == "api_key"


def test_the_detector_that_may_be_installed() -> None:
    """Its patterns are used, its network is not: verification would send a token to its issuer."""
    pytest.importorskip("detect_secrets")
    assert len(credentials._of_detector()) >= 10
    assert credentials.find_credentials(b"SG." + b"aB3" * 7 + b"x." + b"dE5" * 14 + b"f")


# --- training text ---


def records_of(*texts: str) -> TrainingRecords:
    return TrainingRecords(lambda: iter([Block(list(texts))]))


def compared(text: str, *records: str) -> bool:
    files = training_text.FileTexts()
    files.add_text("a", text)
    return bool(files) and bool(files.compare(records_of(*records)))


def test_the_law_of_finding() -> None:
    """51 letters in a row of a record are found wherever they stand; 47 are too few, whatever stands around them."""
    letters = "".join(random.choices("abcdefghij", k=400))
    for start in range(0, 300, 7):
        assert compared("-- " + letters[start : start + training_text.ENOUGH] + " !", letters)
        assert not compared("-- " + letters[start : start + training_text.ENOUGH - 4] + " !", letters)
    short = letters[: training_text.SHORTEST]
    assert compared(f"x {short} y", short) and not compared(short, short[:-1])


def test_a_template_is_no_training_text() -> None:
    """What many records share is left out; a phrase of one alone is not."""
    template = "You are a helpful assistant who answers every question in one short and polite sentence. "
    records = [template + f"Question {i}: {secrets.token_hex(30)}" for i in range(50)]
    assert not compared(template, *records)
    assert compared(records[7], *records)


def test_text_of_other_alphabets_and_escapes() -> None:
    record = "Пациентка отказалась от лечения и уехала к сестре в Воронеж девятого марта."
    assert compared(json.dumps({"a": record}), record) and compared(record.upper(), record)


def test_ids_that_are_no_text() -> None:
    files = training_text.FileTexts()
    for ids in (np.arange(4000), np.zeros(4000, int), np.arange(4000) % 2, np.repeat([5, 9], 2000)):
        files.add_ids("a", ids)
    assert not files


@pytest.mark.parametrize("kind", ["list", "arrow", "tensors"])
def test_records_of_a_training_set(kind: str, tmp_path: Path) -> None:
    """Rows with ids alone: the ids in a file are found, and with a tokenizer the text that they stand for."""
    rows = [{"input_ids": np.random.default_rng(i).integers(20, 99, 30).tolist(), "label": 1} for i in range(40)]
    dataset: object = rows
    if kind == "arrow":
        dataset = pytest.importorskip("datasets").Dataset.from_list(rows)
    elif kind == "tensors":
        dataset = [{"input_ids": torch.tensor(row["input_ids"])} for row in rows]

    class Tokenizer:
        def batch_decode(self, ids: list[list[int]], **_: object) -> list[str]:
            return [" ".join(f"word{i}" for i in one) for one in ids]

    (tmp_path / "ids.json").write_text(json.dumps(rows[13]["input_ids"]))
    (tmp_path / "text.txt").write_text(" ".join(f"word{i}" for i in rows[29]["input_ids"]))
    found = scan_for_secrets(tmp_path, training=training_records(dataset, Tokenizer()))
    assert [finding.path for finding in found] == ["ids.json", "text.txt"]
    (found,) = scan_for_secrets(tmp_path, training=training_records(dataset))
    assert found.path == "ids.json"


def test_reading_records_leaves_the_generators_alone() -> None:
    class Augmenting(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> dict[str, object]:
            return {"text": str(random.random()), "x": torch.randn(1), "y": np.random.rand()}

    random.seed(1), torch.manual_seed(1), np.random.seed(1)
    expected = random.random(), torch.rand(1).item(), np.random.rand()
    random.seed(1), torch.manual_seed(1), np.random.seed(1)
    records = training_records(Augmenting())
    assert records is not None and len(list(records.blocks())) == 1
    assert (random.random(), torch.rand(1).item(), np.random.rand()) == expected


def test_the_budget_ends_the_reading_of_slow_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transform of 5 ms a row: 512 rows at once would take 2.6 s, so the budget is looked at in between."""
    datasets = pytest.importorskip("datasets")
    served: list[str] = []

    def slow(rows: dict[str, list[str]]) -> dict[str, list[str]]:
        time.sleep(0.005 * len(rows["text"]))
        served.extend(rows["text"])
        return rows

    monkeypatch.setattr(training_text, "MAX_SECONDS", 0.1)
    dataset = datasets.Dataset.from_dict({"text": [secrets.token_hex(30) for _ in range(2000)]}).with_transform(slow)
    (tmp_path / "a.txt").write_text("no record, but a text that is long enough to be compared with some of them")
    began = time.monotonic()
    assert scan_for_secrets(tmp_path, training=training_records(dataset)) == []
    assert 0 < len(served) <= 64 and time.monotonic() - began < 1.5


def test_every_record_is_read_once_in_growing_pieces() -> None:
    rows = [{"text": str(i)} for i in range(2000)]
    dataset = pytest.importorskip("datasets").Dataset.from_list(rows)
    records = training_records(dataset)
    assert records is not None
    blocks = [block.texts for block in records.blocks()]
    assert sorted(text for texts in blocks for text in texts) == sorted(row["text"] for row in rows)
    assert len(blocks[0]) == 32 and max(map(len, blocks)) <= 512
    assert [reader._next_pace(32, seconds, 512) for seconds in (0.01, 0.1, 0.64, 9.0)] == [64, 32, 5, 1]
    assert reader._next_pace(512, 0.0, 512) == 512


def test_texts_are_compared_once_though_a_marker_changes(tmp_path: Path) -> None:
    """Of a noise state there is a new marker after every step; a new key is looked for in all texts nevertheless."""
    read: list[int] = []

    def blocks() -> Iterator[Block]:
        read.append(1)
        return iter([Block(list(RECORDS))])

    secret, later = os.urandom(32), os.urandom(64)
    (tmp_path / "notes.txt").write_text("a text that is long enough to be compared with records of training")
    (tmp_path / "old.txt").write_text(f"a text that holds bytes which only later are a secret: {later.hex()}")
    scan = ReleaseScan([secret], training=TrainingRecords(blocks))
    assert scan.findings(tmp_path) == [] and len(read) == 1
    for _ in range(3):
        scan = ReleaseScan([secret, os.urandom(64)], training=scan.training, earlier=scan)
        assert scan.findings(tmp_path) == [] and len(read) == 1
    scan = ReleaseScan([secret, later], training=scan.training, earlier=scan)
    (finding,) = scan.findings(tmp_path)
    assert finding.path == "old.txt" and len(read) == 1
    (tmp_path / "old.txt").write_text(f"> {RECORDS[1]}")
    (finding,) = scan.findings(tmp_path)
    assert finding.what == "text of a training record" and len(read) == 2


def test_a_push_of_training_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start of a run, and before a push; by the trainer's own records, without being asked."""
    pushed: list[str] = []
    monkeypatch.setattr("transformers.Trainer.push_to_hub", lambda self, *a, **k: pushed.append("pushed"))
    notes = [*RECORDS, *(secrets.token_hex(40) for _ in range(12))]
    rows = [{**row, "note": note} for row, note in zip(tiny.records(16), notes, strict=True)]
    trainer = tiny.trainer(tmp_path / "out", max_steps=1, train_dataset=rows)
    trainer.train()
    (tmp_path / "out" / "SAMPLES.md").write_text(f"> {RECORDS[2]}\n")
    with pytest.raises(DPConfigError, match=r"SAMPLES.md: text of a training record \(take it out of the file\)"):
        trainer.push_to_hub()
    assert not pushed
    (tmp_path / "out" / "SAMPLES.md").unlink()
    trainer.push_to_hub()
    assert pushed


# --- noise ---


def test_a_noise_state_has_one_marker(tmp_path: Path) -> None:
    state = {"step": 3, "buffers": {"a": [torch.zeros(99), torch.randn(99)], "b": [torch.randn(50, 50)] * 3}}
    torch.save(state, tmp_path / "a.noise")
    assert noise_marker(tmp_path / "a.noise") == [state["buffers"]["a"][1][:16].numpy().tobytes()]
    (tmp_path / "b.noise").write_bytes((tmp_path / "a.noise").read_bytes()[:200])
    assert noise_marker(tmp_path / "b.noise") == [] == noise_marker(tmp_path / "c.noise")
