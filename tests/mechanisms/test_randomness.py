"""Keys, words and normals. Random tests draw fresh keys from the operating system and state their false-alarm rate."""

from __future__ import annotations

import itertools
import math
import os

import numpy as np
import pytest
import scipy.stats
import torch

from hf_dpopt.randomness import chacha, cipher
from hf_dpopt.randomness.chacha import ChaCha20Gaussian
from hf_dpopt.randomness.cipher import random_words
from hf_dpopt.randomness.source import derive_key
from tests.reference import randomness as reference

CHUNK = 2**14
HALF = CHUNK // 2


@pytest.fixture
def key() -> bytes:
    return os.urandom(32)


# --- keys and words ---


def test_keystream_is_the_published_aes_256_ctr():
    """NIST SP 800-38A, F.5.5: the keystream is the XOR of the vector's plaintext and ciphertext."""
    key = bytes.fromhex("603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4")
    plaintext = bytes.fromhex(
        "6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51"
        "30c81c46a35ce411e5fbc1191a0a52eff69f2445df4f9b17ad2b417be66c3710"
    )
    ciphertext = bytes.fromhex(
        "601ec313775789a5b7a7f504bbf3d228f443e3ca4d62b59aca84e990cacaf5c5"
        "2b0930daa23de94ce87017ba2d84988ddfc9c58db67aada613c2dd08457941a6"
    )
    out = np.zeros(8, dtype="<u8")
    cipher._fill_keystream(out, memoryview(bytes(64)), key, bytes.fromhex("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff"))
    assert out.tobytes() == bytes(a ^ b for a, b in zip(plaintext, ciphertext, strict=True))


def test_derived_keys_differ_for_every_list_of_labels(key):
    lists = [(), ("",), ("", ""), ("ab", "c"), ("a", "bc"), ("abc",), ("a", "b", "c"), ("step", "1"), ("step", "11")]
    lists += [("a\x00b",), ("a", "\x00b"), ("noise",), ("sampling",), ("dropout",)]
    keys = [derive_key(key, *labels) for labels in lists]
    assert keys == [reference.subkey(key, *labels) for labels in lists]
    assert len(set(keys)) == len(lists) and {len(k) for k in keys} == {32}
    assert derive_key(os.urandom(32), "noise") != derive_key(key, "noise")


def test_short_root_keys_are_refused():
    with pytest.raises(AssertionError, match="32 to 64 bytes"):
        derive_key(b"guessable", "noise")


@pytest.mark.parametrize("num", [0, 1, 2, 3, 1001])
def test_words_equal_counter_mode_by_hand(key, num):
    words = random_words(key, 7, num)
    assert words.dtype == np.uint64 and words.shape == (num,)
    assert words.tolist() == reference.words(reference.subkey(key, "words", "step", "7"), 0, num)


# --- the stream ---


def test_normals_do_not_depend_on_shape_or_threads(key, monkeypatch):
    source = ChaCha20Gaussian(key)

    def use(threads):
        monkeypatch.setattr(chacha, "usable_cores", lambda: threads)

    use(1)
    num = 9 * CHUNK + 4321
    flat = source.normal((num,), step=2, tensor=1)
    for threads in (2, 3, 8):
        use(threads)
        assert torch.equal(ChaCha20Gaussian(key).normal((num,), step=2, tensor=1), flat)
    assert torch.equal(source.normal((3, CHUNK, 3), step=2, tensor=1).flatten(), flat[: 9 * CHUNK])
    assert torch.equal(source.normal((7,), step=2, tensor=1), flat[:7])
    assert source.normal((), step=2, tensor=1).shape == () and source.normal((0, 4), step=2, tensor=1).shape == (0, 4)


def test_normals_ignore_and_leave_the_global_generators(key):
    source = ChaCha20Gaussian(key)
    torch.manual_seed(1)
    np.random.seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    z = source.normal((100,), step=1, tensor=0)
    assert torch.equal(torch.get_rng_state(), before[0]) and np.array_equal(np.random.get_state()[1], before[1])
    torch.manual_seed(2)
    np.random.seed(2)
    assert torch.equal(source.normal((100,), step=1, tensor=0), z)


# --- the law ---


def _draw(num: int) -> np.ndarray:
    """float64 normals under a fresh key."""
    return ChaCha20Gaussian(os.urandom(32)).normal((num,), step=1, tensor=0).double().numpy()


def test_distribution():
    """Kolmogorov-Smirnov on 1e5 draws at level 1e-7 (distance 0.0092).

    Power: a mean off by 0.035 or a stddev off by 5% is caught with probability > 0.99; the energy test is sharper.
    """
    assert scipy.stats.kstest(_draw(100_000), "norm").pvalue > 1e-7


def test_energy():
    """Chi-square on 1e6 draws at level 1e-6. Power: a stddev off by 0.7% is caught with probability > 0.999."""
    energy = np.square(_draw(1_000_000)).sum()
    low, high = scipy.stats.chi2.ppf([5e-7, 1 - 5e-7], df=1_000_000)
    assert low < energy < high


def test_tail():
    """|z| > 4 in 1e7 draws: 633 expected; exact binomial interval of false-alarm probability 1e-7."""
    count = int((np.abs(_draw(10_000_000)) > 4).sum())
    low, high = scipy.stats.binom.ppf([5e-8, 1 - 5e-8], 10_000_000, 2 * scipy.stats.norm.sf(4))
    assert low <= count <= high


def test_streams_are_independent(key):
    """Correlation of values and of squares between steps, tensors, keys, chunks, halves of a chunk and neighbours.

    Each sqrt(N) * correlation is N(0, 1), N >= 2^18; the false-alarm probability of all together is below 2e-7 (1e-7,
    and the skewness of the squares). Power: a correlation of 1.5% is caught with probability > 0.95, reuse always.
    """
    num = 32 * CHUNK
    source, other = ChaCha20Gaussian(key), ChaCha20Gaussian(os.urandom(32))
    streams = [source.normal((num,), step=s, tensor=t) for s, t in [(1, 0), (2, 0), (1, 1), (0, 1), (0, 256)]]
    first, *_ = streams = [z.double().numpy() for z in [*streams, other.normal((num,), step=1, tensor=0)]]
    halves = first.reshape(-1, 2, HALF).transpose(1, 0, 2).reshape(2, -1)
    pairs = [*itertools.combinations(streams, 2), tuple(halves), (first, np.roll(first, 1))]
    pairs += [(first, np.roll(first, CHUNK)), (first, np.roll(first, HALF))]
    bound = scipy.stats.norm.isf(1e-7 / (4 * len(pairs)))
    for a, b in pairs:
        for f in (lambda z: z, np.square):
            assert abs(np.corrcoef(f(a), f(b))[0, 1]) * math.sqrt(len(a)) < bound


def test_a_source_hides_its_key(key):
    assert key.hex() not in repr(ChaCha20Gaussian(key))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_device(key):
    """Same law and purity on the device: chi-square on 1e6 draws at level 1e-6."""
    z = ChaCha20Gaussian(key).normal((1_000_000,), step=1, tensor=0, device="cuda")
    assert z.device.type == "cuda" and z.dtype == torch.float32
    assert torch.equal(z, ChaCha20Gaussian(key).normal((1_000_000,), step=1, tensor=0, device="cuda"))
    assert not torch.equal(z, ChaCha20Gaussian(key).normal((1_000_000,), step=2, tensor=0, device="cuda"))
    low, high = scipy.stats.chi2.ppf([5e-7, 1 - 5e-7], df=1_000_000)
    assert low < z.double().square().sum().item() < high
