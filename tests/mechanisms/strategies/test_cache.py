"""Tunings on disk: found again, computed again when they are damaged, and never in the way."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise import (
    DenseStrategy,
    NuDPFTRL,
    Participation,
    momentum_workload,
    optimize_banded,
    optimize_blt,
    optimize_damped,
    optimize_dense,
    optimize_nu,
)
from hf_dpopt.noise import cache as module
from hf_dpopt.noise.cache import cache_dir, cached
from tests import tiny

ONCE = Participation()
TUNINGS = {
    "nu": lambda: optimize_nu(20, Participation(2, 10)),
    "damped": lambda: optimize_damped(20, Participation(2, 10)),
    "blt": lambda: optimize_blt(20, Participation(2, 10), 1),
    "banded": lambda: optimize_banded(20, 4, workload=momentum_workload(20, 0.9)),
    "dense": lambda: optimize_dense(20, Participation(2, 10)),
}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HF_DPOPT_CACHE_DIR", str(tmp_path / "a" / "b"))
    return tmp_path / "a" / "b"


@pytest.fixture
def calls(folder) -> list[tuple]:
    return []


@pytest.fixture
def tune(calls):
    def tune_it(n: int, participation: Participation = ONCE, *, workload: object = None) -> NuDPFTRL | DenseStrategy:
        calls.append((n, participation, workload))
        return DenseStrategy(np.eye(n) + 1 / 3 * np.eye(n, k=-1)) if n > 100 else NuDPFTRL(1 / n)

    return cached(tune_it)


@pytest.mark.parametrize("name", TUNINGS)
def test_found_again(name, folder, monkeypatch):
    first = TUNINGS[name]()
    assert len(list(folder.glob("*.json"))) == 1
    monkeypatch.setattr(module, "_write", lambda *_: pytest.fail("tuned again"))
    second = TUNINGS[name]()
    assert second == first and second.digest() == first.digest() and type(second) is type(first)
    np.testing.assert_array_equal(second.noising_matrix(20), first.noising_matrix(20))


def test_equal_inputs_are_one_entry_and_others_are_not(tune, calls):
    workload = momentum_workload(7, 0.9)
    for inputs, others in [
        (((7,), {}), ((np.int64(7), Participation()), {})),
        (((8,), {}), ((8,), {"workload": None})),
        (((7, Participation(2, 3)), {}), ((), {"participation": Participation(2, 3), "n": 7})),
        (((7, Participation(2, 3, "fixed_epoch")), {}), ((7, Participation(2, 3, "fixed_epoch")), {})),
        (((7,), {"workload": workload}), ((7,), {"workload": momentum_workload(7, 0.9)})),
        (((7,), {"workload": momentum_workload(7, 0.9, [1.0] * 7)}), ((7,), {"workload": momentum_workload(7, 0.9, [1.0] * 7)})),
        (((7.0,), {}), ((7.0,), {})),  # not a count, which a tuning refuses: not that of 7
    ]:  # fmt: skip
        before = len(calls)
        tune(*inputs[0], **inputs[1])
        assert len(calls) == before + 1, inputs
        tune(*others[0], **others[1])
        assert len(calls) == before + 1, others


def test_another_version_is_another_entry(tune, calls, monkeypatch):
    tune(7)
    monkeypatch.setattr(module, "VERSION", module.VERSION + 1)
    tune(7)
    assert len(calls) == 2


def _edited(entry: str, **changes: object) -> bytes:
    return json.dumps({**json.loads(entry), **changes}).encode()


DAMAGE = {
    "empty": lambda entry: b"",
    "cut short": lambda entry: entry[:-9].encode(),
    "not text": lambda entry: b"\xff\xfe",
    "not an object": lambda entry: b"[1]",
    "other inputs": lambda entry: _edited(entry, key="0" * 64),
    "other strategy": lambda entry: _edited(entry, parameters={"name": "nu_dpftrl", "nu": 0.5}),
    "other kind": lambda entry: _edited(
        entry, parameters={"name": "damped_anti_pgd", "nu": 0.5}, digest=module.from_parameters({"name": "damped_anti_pgd", "nu": 0.5}).digest()
    ),
    "no strategy": lambda entry: _edited(entry, parameters={"name": "nu_dpftrl", "nu": 7.0}),
    "deep": lambda entry: b"[" * 100_000,
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_entry_is_computed_again(damage, tune, calls, folder):
    first = tune(7)
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(path.read_text()))
    assert tune(7) == first and len(calls) == 2
    assert path.read_bytes() == whole
    assert tune(7) == first and len(calls) == 2


@pytest.mark.parametrize("content", [None, b"", b"PK\x03\x04"], ids=["missing", "empty", "cut short"])
def test_a_damaged_matrix_is_computed_again(content, tune, calls, folder):
    first = tune(101)
    (path,) = folder.glob("*.npz")
    path.unlink() if content is None else path.write_bytes(content)
    assert tune(101) == first and len(calls) == 2
    assert tune(101) == first and len(calls) == 2


def test_a_matrix_of_pickled_objects_is_not_opened(tune, calls, folder, tmp_path):
    first = tune(101)
    (path,) = folder.glob("*.npz")
    np.savez(path, matrix=np.array([tiny.Bomb(tmp_path / "sprung")], dtype=object))
    assert tune(101) == first and len(calls) == 2
    assert not (tmp_path / "sprung").exists()


def test_a_folder_that_cannot_be(tune, calls, monkeypatch):
    monkeypatch.setenv("HF_DPOPT_CACHE_DIR", os.devnull)
    assert tune(7) == tune(7) == NuDPFTRL(1 / 7) and len(calls) == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written(tune, calls, folder):
    folder.mkdir(parents=True)
    folder.chmod(0o500)
    assert tune(7) == tune(7) == NuDPFTRL(1 / 7) and len(calls) == 2


def test_a_full_disk(tune, calls, folder, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert tune(7) == NuDPFTRL(1 / 7)
    assert not list(folder.iterdir())


def test_refusals_are_the_tunings_own(folder):
    with pytest.raises(DPConfigError, match="num_buffers=0"):
        optimize_blt(20, Participation(), 0)
    with pytest.raises(AttributeError):
        optimize_nu(20, "twice")
    with pytest.raises(AttributeError):
        optimize_nu(20, object())
    assert not folder.exists()


def test_where_entries_lie(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_DPOPT_CACHE_DIR", str(tmp_path / "x"))
    assert cache_dir() == tmp_path / "x"
    monkeypatch.setenv("HF_DPOPT_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "hf_dpopt"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for not_a_place in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", not_a_place)
        assert cache_dir() == tmp_path / "home" / ".cache" / "hf_dpopt"
