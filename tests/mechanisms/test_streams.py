"""Streamed noise against ``B Z`` in float64, with the same draws; and what a stream keeps, resumes and refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hf_dpopt.common.errors import DPBudgetExceeded, DPConfigError
from hf_dpopt.noise import BandedToeplitz, NuDPFTRL
from hf_dpopt.noise.dense import DenseStrategy
from hf_dpopt.noise.strategy import NoiseStrategy
from hf_dpopt.noise.tree import TreeAggregation
from hf_dpopt.randomness.chacha import ChaCha20Gaussian
from tests.contract.noise import check_noise
from tests.mechanisms.strategies.cases import strategies

N, SCALE, KEY = 23, 0.7, bytes(range(32))
SHAPES = {"b.weight": (3, 5), "a.bias": (4,), "scalar": ()}
ALL = strategies(N)
TREES = ("tree", "honaker", "restarted-tree", "restarted-as-it-is")
STREAMS = (
    "nu", "damped", "inverse-bands", "bands", "one-band", "blt", "dense", "restarted-nu",
    "restarted-blt", "restarted-bands",
)  # fmt: skip
BACKENDS = {
    "auto": {},
    "history": {"backend": "history"},
    "regenerate": {"backend": "regenerate"},
}
CASES = [(name, backend) for name in STREAMS for backend in BACKENDS]
CASES += [(name, "auto") for name in TREES]


def _source():
    return ChaCha20Gaussian(KEY)


def _stream(name, backend="auto", **options):
    return ALL[name].stream(_source(), scale=SCALE, num_steps=N, **BACKENDS[backend], **options)


def _sums():
    return {name: torch.zeros(shape) for name, shape in SHAPES.items()}


def _run(stream, steps, first_step=0):
    noise = []
    for step in steps:
        sums = _sums()
        stream.add_(sums, step + first_step)
        noise.append(torch.cat([sums[name].flatten() for name in sorted(sums)]))
    return torch.stack(noise) if noise else torch.zeros(0, sum(np.prod(s, dtype=int) for s in SHAPES.values()))


@pytest.mark.parametrize("name, backend", CASES)
def test_noise_is_the_rows_of_b_times_the_draws(name, backend):
    check_noise(lambda source: ALL[name].stream(source, scale=SCALE, num_steps=N, **BACKENDS[backend]), ALL[name], N)


@pytest.mark.slow_but(8)
@pytest.mark.parametrize("name, backend", CASES)
def test_resumes_at_every_step_from_the_key_alone(name, backend):
    whole = _run(_stream(name, backend), range(N))
    for stopped in range(N):
        again = _stream(name, backend)
        again.continue_at(stopped)
        assert again.num_steps == stopped
        assert torch.equal(_run(again, range(stopped, N)), whole[stopped:])


@pytest.mark.slow_but(19)
@pytest.mark.parametrize("name, backend", CASES)
def test_a_tensor_does_not_depend_on_its_neighbours_or_the_first_step(name, backend):
    whole = _run(_stream(name, backend), range(N))
    later = _run(_stream(name, backend, first_step=100), range(N), first_step=100)
    assert torch.equal(whole, later)
    alone = _stream(name, backend)
    for step in range(5):
        sums = {"a.bias": torch.zeros(SHAPES["a.bias"])}  # the first in sorted order keeps its number
        alone.add_(sums, step)
        assert torch.equal(sums["a.bias"], whole[step, :4])


def test_what_is_kept():
    values = sum(int(np.prod(shape)) for shape in SHAPES.values())
    for name, backend, tensors in (
        ("blt", "auto", 2),
        ("bands", "auto", 3),
        ("nu", "history", 6),
        ("nu", "regenerate", 0),
        ("honaker", "auto", 3),  # two complete subtrees after six steps, and the last prefix
    ):
        stream = _stream(name, backend)
        _run(stream, range(6))
        assert stream.bytes_kept() == 4 * values * tensors, name


@pytest.mark.parametrize("name, backend", [("blt", "auto"), ("nu", "regenerate"), ("honaker", "auto")])
def test_every_step_once_and_in_order(name, backend):
    stream = _stream(name, backend)
    _run(stream, range(3))
    for wrong in (2, 4):
        with pytest.raises(DPConfigError, match="every step once, in order"):
            stream.add_(_sums(), wrong)
    with pytest.raises(DPConfigError, match="tensors to be noised changed"):
        stream.add_({**_sums(), "more": torch.zeros(2)}, 3)
    with pytest.raises(DPConfigError, match="float32"):
        stream.add_({name: total.bfloat16() for name, total in _sums().items()}, 3)
    assert stream.num_steps == 3  # a refusal takes nothing
    stream.add_(_sums(), 3)


def test_unknown_backends():
    with pytest.raises(DPConfigError, match="'history', 'regenerate'"):
        NuDPFTRL(0.1).stream(_source(), scale=1.0, num_steps=4, backend="fft")
    with pytest.raises(DPConfigError, match="backend='auto'"):
        TreeAggregation().stream(_source(), scale=1.0, num_steps=4, backend="history")


@pytest.mark.parametrize("name, backend", CASES)
def test_no_step_goes_without_noise(name, backend):
    """Beyond the steps it was made for, a stream ends; it never adds zeros."""
    stream = _stream(name, backend)
    assert (_run(stream, range(N)) != 0).any(dim=1).all()
    with pytest.raises(DPBudgetExceeded, match="made for 23 steps"):
        stream.add_(_sums(), N)


class _TwoRows(NoiseStrategy):
    name = "test two rows a step"
    is_square = False

    def strategy_matrix(self, n: int) -> np.ndarray:
        return np.repeat(np.eye(n), 2, axis=0) / np.sqrt(2)

    def noising_matrix(self, n: int) -> np.ndarray:
        return self.strategy_matrix(n).T

    def parameters(self) -> dict[str, Any]:
        return {"name": self.name}


def test_what_has_more_draws_than_steps_is_refused():
    with pytest.raises(DPConfigError, match="restart_every"):
        _TwoRows().stream(_source(), scale=1.0, num_steps=16)


def test_noise_that_grows_is_refused():
    with pytest.raises(DPConfigError, match="grows"):
        BandedToeplitz((1.0, 3.0)).stream(_source(), scale=1.0, num_steps=60)
    loud_inside = np.eye(4)
    loud_inside[2, 1] = -1e5
    with pytest.raises(DPConfigError, match="grows"):
        DenseStrategy(loud_inside).stream(_source(), scale=1.0, num_steps=4)


def test_a_long_tree_needs_no_matrix():
    sums = _sums()
    TreeAggregation().stream(_source(), scale=1.0, num_steps=1_000_000).add_(sums, 0)
    assert all((total != 0).all() for total in sums.values())
