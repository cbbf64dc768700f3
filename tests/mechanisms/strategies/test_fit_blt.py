"""Buffers in place of nu-DP-FTRL: what the replacement costs, and where it is refused."""

from __future__ import annotations

import pytest

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise import BufferedLinearToeplitz, NuDPFTRL, Participation, fit_blt


@pytest.mark.parametrize(
    "n, participation, nu, ratios",
    [
        (2052, Participation(6, 342), 0.0016, {2: 0.9924, 3: 1.0009, 4: 1.0002, 6: 1.0001, 8: 0.99999}),
        (2052, Participation(), 3.6e-4, {3: 1.0049, 4: 1.0009, 5: 0.99995}),
        (10_000, Participation(6, 1666), 3.3e-4, {4: 1.0010, 6: 0.9999}),
    ],
)
def test_loss_beside_that_of_nu_dp_ftrl(n, participation, nu, ratios):
    exact = NuDPFTRL(nu).mean_loss(n, participation)
    for num_buffers, want in ratios.items():
        fitted = fit_blt(nu, num_buffers)
        assert len(fitted.poles) == num_buffers
        assert fitted.mean_loss(n, participation) / exact == pytest.approx(want, abs=5.1e-5)


@pytest.mark.parametrize("nu", [1e-300, 1e-8, 1e-5, 0.1, 0.9, 0.999])
def test_any_damping(nu):
    fitted, participation = fit_blt(nu, num_steps=2000), Participation(4, 500)
    assert isinstance(fitted, BufferedLinearToeplitz)  # which is valid by construction
    ratio = fitted.mean_loss(2000, participation) / NuDPFTRL(nu).mean_loss(2000, participation)
    assert ratio == pytest.approx(1.0, abs=5e-3)


@pytest.mark.parametrize(
    "arguments, mend",
    [
        ({"nu": 1.0}, "IdentityStrategy"),
        ({"nu": float("nan")}, r"\[0, 1\)"),
        ({"nu": 0.0}, "num_steps"),
        ({"nu": 0.1, "num_buffers": 0}, "num_buffers=0"),
        ({"nu": 0.1, "num_steps": 0}, "num_steps=0"),
    ],
)
def test_refusals(arguments, mend):
    with pytest.raises(DPConfigError, match=mend):
        fit_blt(**arguments)
