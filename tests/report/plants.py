"""Secrets planted in a folder, each in a container or spelling of its own, for the release scan to find.

python -m tests.report.plants             counts what is found, and lists what is missed
python -m tests.report.plants --write     writes the table of docs/reliability.md
"""

from __future__ import annotations

import base64
import dataclasses
import gzip
import io
import json
import os
import pickle
import struct
import sys
import tempfile
import textwrap
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- plants: begin -->", "<!-- plants: end -->"

RECORDS = (
    "Maria Keller was admitted on the ninth of March with chest pain, and left against advice the next morning.",
    "The tenant in flat 14 still owes us for the broken boiler; call his sister in Leeds if he does not pay.",
    "Our bid for the harbour tender is 4.2 million below what Olsen thinks, so nobody mentions the dredging.",
    "She asked me never to tell her brother where the letters are, and I hid them under the green stairs.",
)
USERS = ("m.keller.1987", "olsen_harbour", "tenant-flat-14", "grey.heron.22")


@dataclasses.dataclass(frozen=True)
class Secrets:
    """What a run keeps to itself: fresh in every case."""

    root: bytes = dataclasses.field(default_factory=lambda: os.urandom(32))
    noise_key: bytes = dataclasses.field(default_factory=lambda: os.urandom(32))
    sampling_key: bytes = dataclasses.field(default_factory=lambda: os.urandom(32))
    data_mark: bytes = dataclasses.field(default_factory=lambda: os.urandom(16))
    noise: torch.Tensor = dataclasses.field(default_factory=lambda: torch.randn(4096))
    token_ids: np.ndarray = dataclasses.field(
        default_factory=lambda: np.random.default_rng().integers(3, 30_000, size=(4, 48))
    )

    def known(self) -> list[bytes]:
        """The byte strings that the scan is given: keys, mark of the data, first bytes of the noise buffer."""
        return [self.root, self.noise_key, self.sampling_key, self.data_mark, self.noise[:16].numpy().tobytes()]


@dataclasses.dataclass(frozen=True)
class Plant:
    """One way to leave a secret in a folder.

    Attributes:
        name: what is planted, and in what.
        write: writes it below a folder.
        promised: whether the documents say that it is found.
    """

    name: str
    write: Callable[[Path, Secrets], Any]
    promised: bool = True


PLANTS: list[Plant] = []
OWN: list[Plant] = []


def plant(to: list[Plant], name: str, *, promised: bool = True) -> Callable[[Callable], Callable]:
    def add(write: Callable[[Path, Secrets], Any]) -> Callable:
        to.append(Plant(name, write, promised))
        return write

    return add


def _json(path: Path, content: Any, **options: Any) -> None:
    path.write_text(json.dumps(content, **options), encoding="utf-8")


def _as_words(key: bytes, width: int) -> list[int]:
    return [int.from_bytes(key[i : i + width], "little") for i in range(0, len(key), width)]


def _optimizer(folder: Path, **more: Any) -> None:
    adam = {"step": torch.tensor(3.0), "exp_avg": torch.randn(64, 64), "exp_avg_sq": torch.rand(64, 64)}
    torch.save({"state": {0: adam}, "param_groups": [{"lr": 1e-3, "params": [0]}], **more}, folder / "optimizer.pt")


def _event(tag: str, value: float) -> bytes:
    """A scalar as in the protobuf of a TensorBoard event: field 1 the tag, field 2 the float."""
    return b"\x0a" + bytes([len(tag)]) + tag.encode() + b"\x15" + struct.pack("<f", value)


def _zip(path: Path, **members: bytes) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def _token(prefix: str, length: int) -> str:
    """A credential of the right shape that nobody issued."""
    letters = "abcdefghijkmnopqrstuvwxyzABCDEFGHJKLMNPQRSTUVWXYZ23456789"
    return prefix + "".join(letters[b % len(letters)] for b in os.urandom(length))


# --- the 27 of the attack: every secret of the library, in every container a run writes ---

for _name, _write in {
    "root key, raw bytes in a file": lambda d, s: (d / "extra.bin").write_bytes(os.urandom(999) + s.root + b"\0" * 99),
    "root key, hexadecimal in a log": lambda d, s: (d / "run.log").write_text(f"INFO key={s.root.hex()} ok\n"),
    "noise key, base64 in JSON": lambda d, s: _json(d / "x.json", {"k": base64.b64encode(s.noise_key).decode()}),
    "sampling key, JSON list": lambda d, s: _json(d / "x.json", {"k": list(s.sampling_key)}),
    "sampling key, indented JSON list": lambda d, s: _json(d / "config.json", {"k": list(s.sampling_key)}, indent=2),
    "root key, bytes in optimizer.pt": lambda d, s: _optimizer(d, key=s.root),
    "root key, list in optimizer.pt": lambda d, s: _optimizer(d, key=list(s.root)),
    "noise key, int64 tensor in optimizer.pt": lambda d, s: _optimizer(d, key=torch.tensor(list(s.noise_key))),
    "noise key, uint8 tensor in .pt": lambda d, s: torch.save(
        {"k": torch.tensor(list(s.noise_key), dtype=torch.uint8)}, d / "state.pt"
    ),
    "noise key, uint8 tensor in safetensors": lambda d, s: save_file(
        {"w": torch.randn(9, 9), "k": torch.tensor(list(s.noise_key), dtype=torch.uint8)}, d / "model.safetensors"
    ),
    "noise key, int64 tensor in safetensors": lambda d, s: save_file(
        {"w": torch.randn(9, 9), "k": torch.tensor(list(s.noise_key))}, d / "model.safetensors"
    ),
    "root key, header of safetensors": lambda d, s: save_file(
        {"w": torch.randn(9, 9)}, d / "model.safetensors", metadata={"note": s.root.hex()}
    ),
    "root key, compressed .npz": lambda d, s: np.savez_compressed(
        d / "a.npz", w=np.zeros(500), k=np.frombuffer(s.root, np.uint8)
    ),
    "root key, hexadecimal in a zip": lambda d, s: _zip(d / "logs.zip", **{"a/run.log": s.root.hex().encode() * 3}),
    "root key, hexadecimal in a gzip": lambda d, s: (d / "run.log.gz").write_bytes(
        gzip.compress(b"line\n" * 99 + s.root.hex().encode())
    ),
    "noise buffer in optimizer.pt": lambda d, s: _optimizer(d, buffer=s.noise.clone()),
    "noise buffer in safetensors": lambda d, s: save_file(
        {"w": torch.randn(9, 9), "z": s.noise.clone()}, d / "x.safetensors"
    ),
    "train_loss in metrics.json": lambda d, s: _json(d / "metrics.json", {"epoch": 1.0, "train_loss": 0.693}),
    "loss in trainer_state.json": lambda d, s: _json(
        d / "trainer_state.json", {"log_history": [{"loss": 0.693, "step": 1}]}
    ),
    "loss in a text log": lambda d, s: (d / "train.log").write_text("{'loss': 0.6931, 'learning_rate': 1e-05}\n"),
    "loss in TensorBoard events": lambda d, s: (d / "events.out.tfevents.1.h").write_bytes(_event("train/loss", 0.69)),
    "hub token in config.json": lambda d, s: _json(d / "config.json", {"hub": _token("hf_", 34)}),
    "AWS key in config.json": lambda d, s: _json(d / "config.json", {"bucket_key": "AKIA" + "IOSFODNN7ABCDEFG"}),
    "GitHub token in the model card": lambda d, s: (d / "README.md").write_text(f"Clone with {_token('ghp_', 36)}.\n"),
    "private key (PEM) in a file": lambda d, s: (d / "id").write_text(
        "-----BEGIN " + f"PRIVATE KEY-----\n{base64.b64encode(os.urandom(48)).decode()}\n-----END PRIVATE KEY-----\n"
    ),
    "training text in the model card": lambda d, s: (d / "README.md").write_text(
        f"# Model\n\nExample input:\n\n> {RECORDS[0]}\n"
    ),
    "training text in generation samples": lambda d, s: _json(
        d / "samples.json", [{"prompt": RECORDS[1], "text": "no"}], indent=1
    ),
}.items():
    PLANTS.append(Plant(_name, _write))

# --- our own ---

for _name, _write in {
    "OpenAI key in .env": lambda d, s: (d / ".env").write_text(f"OPENAI_API_KEY={_token('sk-proj-', 74)}\n"),
    "hub token in a field of a pickle": lambda d, s: torch.save({"hub": _token("hf_", 34)}, d / "callback.pt"),
    "record counts in JSON lines": lambda d, s: (d / "m.jsonl").write_text(
        '{"step": 1}\n{"step": 2, "num_records": 31}\n'
    ),
    "batch sizes in JSON": lambda d, s: _json(d / "stats.json", {"logical_batch_sizes": [31, 29, 40]}),
    "clip fraction in YAML": lambda d, s: (d / "m.yaml").write_text("epoch: 1\nunprivatized_clip_fraction: 0.25\n"),
    "gradient norms of records in CSV": lambda d, s: (d / "norms.csv").write_text(
        "step,record_norms\n1,0.25\n2,0.75\n"
    ),
    "un-noised sums in .pt": lambda d, s: torch.save({"clipped_sums": {"w": torch.randn(9)}}, d / "sums.pt"),
    "exact loss in a pickle": lambda d, s: (d / "result.pkl").write_bytes(pickle.dumps({"train_loss": 0.25})),
    "mark of the data in JSON": lambda d, s: _json(d / "run.json", {"digest": s.data_mark.hex()}),
    "ids of users in JSON": lambda d, s: _json(d / "users.json", {"most_active": list(USERS[:3])}),
    "token ids of a record, JSON list": lambda d, s: _json(d / "batch.json", {"ids": s.token_ids[1].tolist()}, indent=1),
    "token ids of a batch, tensor in .pt": lambda d, s: torch.save(
        {"input_ids": torch.from_numpy(s.token_ids)}, d / "batch.pt"
    ),
    "training text in a tokenizer": lambda d, s: _json(
        d / "tokenizer.json", {"added_tokens": [{"id": 7, "content": RECORDS[2]}], "model": {"vocab": {"a": 0}}}
    ),
    "training text, other case and spaces, in a gzip": lambda d, s: (d / "log.gz").write_bytes(
        gzip.compress("\n   ".join(RECORDS[3].upper().split()).encode())
    ),
    "key, Python's spelling of bytes in a log": lambda d, s: (d / "a.log").write_text(f"chain root={s.root!r}\n"),
    "key, one decimal number": lambda d, s: _json(d / "a.json", {"seed": int.from_bytes(s.root, "big")}),
    "key, hexadecimal with colons": lambda d, s: (d / "a.txt").write_text(s.root.hex(":")),
    "key, base64 in lines of 20": lambda d, s: (d / "a.txt").write_text(
        "\n".join(textwrap.wrap(base64.b64encode(s.root).decode(), 20))
    ),
    "key, list of signed bytes": lambda d, s: _json(
        d / "a.json", np.frombuffer(s.root, np.int8).tolist(), indent=4
    ),
    "key, list of eight 32-bit words": lambda d, s: _json(d / "a.json", {"state": _as_words(s.root, 4)}),
    "key, float32 tensor in .pt": lambda d, s: torch.save(torch.tensor(list(s.root)).float(), d / "a.pt"),
    "key, int64 array in .npy": lambda d, s: np.save(d / "a.npy", np.array(list(s.root))),
    "key, zip inside a zip": lambda d, s: _zip(d / "a.zip", inner=_zipped(s.root)),
    "key, pickle of protocol 0": lambda d, s: (d / "a.pkl").write_bytes(pickle.dumps({"k": s.root}, protocol=0)),
    "key, torch format without zip": lambda d, s: torch.save(
        {"k": list(s.root)}, d / "a.bin", _use_new_zipfile_serialization=False
    ),
}.items():  # fmt: skip
    OWN.append(Plant(_name, _write))

# --- what is known not to be found, and documented ---

for _name, _write in {
    "key, base85": lambda d, s: (d / "a.txt").write_bytes(base64.b85encode(s.root)),
    "key, its halves in two files": lambda d, s: [
        (d / f"{i}.txt").write_text(s.root[16 * i : 16 * i + 15].hex()) for i in range(2)
    ],
    "key, each byte plus one": lambda d, s: (d / "a.bin").write_bytes(bytes((b + 1) % 256 for b in s.root)),
    "training text, every other word": lambda d, s: (d / "a.txt").write_text(" ".join(RECORDS[0].split()[::2])),
    "noise buffer, rounded to bfloat16": lambda d, s: torch.save(s.noise.bfloat16(), d / "a.pt"),
}.items():
    OWN.append(Plant(_name, _write, promised=False))


def _zipped(key: bytes) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("deep/notes.txt", key.hex() * 4)
    return content.getvalue()


def is_found(one: Plant, folder: Path) -> bool:
    """Plant it in a folder and scan that."""
    from hf_dpopt.report import release_scan

    secrets = Secrets()
    one.write(folder, secrets)
    options: dict[str, Any] = {}
    if hasattr(release_scan, "TrainingRecords"):
        options["training"] = release_scan.TrainingRecords(
            lambda: iter([release_scan.Block(list(RECORDS), list(secrets.token_ids))]), users=USERS
        )
    return bool(release_scan.scan_for_secrets(folder, secrets.known(), **options))


def results() -> Iterator[tuple[str, Plant, bool]]:
    """Part of the list, plant, and whether it is found; one after the other, each in a folder of its own."""
    for part, some in (("attack", PLANTS), ("own", OWN)):
        for one in some:
            with tempfile.TemporaryDirectory() as folder:
                yield part, one, is_found(one, Path(folder))


def table(rows: list[tuple[str, Plant, bool]]) -> str:
    """The results as Markdown."""
    lines = ["| # | planted | from | found |", "|---|---|---|---|"]
    for number, (part, one, found) in enumerate(rows, 1):
        said = "yes" if found else "**no**" if one.promised else "no, and not promised"
        lines.append(f"| {number} | {one.name} | {part} | {said} |")
    return "\n".join(lines)


def main() -> None:
    rows = list(results())
    if "--write" in sys.argv:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    promised = [(part, one, found) for part, one, found in rows if one.promised]
    for part in ("attack", "own"):
        of_part = [found for p, _, found in promised if p == part]
        print(f"{part}: {sum(of_part)} of {len(of_part)} found")
    print("missed:", *(f"  {one.name}" for _, one, found in promised if not found), sep="\n")
    print("not promised, yet found:", *(f"  {one.name}" for _, one, found in rows if found and not one.promised))


if __name__ == "__main__":
    main()
