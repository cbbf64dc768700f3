"""ChaCha20 words and the normals made of them, against RFC 8439 and a slow reference."""

from __future__ import annotations

import itertools
import math
import os
import tracemalloc

import numpy as np
import pytest
import torch

from hf_dpopt.randomness import chacha
from hf_dpopt.randomness.chacha import CHUNK, COUNTER, NORMALS, SLICE, ChaCha20Gaussian, NormalsOfBlocks
from hf_dpopt.randomness.source import Part
from tests.reference import chacha as reference
from tests.reference.randomness import box_muller

KEY = bytes(range(32))
EDGE = COUNTER * NORMALS  # the first element whose block has another nonce


@pytest.fixture
def source() -> ChaCha20Gaussian:
    return ChaCha20Gaussian(os.urandom(32))


def _keystream(key: bytes, tensor: int, block: int, num: int) -> bytes:
    out = np.empty(num * 8, dtype="<u8")
    chacha.fill_keystream(out, key, tensor, block)
    return out.tobytes()


# --- words ---

# RFC 8439, Sec. 2.3.2, and Appendix A.1, test vectors 1, 2, 3 and 4 (all with a key or nonce of few bits).
VECTORS = {
    "2.3.2": (KEY, 1, "000000090000004a00000000", "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4ed2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"),
    "A.1 #1": (bytes(32), 0, "00" * 12, "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"),
    "A.1 #2": (bytes(32), 1, "00" * 12, "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"),
    "A.1 #3": (bytes(31) + b"\x01", 1, "00" * 12, "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0"),
    "A.1 #4": (b"\x00\xff" + bytes(30), 2, "00" * 12, "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096"),
}  # fmt: skip


@pytest.mark.parametrize("vector", VECTORS)
def test_words_are_those_of_rfc_8439(vector):
    """The published nonce, read as the number of a tensor and the high part of that of a block."""
    key, counter, nonce_hex, expected = VECTORS[vector]
    nonce = bytes.fromhex(nonce_hex)
    high, tensor = int.from_bytes(nonce[:4], "little"), int.from_bytes(nonce[4:], "little")
    assert reference.block(key, counter, nonce).hex() == expected
    assert _keystream(key, tensor, high * COUNTER + counter, 1).hex() == expected


def test_a_call_never_wraps_the_counter():
    """Past 2^32 blocks the stream of the first ones would come again: two elements with one noise."""
    with pytest.raises(AssertionError, match="do not fit under one nonce"):
        _keystream(KEY, 0, COUNTER - 2, 3)
    assert CHUNK % NORMALS == 0 and EDGE % CHUNK == 0  # so that no range within a chunk crosses it


# --- addresses ---


@pytest.mark.parametrize("num", [1, 2, 7, 8, 9, 1000, 2 * SLICE + 3, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5])
def test_normals_equal_one_element_at_a_time(num):
    z = ChaCha20Gaussian(KEY).normal((num,), step=12, tensor=3)
    edges = {0, 1, 7, 8, 2 * SLICE - 1, 2 * SLICE, 2 * SLICE + 1, CHUNK - 1, CHUNK, num - 2, num - 1}
    elements = [e for e in edges | set(range(0, num, 997)) if 0 <= e < num]
    expected = torch.tensor([reference.normal(KEY, 12, 3, e) for e in elements], dtype=torch.float32)
    torch.testing.assert_close(z[elements], expected, rtol=1.2e-7, atol=1e-14)


def test_any_cut_of_a_tensor_gives_the_whole(source):
    num, rng = 2 * CHUNK + 77, np.random.default_rng()
    whole = source.normal((num,), step=1, tensor=0)
    for _ in range(5):
        cuts = [0, *sorted(rng.integers(0, num, 6).tolist()), num]
        parts = [source.normal_range(a, b - a, step=1, tensor=0) for a, b in itertools.pairwise(cuts)]
        assert torch.equal(torch.cat(parts), whole)


def test_elements_beyond_the_counter_have_a_nonce_of_their_own():
    """A tensor of 2^35 elements and more: a small draw just around the boundary, and the one that a wrap would repeat."""
    source = ChaCha20Gaussian(KEY)
    around = source.normal_range(EDGE - 20, 40, step=2, tensor=1)
    expected = [reference.normal(KEY, 2, 1, e) for e in (EDGE - 20, EDGE - 1, EDGE, EDGE + 19)]
    torch.testing.assert_close(
        around[[0, 19, 20, 39]], torch.tensor(expected, dtype=torch.float32), rtol=1.2e-7, atol=0
    )
    begin = source.normal_range(0, 20, step=2, tensor=1)
    assert not (around[20:] == begin).any()
    far = source.normal_range(2**62 + 3, 20, step=2, tensor=1)
    assert torch.equal(far[5:], source.normal_range(2**62 + 8, 15, step=2, tensor=1)) and not (far == begin).any()


def test_torchs_threads_change_nothing(source):
    flat, before = source.normal((3 * CHUNK,), step=2, tensor=1), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(source.normal((3 * CHUNK,), step=2, tensor=1), flat)
    finally:
        torch.set_num_threads(before)


# --- added to sums ---


def _added(total: torch.Tensor, z: torch.Tensor, stddev: float) -> torch.Tensor:
    """Sum in float64, rounded once."""
    return (total.double() + stddev * z.double()).float()


def test_the_noise_is_added_to_sums_and_rounded_once(source):
    sums = [torch.randn(300, 77), torch.randn(()), torch.zeros(0, 3), torch.randn(CHUNK + 9), torch.randn(9, 40).T]
    want = [_added(x, source.normal(x.shape, step=5, tensor=10 + i), 0.7) for i, x in enumerate(sums)]
    source.add_to({10 + i: x for i, x in enumerate(sums)}, stddev=0.7, step=5)
    assert all(map(torch.equal, sums, want))


def test_parts_of_a_tensor_are_added_to_as_the_whole_is(source):
    whole, num = torch.randn(2 * CHUNK + 100), 2 * CHUNK + 100
    cuts = [0, 5, CHUNK + 3, CHUNK + 4, num]
    in_parts = whole.clone()
    source.add_to({2: whole}, stddev=1.3, step=1)
    parts = [Part(2, a, in_parts[a:b]) for a, b in itertools.pairwise(cuts)]
    source.add_parts(parts[::-1], stddev=1.3, step=1)
    assert torch.equal(whole, in_parts)


def test_adding_makes_no_tensor_of_the_noise(source, monkeypatch):
    """Beside the sums, memory is that of a few chunks for each thread, whatever the size of the model."""
    sums = {i: torch.zeros(2**20) for i in range(8)}
    monkeypatch.setattr(chacha, "usable_cores", lambda: 2)
    tracemalloc.start()
    source.add_to(sums, stddev=1.0, step=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * 2**20 and all(x.std() > 0.9 for x in sums.values())


# --- cores ---


def test_all_cores_of_the_affinity_mask_draw_whatever_omp_says(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert chacha.usable_cores() == 6
    for ranks, share in (("2", 3), ("4", 1), ("8", 1), ("nonsense", 6), ("", 6)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        assert chacha.usable_cores() == share


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_piece_is_done_once(threads):
    done, workers = [], []

    def worker():
        workers.append(1)
        return done.append

    chacha.run_in_pieces(list(range(100)), worker, threads)
    assert sorted(done) == list(range(100)) and len(workers) == threads


@pytest.mark.parametrize("threads", [1, 3])
def test_what_a_worker_raises_is_raised(threads):
    def fail(piece):
        raise MemoryError(piece)

    with pytest.raises(MemoryError):
        chacha.run_in_pieces([1, 2, 3], lambda: fail, threads)


# --- the law ---


def test_box_muller_reaches_far_into_the_tail():
    """Planted extreme words: beyond 8 sigma, and to 8.57, where noise of single precision ends at 5.8."""
    most = 2**64 - 1
    angles = [0, 1, 2**61, 2**62, 2**63 - 1, 2**63, 2**63 + 2**11, 3 * 2**62, most]
    words = np.array([(u, v) for u in (0, 2**11, 2**63, most - 2**16, most) for v in angles], dtype="<u8")
    expected = np.array([box_muller(int(u), int(v)) for u, v in words]).ravel()
    normals = NormalsOfBlocks().transform(words.copy())
    np.testing.assert_allclose(normals, expected, rtol=1.2e-7, atol=1e-14)  # cos and sin round near their zeros
    assert (np.abs(normals) > 8).sum() >= 4 and normals.max() == pytest.approx(math.sqrt(106 * math.log(2)))
    assert normals.min() == pytest.approx(-normals.max()) and np.isfinite(normals).all()


def test_no_two_addresses_share_a_block():
    """Steps, tensors and neighbouring tensors' high parts: equal normals would be noise that can be subtracted."""
    source = ChaCha20Gaussian(os.urandom(32))
    addresses = [(s, t, f) for s in (0, 1, 10, 11) for t in (0, 1, 2**32, 256) for f in (0, EDGE, EDGE * 256)]
    draws = [source.normal_range(f, 16, step=s, tensor=t).numpy() for s, t, f in addresses]
    for a, b in itertools.combinations(draws, 2):
        assert not np.isin(a, b).any()
