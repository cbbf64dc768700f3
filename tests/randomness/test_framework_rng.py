"""Inside: every generator is a function of (key, step, rank). Outside: nobody notices."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch

from hf_dpopt.randomness import framework
from hf_dpopt.randomness.framework import secret_randomness

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
CPU = torch.device("cpu")


def draws() -> dict[str, tuple]:
    """64 bits and more of each generator that collators and dropout use."""
    return {
        "python": tuple(random.getrandbits(64) for _ in range(4)),
        "numpy": tuple(np.random.randint(0, 2**63, size=4).tolist()),
        "torch": tuple(torch.randint(0, 2**62, (4,)).tolist()),
        "dropout": tuple(torch.nn.functional.dropout(torch.ones(256), 0.5).tolist()),
    }


def inside(key: bytes = KEY, step: int = 1, rank: int = 0) -> dict[str, tuple]:
    with secret_randomness(key, step, rank, CPU):
        return draws()


def states() -> tuple:
    name, keys, *rest = np.random.get_state()
    return random.getstate(), name, tuple(keys.tolist()), tuple(rest), tuple(torch.get_rng_state().tolist())


def test_it_is_a_function_of_key_step_and_rank():
    first = inside()
    torch.manual_seed(7), random.seed(7), np.random.seed(7)  # what was there before does not matter
    assert inside() == first


@pytest.mark.parametrize(
    "other", [{"key": OTHER}, {"key": KEY[:-1] + b"\0"}, {"step": 2}, {"rank": 1}, {"step": 10, "rank": 1}]
)
def test_another_key_step_or_rank_is_another_stream(other):
    """Two streams agree in a generator's draws with probability at most 2^-248."""
    one, two = inside(), inside(**other)
    assert all(one[name] != two[name] for name in one)


def _masks(key: bytes) -> tuple:
    with torch.random.fork_rng(devices=[]):
        framework.seed_torch(key)
        return draws()["dropout"]


def test_every_part_of_the_key_counts():
    """Keys that share 32 bits only, and keys that share all but 32."""
    words = [bytes([i]) * 4 for i in range(1, 9)]
    key = b"".join(words)
    others = [key[:4] + bytes(28), bytes(28) + key[28:]]
    others += [key[: 4 * i] + bytes(4) + key[4 * i + 4 :] for i in range(8)]
    assert len({_masks(k) for k in [key, *others]}) == 1 + len(others)


def test_steps_whose_keys_share_32_bits_have_other_masks(monkeypatch):
    """`torch.manual_seed` looks at no more of a key on the CPU."""
    monkeypatch.setattr(framework, "derive_key", lambda root, *labels: KEY[:4] + root[4:])
    one, two = inside(KEY), inside(KEY[:4] + OTHER[4:])
    assert all(one[name] != two[name] for name in one)


def test_the_whole_state_comes_from_the_key():
    """All 624 words differ from those of a seed of 32 bits, and are the ones the twister then makes its draws of.

    Equal words come by chance once in 2^32 for each of the 624: the test fails wrongly with probability below 2e-7.
    """
    first, size = framework._words_in_cpu_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(KEY[:8], "little"))
        plain = torch.get_rng_state()[first : first + 624 * size].numpy().view(f"<u{size}")
        framework.seed_torch(KEY)
        state = torch.get_rng_state()
        words = state[first : first + 624 * size].numpy().view(f"<u{size}")
        assert (words != plain).all() and words.max() < 2**32 and len(set(words.tolist())) > 620
        got = torch.empty(1000, dtype=torch.int64).random_(0, 2**24)
        torch.set_rng_state(state)
        assert torch.equal(got, torch.empty(1000, dtype=torch.int64).random_(0, 2**24))
    twister = np.random.RandomState()
    twister.set_state(("MT19937", words.astype(np.uint32), 624))
    assert got.tolist() == [int(x) % 2**24 for x in twister.randint(0, 2**32, size=1000, dtype=np.uint32)]


def test_draws_are_uniform():
    """Chi-square of 2^16 uniforms in 64 cells, over 8 keys of the system; false alarm below 1e-6 whatever the keys."""
    from scipy.stats import chi2

    statistic, num_keys = 0.0, 8
    for _ in range(num_keys):
        with torch.random.fork_rng(devices=[]):
            framework.seed_torch(os.urandom(32))
            counts = torch.histc(torch.rand(2**16, dtype=torch.float64), bins=64, min=0, max=1).double()
        statistic += float(((counts - 2**10).square() / 2**10).sum())
    low, high = chi2.ppf([5e-7, 1 - 5e-7], df=63 * num_keys)
    assert low < statistic < high


def test_an_unknown_layout_is_no_reason_to_go_on(monkeypatch):
    framework._words_in_cpu_state.cache_clear()
    monkeypatch.setattr(np.random, "RandomState", lambda seed: np.random.mtrand._rand)  # words of another seed
    with pytest.raises(RuntimeError, match="unknown layout.*version of torch"):
        framework._words_in_cpu_state()


def test_the_generators_of_one_step_do_not_repeat_each_other():
    one = inside()
    assert not set(one["python"]) & set(one["numpy"]) and not set(one["numpy"]) & set(one["torch"])


def test_nothing_is_left_outside():
    before = states()
    with secret_randomness(KEY, 1, 0, CPU):
        draws()
        assert states() != before
    assert states() == before


def test_nothing_is_left_outside_after_an_exception():
    before = states()
    with pytest.raises(RuntimeError, match="out of memory"), secret_randomness(KEY, 1, 0, CPU):
        draws()
        raise RuntimeError("out of memory")
    assert states() == before


def test_what_is_drawn_outside_does_not_depend_on_the_steps_between():
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    want = draws()
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    inside()
    assert draws() == want


def test_it_nests():
    with secret_randomness(KEY, 1, 0, CPU):
        inside(OTHER)
        assert draws() == inside(KEY)


def test_masks_are_not_those_of_the_public_seed():
    """The Trainer seeds everything with args.seed, 42 by default: those masks anybody can compute."""
    torch.manual_seed(42), random.seed(42), np.random.seed(42)
    public = draws()
    torch.manual_seed(42), random.seed(42), np.random.seed(42)
    secret = inside()
    assert all(secret[name] != public[name] for name in public)


def _seeded_by_the_system(seed: int) -> dict[str, tuple]:
    """Draws after the public seed, and then the system's; the generators are put back."""
    with framework.keep_generators(CPU):
        torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
        framework.reseed_from_the_system()
        return draws()


def test_the_system_s_seed_leaves_nothing_of_the_public_one():
    """Every generator, each time anew: equal draws come by chance with probability below 2^-200."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(42), random.seed(42), np.random.seed(42)
        public = draws()
    one, two = _seeded_by_the_system(42), _seeded_by_the_system(42)
    assert all(len({some[name] for some in (public, one, two)}) == 3 for name in public)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_generator_of_the_gpu_too():
    device = torch.device("cuda", torch.cuda.current_device())
    before = torch.cuda.get_rng_state(device)

    def mask() -> list[float]:
        with secret_randomness(KEY, 1, 0, device):
            return torch.nn.functional.dropout(torch.ones(256, device=device), 0.5).tolist()

    first = mask()
    torch.cuda.manual_seed(7)
    assert mask() == first
    torch.cuda.set_rng_state(before, device)
    mask()
    assert torch.equal(torch.cuda.get_rng_state(device), before)
