"""The kernel of the noise: on a GPU where there is one, else through Triton's interpreter."""

from __future__ import annotations

import inspect
import logging
import os
import struct

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install -c constraints.txt '.[test]'")

import triton
import triton.language as tl
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from hf_dpopt.common import log
from hf_dpopt.noise import BandedToeplitz, NuDPFTRL, independent_noise
from hf_dpopt.randomness import chacha, kernel
from hf_dpopt.randomness.chacha import COUNTER, NORMALS, ChaCha20Gaussian
from hf_dpopt.randomness.source import Part
from tests.mechanisms.test_chacha import VECTORS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EDGE = COUNTER * NORMALS


@triton.jit(do_not_specialize=["tensor", "first"])
def _words_kernel(key_ptr, out_ptr, tensor, first, BLOCKS: tl.constexpr):
    block = first.to(tl.int64) + tl.arange(0, BLOCKS)
    words = kernel_words(key_ptr, block, tensor.to(tl.int64))
    for i in tl.static_range(16):
        tl.store(out_ptr + tl.arange(0, BLOCKS) * 16 + i, words[i])


kernel_words = kernel._words


def _words(key: bytes, tensor: int, block: int, num: int) -> bytes:
    out = torch.zeros(num * 16, dtype=torch.uint32, device=DEVICE)
    _words_kernel[(1,)](kernel.key_tensor(key, torch.device(DEVICE)), out, tensor, block, BLOCKS=num)
    return out.cpu().view(torch.int32).numpy().tobytes()


@pytest.mark.parametrize("vector", VECTORS)
def test_words_are_those_of_rfc_8439(vector):
    key, counter, nonce_hex, expected = VECTORS[vector]
    high, tensor = struct.unpack("<IQ", bytes.fromhex(nonce_hex))
    assert _words(key, tensor, high * COUNTER + counter, 1).hex() == expected


@pytest.mark.slow_but(4)
@pytest.mark.parametrize("block", [0, COUNTER - 64, 5 * COUNTER + 77])
@pytest.mark.parametrize("tensor", [0, 3, 2**32 + 9, 2**62 + 1])
def test_words_are_those_of_the_library(tensor, block):
    key = os.urandom(32)
    start = struct.pack("<IIQ", block % COUNTER, block // COUNTER, tensor)
    expected = Cipher(algorithms.ChaCha20(key, start), mode=None).encryptor().update(bytes(64 * 64))
    assert _words(key, tensor, block, 64) == expected


RANGES = [(0, 1), (0, 8), (3, 2), (5, 4000), (8 * kernel.BLOCKS - 1, 2), (EDGE - 1003, 3000), (2**62 + 5, 99)]


@pytest.mark.slow_but(2)
@pytest.mark.parametrize("first, num", RANGES)
def test_normals_are_those_of_the_cpu(first, num):
    """To one unit in the last place of float32, or 1e-14 near zero."""
    source, sums = ChaCha20Gaussian(os.urandom(32)), torch.randn(num)
    want = sums.clone()
    source.add_parts([Part(7, first, want)], stddev=0.7, step=11)
    got = sums.to(DEVICE)
    chacha.add_on_device(source.step_key(11), [Part(7, first, got)], 0.7)
    z = source.normal_range(first, num, step=11, tensor=7)
    torch.testing.assert_close(got.cpu(), want, rtol=2.0**-22, atol=1e-14)
    alone = torch.zeros(num, device=DEVICE)
    chacha.add_on_device(source.step_key(11), [Part(7, first, alone)], 1.0)
    torch.testing.assert_close(alone.cpu(), z, rtol=2.0**-22, atol=1e-14)


def test_nothing_beside_the_range_is_touched():
    wider = torch.zeros(5000, device=DEVICE)
    chacha.add_on_device(bytes(32), [Part(0, 13, wider[100:1200]), Part(1, 0, wider[2000:2000])], 1.0)
    assert not wider[:100].any() and not wider[1200:].any() and (wider[100:1200] != 0).all()


@pytest.fixture
def on_the_kernel(monkeypatch):
    """The kernel serves the tests' device, as it does a GPU."""
    monkeypatch.setattr(chacha, "is_drawn_on", lambda device: True)


STRATEGIES = {"banded": BandedToeplitz((1.0, 0.4, 0.2)), "drawn again": NuDPFTRL(0.1)}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*STRATEGIES, "independent"])
def test_a_run_goes_on_on_another_device(name, monkeypatch):
    """Steps on the CPU, then with the kernel, then on the CPU: the noise of a run on one device."""
    key, on_kernel = os.urandom(32), {"now": False}
    monkeypatch.setattr(chacha, "is_drawn_on", lambda device: on_kernel["now"])

    def stream():
        if name == "independent":
            return independent_noise(1.0).stream(ChaCha20Gaussian(key), 0.7)
        backend = "regenerate" if name == "drawn again" else "auto"
        return STRATEGIES[name].stream(ChaCha20Gaussian(key), scale=0.7, num_steps=6, backend=backend)

    def zeros(device):
        return {"a": torch.zeros(900, device=device), "b": torch.zeros(3, 4, device=device)}

    whole, part = stream(), stream()
    for step in range(6):
        on_kernel["now"] = False
        whole.add_(want := zeros("cpu"), step)
        if step in (2, 4):
            part = stream()
            part.continue_at(step)
        on_kernel["now"] = step in (2, 3)
        part.add_(got := zeros(DEVICE if on_kernel["now"] else "cpu"), step)
        for value in want:
            torch.testing.assert_close(got[value].cpu(), want[value], rtol=1e-6, atol=1e-6)


def test_the_key_is_in_no_constant_of_the_kernel_and_not_left_on_the_device(on_the_kernel, monkeypatch):
    """What a kernel is compiled for are its constants and the types of the rest: neither knows the key or the level."""
    arguments = inspect.signature(kernel._add_kernel.fn).parameters.values()
    assert [p.name for p in arguments if "constexpr" in str(p.annotation)] == ["BLOCKS"]
    made, make = [], kernel.key_tensor
    monkeypatch.setattr(kernel, "key_tensor", lambda *args: made.append(make(*args)) or made[-1])
    total = torch.zeros(20, device=DEVICE)
    ChaCha20Gaussian(os.urandom(32)).add_to({0: total}, stddev=1.0, step=1)
    assert len(made) == 1 and not made[0].any() and total.all()


def test_where_it_cannot_be_built_the_cpu_draws_and_says_so_once(monkeypatch, caplog):
    def no_compiler(*args, **kwargs):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(log, "_told", set())
    monkeypatch.setattr(log.logger, "propagate", True)
    device = torch.device(DEVICE)
    with caplog.at_level(logging.WARNING, logger="hf_dpopt"):
        for _ in range(2):
            chacha._works_on.cache_clear()
            monkeypatch.setattr(kernel, "add_normals_", no_compiler)
            assert not chacha._works_on(device)
    assert caplog.text.count("drawn on the CPU and copied") == 1 and "Failed to find C compiler" in caplog.text
    monkeypatch.undo()
    chacha._works_on.cache_clear()
    assert chacha._works_on(device)
    chacha._works_on.cache_clear()
    monkeypatch.setenv("HF_DPOPT_KERNELS", "0")
    assert not chacha._works_on(device)
    chacha._works_on.cache_clear()


def test_a_kernel_that_draws_other_values_is_not_used(monkeypatch):
    """A compiler's mistake would be noise of another law, with the same epsilon printed."""
    add = kernel.add_normals_
    monkeypatch.setattr(
        kernel, "add_normals_", lambda total, *args, **more: (add(total, *args, **more), total.mul_(1.001))
    )
    chacha._works_on.cache_clear()
    assert not chacha._works_on(torch.device(DEVICE))
    chacha._works_on.cache_clear()


def test_the_cpu_never_uses_it():
    assert not chacha.is_drawn_on(torch.device("cpu"))
