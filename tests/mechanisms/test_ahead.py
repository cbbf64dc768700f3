"""Noise drawn ahead by spare cores: the same values, paid for, bounded, and nowhere but in memory."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hf_dpopt import PrivacyConfig, PrivateRun, make_plan
from hf_dpopt.clipping import make_engine
from hf_dpopt.common.types import ClippedSums, JointSums
from hf_dpopt.noise import BandedToeplitz, NuDPFTRL, TreeAggregation, independent_noise
from hf_dpopt.noise.copies import Phased, Restarted
from hf_dpopt.randomness import ahead, chacha
from hf_dpopt.randomness.ahead import Ahead
from hf_dpopt.randomness.blocks import CHUNK, NormalsOfBlocks
from hf_dpopt.randomness.chacha import ChaCha20Gaussian
from hf_dpopt.randomness.cipher import FastGaussian
from hf_dpopt.randomness.spans import Span

KEY = bytes(range(32))
SIZES = {"a": (CHUNK + 100,), "b": (), "c": (3 * CHUNK,)}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch):
    """One of them for torch, the other to spare."""
    monkeypatch.setattr(ahead, "usable_cores", lambda: torch.get_num_threads() + 1)


def _finished(drawing: Ahead) -> Ahead:
    for thread in drawing._threads:
        thread.join()
    return drawing


def _stream(name: str, source: Any) -> Any:
    made: dict[str, Any] = {
        "banded": lambda: BandedToeplitz((1.0, 0.4, 0.2)).stream(source, scale=0.7, num_steps=9),
        "history": lambda: NuDPFTRL(0.1).stream(source, scale=0.7, num_steps=9, backend="history"),
        "drawn again": lambda: NuDPFTRL(0.1).stream(source, scale=0.7, num_steps=9, backend="regenerate"),
        "tree": lambda: TreeAggregation("honaker").stream(source, scale=0.7, num_steps=9),
        "copies": lambda: Restarted(BandedToeplitz((1.0, 0.4)), 2).stream(source, scale=0.7, num_steps=9),
        "phases": lambda: Phased(BandedToeplitz((1.0, 0.4)), (2, 1)).stream(source, scale=0.7, num_steps=9),
    }
    return made[name]() if name in made else independent_noise(1.0).stream(source, 0.7)


NAMES = ["independent", "banded", "history", "drawn again", "tree", "copies", "phases"]


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "later"])
@pytest.mark.parametrize("name", NAMES)
def test_it_changes_no_bit(name, waits):
    """However far the threads got: nothing was drawn ahead, a part, or all."""
    source = ChaCha20Gaussian(KEY)
    plain, early = _stream(name, ChaCha20Gaussian(KEY)), _stream(name, source)
    for step in range(5):
        early.draw_ahead(step)
        if waits and source._ahead is not None:
            _finished(source._ahead[1])
        want, got = ({n: torch.zeros(s) for n, s in SIZES.items()} for _ in range(2))
        plain.add_(want, step)
        early.add_(got, step)
        assert all(torch.equal(want[n], got[n]) for n in SIZES)
        assert source._ahead is None  # nothing is left for a checkpoint


@pytest.mark.parametrize("name", [n for n in NAMES if n != "tree"])
def test_what_was_drawn_is_what_is_added(name, monkeypatch):
    """After the first step, whose sizes nobody knows, the row of a step is drawn by the threads alone."""
    source = ChaCha20Gaussian(KEY)
    stream, main = _stream(name, source), threading.get_ident()
    drawn: list[tuple[bytes, int]] = []
    draw = NormalsOfBlocks.draw

    def seen(self, key, *where):
        drawn.append((key, threading.get_ident()))
        return draw(self, key, *where)

    monkeypatch.setattr(NormalsOfBlocks, "draw", seen)
    monkeypatch.setattr("hf_dpopt.randomness.blocks.usable_cores", lambda: 1)
    for step in range(4):
        drawn.clear()
        stream.draw_ahead(step)
        assert (source._ahead is None) == (step == 0)
        if source._ahead is not None:
            _finished(source._ahead[1])
        stream.add_({n: torch.zeros(s) for n, s in SIZES.items()}, step)
        mine = [who for key, who in drawn if key == source.step_key(step)]
        assert mine and (main in mine) == (step == 0)


def test_other_sums_than_expected_get_their_own_noise():
    """After a step of other shapes, or of a step that is not the one that was drawn."""
    source, plain = ChaCha20Gaussian(KEY), ChaCha20Gaussian(KEY)
    source.draw_ahead([Span(0, 0, 100), Span(1, 0, 50)], step=3, device=CPU)
    assert torch.equal(source.normal((70,), step=3, tensor=0), plain.normal((70,), step=3, tensor=0))
    assert torch.equal(source.normal((50,), step=4, tensor=1), plain.normal((50,), step=4, tensor=1))


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(ahead, "AHEAD_BYTES", 4 * (2 * CHUNK + 10))
    drawing = _finished(Ahead(KEY, [Span(0, 0, 5 * CHUNK), Span(1, 0, 10), Span(2, 0, 1)], 2))
    drawing.stop()
    assert drawing._normals.nbytes == 4 * (2 * CHUNK + 10)
    assert drawing.find(Span(0, CHUNK, CHUNK)) is not None and drawing.find(Span(0, 2 * CHUNK, CHUNK)) is None
    assert drawing.find(Span(1, 0, 10)) is not None and drawing.find(Span(2, 0, 1)) is None


def test_it_stops_after_the_chunk_it_is_at():
    drawing = Ahead(KEY, [Span(0, 0, 2000 * CHUNK)], 2)  # a second of drawing and more
    begun = time.perf_counter()
    drawing.stop()
    assert time.perf_counter() - begun < 1.0 and not any(thread.is_alive() for thread in drawing._threads)
    assert len(drawing._drawn) < 2000


def test_after_a_fork_the_child_draws_for_itself():
    """Threads do not survive a fork: a chunk may be half drawn there, and nobody would finish it."""
    source, num = ChaCha20Gaussian(KEY), 50 * CHUNK
    source.draw_ahead([Span(0, 0, num)], step=1, device=CPU)
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        right = torch.equal(
            source.normal((num,), step=1, tensor=0), ChaCha20Gaussian(KEY).normal((num,), step=1, tensor=0)
        )
        os.write(writer, b"right" if right else b"wrong")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 5) == b"right"
    source.forget()


def test_cores_that_torch_uses_are_not_spare(monkeypatch):
    monkeypatch.setattr(ahead, "usable_cores", lambda: torch.get_num_threads())
    source = ChaCha20Gaussian(KEY)
    source.draw_ahead([Span(0, 0, 100)], step=1, device=CPU)
    assert source._ahead is None
    monkeypatch.setattr(ahead, "usable_cores", lambda: 8)
    assert ahead.spare_cores(torch.device("cuda", 0)) == 7  # a thread feeds the device


def test_sources_without_addresses_draw_when_they_are_asked():
    stream = independent_noise(1.0).stream(FastGaussian(KEY), 1.0)
    for step in (1, 2):
        stream.draw_ahead(step)
        stream.add_(sums := {"a": torch.zeros(9)}, step)
    assert torch.equal(sums["a"], FastGaussian(KEY).normal((9,), step=2, tensor=0))


# --- in a run ---


@pytest.fixture
def run(tmp_path: Path) -> PrivateRun:
    config = PrivacyConfig(noise_multiplier=1.0, target_delta=1e-3, expected_batch_size=10)
    plan = make_plan(config, num_examples=40, num_steps=4)
    return PrivateRun(plan, output_dir=tmp_path / "out", private_state_dir=tmp_path / "keys")


def _sums() -> JointSums:
    return JointSums(ClippedSums({"weight": torch.zeros(5 * CHUNK)}))


def test_a_step_is_charged_before_its_noise_is_drawn(run, monkeypatch):
    engine, begun = make_engine(nn.Linear(1, 1), run.plan.clipper), []

    class Watched(Ahead):
        def __init__(self, key, *more):
            begun.append((key, run.ledger.chain(run.chain.chain_id).reached))
            super().__init__(key, *more)

    monkeypatch.setattr(chacha, "Ahead", Watched)
    source = ChaCha20Gaussian(run.chain.noise_key)
    for step in (1, 2, 3):
        run.begin(step, engine)
        run.release(_sums(), step)
    assert begun == [(source.step_key(step), step) for step in (2, 3)]  # no step, and no later one
    run.close()


def test_a_step_that_fails_leaves_no_threads(run):
    """What was drawn for it is dropped with the run, or by the step after."""
    engine = make_engine(nn.Linear(1, 1), run.plan.clipper)
    run.begin(1, engine)
    run.release(_sums(), 1)
    run.begin(2, engine)  # and the gradients fail
    run.begin(3, engine)
    released = run.release(_sums(), 3)["weight"]
    want = ChaCha20Gaussian(run.chain.noise_key).normal((5 * CHUNK,), step=3, tensor=0)
    assert torch.equal(released, want.div(10))
    run.begin(4, engine)
    threads = run.noise._source._ahead[1]._threads
    run.close(is_finished=False)
    assert run.noise._source._ahead is None and not any(thread.is_alive() for thread in threads)


def test_little_noise_is_drawn_without_a_thread(run):
    """A thread and its buffers cost more than the noise of a small model."""
    engine = make_engine(nn.Linear(1, 1), run.plan.clipper)
    for step in (1, 2, 3):
        run.begin(step, engine)
        assert run.noise._source._ahead is None
        run.release(JointSums(ClippedSums({"weight": torch.zeros(CHUNK)})), step)
    run.close()
