"""Whatever lies in the folder, the scan says one line about it: no crash, nothing executed, nothing followed out."""

from __future__ import annotations

import bz2
import io
import lzma
import os
import pickle
import random
import socket
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_dpopt.report.release_scan import scan_for_secrets
from hf_dpopt.report.scan import containers, pickles

KEY = os.urandom(32)


def _bomb(path: Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros", bytes(60_000_000))


def _nested(depth: int) -> bytes:
    content = KEY.hex().encode()
    for _ in range(depth):
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("inner", content)
        content = stream.getvalue()
    return content


def _overlapping(path: Path) -> None:
    """An archive whose directory names the same bytes a hundred times."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("a", bytes(10_000))
    data = stream.getvalue()
    start = data.index(b"PK\x01\x02")
    end = data.index(b"PK\x05\x06")
    entry = data[start:end]
    tail = bytearray(data[end:])
    tail[8:12] = (100).to_bytes(2, "little") * 2
    tail[12:16] = (100 * len(entry)).to_bytes(4, "little")
    path.write_bytes(data[:start] + entry * 100 + bytes(tail))


def _socket(path: Path) -> None:
    server = socket.socket(socket.AF_UNIX)
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's name may have a hundred bytes
    try:
        server.bind(path.name)
    finally:
        os.chdir(here)
        server.close()


# what lies there -> a word of the one line about it
STRANGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pipe": (lambda p: os.mkfifo(p), "neither a file nor a folder"),
    "a socket": (_socket, "neither a file nor a folder"),
    "a link to nothing": (lambda p: p.symlink_to("gone"), "ENOENT"),
    "a link to itself": (lambda p: p.symlink_to(p.name), "not checked"),
    "a link to a device": (lambda p: p.symlink_to("/dev/zero"), "not followed"),
    "a link out": (lambda p: p.symlink_to("/etc/hostname"), "not followed"),
    "a compressed bomb": (_bomb, "MiB compressed"),
    "archives too deep": (lambda p: p.write_bytes(_nested(9)), "deep"),
    "members that overlap": (_overlapping, "overlap"),
    "a torn archive": (lambda p: p.write_bytes(_nested(1)[:60]), "cannot be read"),
    "a damaged pickle": (lambda p: p.with_suffix(".pkl").write_bytes(b"\x80\x04\x95garbage"), "no pickle"),
    "a damaged array": (lambda p: p.write_bytes(b"\x93NUMPY\x09\x09"), "cannot be read"),
}


@pytest.mark.parametrize("name", STRANGE)
def test_one_line_about_what_cannot_be_read(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "MAX_DECOMPRESSED", 20_000_000)
    make, word = STRANGE[name]
    make(tmp_path / "strange")
    started = time.monotonic()
    (finding,) = scan_for_secrets(tmp_path, [KEY])
    assert word in finding.what and "\n" not in str(finding)
    assert time.monotonic() - started < 5


@pytest.mark.skipif(os.geteuid() == 0, reason="the administrator reads everything")
def test_a_file_without_permission(tmp_path: Path) -> None:
    (tmp_path / "a").touch(mode=0o000)
    (finding,) = scan_for_secrets(tmp_path, [KEY])
    assert "PermissionError" in finding.what


@pytest.mark.parametrize(
    "name", [b"line\nend.key", b"\xff\xfe.key", b"\x1b[31mred.key", "ключ.key".encode(), b" .key"]
)
def test_odd_names_are_printed_on_one_line(tmp_path: Path, name: bytes) -> None:
    (Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))).touch()
    (finding,) = scan_for_secrets(tmp_path, [KEY])
    str(finding).encode("utf-8")
    assert str(finding).isprintable() and "private state" in finding.what


@pytest.mark.parametrize("pack", [bz2.compress, lzma.compress, zlib.compress, lambda d: zlib.compress(d, wbits=31)])
def test_compressed_files_in_a_row(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    (tmp_path / "a").write_bytes(pack(os.urandom(99)) + pack(b"x" * 300_000 + KEY.hex().encode()))
    (finding,) = scan_for_secrets(tmp_path, [KEY])
    assert "secret key" in finding.what


def test_members_of_private_names(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("checkpoint/rng_state.pth", b"")
    (finding,) = scan_for_secrets(tmp_path, [KEY])
    assert "rng_state.pth" in finding.what


class Bomb:
    """Leaves a file behind when somebody unpickles it."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("protocol", range(6))
def test_nothing_is_executed(tmp_path: Path, protocol: int) -> None:
    trap = Bomb(tmp_path / "exploded.txt")
    (tmp_path / "a.pkl").write_bytes(pickle.dumps({"a": trap, "key": list(KEY)}, protocol=protocol))
    torch.save({"a": trap, "key": KEY}, tmp_path / "b.pt")
    np.save(tmp_path / "c.npy", np.array([trap, list(KEY)], dtype=object), allow_pickle=True)
    assert {finding.path for finding in scan_for_secrets(tmp_path, [KEY])} == {"a.pkl", "b.pt", "c.npy"}
    assert not (tmp_path / "exploded.txt").exists()


VALUES = [
    {"a": [1, 2.5, None, True, "x", b"y", (1, 2, 3, 4)], 7: {"nested": []}, "big": 2**70, "empty": ()},
    [[]] * 3,
    {"shared": (shared := [1, 2]), "again": shared},
    bytearray(b"abc"),
    {1, 2, 3},
    frozenset(["a"]),
]


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("value", VALUES, ids=str)
def test_plain_values_are_read_as_pickle_reads_them(value: object, protocol: int) -> None:
    """Sets become lists; what older protocols write as a call is left as one."""
    (read,), end = pickles.read_pickles(pickle.dumps(value, protocol=protocol))
    assert end == len(pickle.dumps(value, protocol=protocol))
    if isinstance(read, pickles.Opaque):
        assert isinstance(value, (bytearray, set, frozenset)) or protocol < 3
    elif isinstance(value, (set, frozenset)):
        assert set(read) == value
    elif protocol >= 3:
        assert read == value


def test_damaged_files_never_crash_it(tmp_path: Path) -> None:
    """Every kind of container, each with a few bytes changed or its end cut off; 300 cases, other ones in every run."""
    torch.save({"w": torch.randn(9, 9), "k": [1, 2, 3, 4]}, tmp_path / "a.pt")
    np.savez_compressed(tmp_path / "a.npz", w=np.zeros(99))
    samples = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    samples |= {"a.pkl": pickle.dumps({"a": [1, 2.5]}), "a.gz": zlib.compress(b"abc" * 99, wbits=31)}
    samples["a.safetensors"] = (
        (40).to_bytes(8, "little") + b'{"w":{"dtype":"F32","data_offsets":[0,4]}}'[:40] + b"abcd"
    )
    samples["a.zip"] = _nested(2)
    for case in range(300):
        name, content = random.choice(list(samples.items()))
        damaged = bytearray(content)
        for _ in range(random.randint(1, 6)):
            damaged[random.randrange(len(damaged))] = random.randrange(256)
        (tmp_path / name).write_bytes(damaged[: random.choice([len(damaged), random.randrange(len(damaged))])])
        try:
            scan_for_secrets(tmp_path, [KEY])
        except Exception as error:
            raise AssertionError(f"case {case}: {name} {bytes(damaged)!r}") from error
