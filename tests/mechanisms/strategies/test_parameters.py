"""Strategies to JSON and back."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise import NuDPFTRL
from hf_dpopt.noise import strategy as module
from hf_dpopt.noise.dense import DenseStrategy
from hf_dpopt.noise.strategy import from_parameters
from hf_dpopt.noise.tree import TreeAggregation
from tests.mechanisms.strategies.cases import strategies

STRATEGIES = [one for one in strategies(24).values() if one.is_whole_in_json] + [NuDPFTRL(1e-300), NuDPFTRL(0)]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
def test_round_trip(strategy):
    for written in (strategy.parameters(), json.loads(json.dumps(strategy.parameters()))):
        read = from_parameters(written)
        assert read == strategy and type(read) is type(strategy)
        assert read.digest() == strategy.digest()
        np.testing.assert_array_equal(read.noising_matrix(24), strategy.noising_matrix(24))


def test_every_strategy_that_can_be_read_was_read():
    whole = {name for name, strategy in module.strategies().items() if strategy.is_whole_in_json}
    assert {strategy.name for strategy in STRATEGIES} == {name for name in whole if not name.startswith("test ")}


EDITED = [
    {},
    [],
    {"name": "gaussian"},
    {"name": ["nu_dpftrl"]},
    {"name": "nu_dpftrl"},
    {"name": "nu_dpftrl", "nu": 1.5},
    {"name": "nu_dpftrl", "nu": "0.5"},
    {"name": "nu_dpftrl", "nu": True},
    {"name": "nu_dpftrl", "nu": 0.5, "num_steps": 3},
    {"name": "fft", "decoder": "best"},
    {"name": "fft", "decoder": ["optimal"]},
    {"name": "banded", "coefs": 3},
    {"name": "banded", "coefs": "31"},
    {"name": "banded", "coefs": [1.0, float("nan")]},
    {"name": "blt", "poles": [0.5], "zeros": [0.7]},
    {"name": "tree", "variant": "vanilla", "restart_every": 1.5, "tree_completion": True},
    {"name": "tree", "variant": ["vanilla"], "restart_every": None, "tree_completion": True},
    {"name": "tree", "variant": "vanilla", "restart_every": None},  # a default is no parameter
    {"name": "restarted", "base": {"name": "sparse"}, "every": 3},
    {"name": "restarted", "base": None, "every": 3},
    {"name": "restarted", "base": {"name": "identity"}, "every": 0},
    {"name": "restarted", "base": TreeAggregation().parameters(), "every": 3},
]


@pytest.mark.parametrize("edited", EDITED, ids=str)
def test_edited_parameters(edited):
    with pytest.raises(DPConfigError, match=r"Use|use|optimize_blt|\[0, 1\]|at least one"):
        from_parameters(edited)


def test_a_matrix_is_not_in_its_parameters():
    with pytest.raises(DPConfigError, match="do not contain its matrix"):
        from_parameters(DenseStrategy(np.eye(3)).parameters())
