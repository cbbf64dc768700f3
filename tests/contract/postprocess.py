"""What every map of released gradients has to keep: shapes, purity, state, words."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable

import torch

from hf_dpopt.common.types import Released
from hf_dpopt.postprocess import Filter, Postprocess

SHAPES = {"b.weight": (3, 5), "a.bias": (4,), "scalar": ()}
NUM_STEPS = 9


def releases(seed: int = 1) -> list[Released]:
    """What the steps of a run released."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Released({name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()})
        for _ in range(NUM_STEPS)
    ]


def check_map(make: Callable[[], Postprocess]) -> None:
    """Names, shapes and dtype stay; the same releases give the same bits; a filter changes none that it is given."""
    runs = []
    for _ in range(2):
        stage, made = make(), []
        for released in releases():
            before = copy.deepcopy(released)
            given = released
            out = stage(released)
            assert {n: (t.shape, t.dtype) for n, t in out.items()} == {
                n: (t.shape, t.dtype) for n, t in before.items()
            }
            assert all(torch.isfinite(t).all() for t in out.values())
            if isinstance(stage, Filter):
                assert all(torch.equal(given[name], before[name]) for name in before), "it changed its input"
            made.append({name: tensor.clone() for name, tensor in out.items()})
            if isinstance(stage, Filter) and runs:  # neither what it was given nor what it gave is part of its state
                for tensor in (*given.values(), *out.values()):
                    tensor.fill_(7.0)
        runs.append(made)
    for first, second in zip(*runs, strict=True):
        assert all(torch.equal(first[name], second[name]) for name in first)


def check_state(make: Callable[[], Postprocess]) -> None:
    """A stage that reads its state from a checkpoint goes on bit for bit, at every step."""
    whole = make()
    outs = [{n: t.clone() for n, t in whole(released).items()} for released in releases()]
    for stop in range(NUM_STEPS):
        begun = make()
        for released in releases()[:stop]:
            begun(released)
        file = io.BytesIO()
        torch.save(begun.state_dict(), file)
        for released in releases(2)[:2]:
            begun(released)  # what the lost process still did changes nothing
        file.seek(0)
        resumed = make()
        resumed.load_state_dict(torch.load(file, weights_only=True))
        for released, expected in zip(releases()[stop:], outs[stop:], strict=True):
            got = resumed(released)
            assert all(torch.equal(got[name], expected[name]) for name in expected)


def check_words(make: Callable[[], Postprocess]) -> None:
    """The report names it, with options that JSON can hold."""
    stage = make()
    assert json.loads(json.dumps(stage.parameters())) is not None


CHECKS = (check_map, check_state, check_words)
