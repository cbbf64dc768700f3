"""Every registered noise mechanism keeps the contract; a new one is found by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise import (
    MECHANISMS,
    BandedToeplitz,
    IdentityStrategy,
    Mechanism,
    NoiseMechanism,
    NoiseStrategy,
    Restarted,
)
from hf_dpopt.noise.streams import RecurrentStream
from tests.contract import noise


@pytest.mark.parametrize("check", noise.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("name", MECHANISMS)
def test_mechanism(name, check):
    check(name)


class _Claiming(NoiseStrategy):
    """A full matrix that can say anything of itself."""

    def strategy_matrix(self, n):
        return np.tril(np.ones((n, n))) + np.eye(n) * n  # of another run, if it is cut short

    def parameters(self):
        return {"name": "test claiming"}


CLAIMS = {"is_independent": True, "num_bands": 2, "anytime": True, "is_square": False}


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_strategy_that_is_not_what_it_says_makes_no_noise(claim):
    """Samplers believe it: as independent noise it would have the epsilon of DP-SGD, with bands that of sampling."""
    lying = type("Lying", (_Claiming,), {claim: CLAIMS[claim]})()
    values = {"noise_multiplier": 1.0, "strategy_sensitivity": 1.0, "num_steps": 12}
    with pytest.raises(DPConfigError, match=f"says {claim}="):
        NoiseMechanism(strategy=lying, **values)
    honest = type("Honest", (_Claiming,), {"name": "test claiming"})()
    NoiseMechanism(strategy=honest, **values)


def test_a_strategy_without_a_name_is_refused(monkeypatch):
    nameless = Mechanism(name="nameless", tune=lambda setting: _Claiming(), sampler="fixed_order", summary="")
    monkeypatch.setitem(MECHANISMS, "nameless", nameless)
    with pytest.raises(DPConfigError, match="_Claiming, which has no name"):
        noise.plan_of("nameless")


def test_a_named_strategy_is_not_extended_under_its_name():
    with pytest.raises(TypeError, match="Mine needs a name of its own"):
        type("Mine", (IdentityStrategy,), {})


def test_a_copy_draws_no_row_of_the_next_copy():
    """Two rows a step would be drawn again by the next copy: the same noise, on two batches."""

    class Stream(RecurrentStream):
        def _add_to(self, total, name, tensor, t):
            for row in (2 * t, 2 * t + 1):
                total.add_(self._normal(total, tensor, row))

    class Greedy(BandedToeplitz):
        name = "test greedy"

        def _make_stream(self, source, backend, common):
            return Stream(self.coefs, source, **common)

    stream = Restarted(Greedy((1.0, 0.5)), 4).stream(noise.CountedSource(), scale=1.0, num_steps=8)
    stream.add_({"w": torch.zeros(3)}, 0)
    stream.add_({"w": torch.zeros(3)}, 1)
    with pytest.raises(DPConfigError, match="asked for row 4 of the noise"):
        stream.add_({"w": torch.zeros(3)}, 2)
