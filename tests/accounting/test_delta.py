"""The default delta: exact, below its bound, monotone, and what it tells about n."""

from __future__ import annotations

from decimal import ROUND_FLOOR, Decimal, localcontext

import numpy as np
import pytest

from hf_dpopt.accounting.delta import default_delta, resolve_delta, sizes_with_default
from hf_dpopt.common.errors import DPConfigError, PrivacyWarning


def by_definition(num_units: int) -> Decimal:
    """min(n^-1.1, 1/(10 n)) rounded down to one digit, in 60 decimal digits."""
    with localcontext() as context:
        context.prec = 60
        bound = min(Decimal(num_units) ** Decimal("-1.1"), 1 / (10 * Decimal(num_units)))
        return bound.quantize(Decimal(1).scaleb(bound.adjusted()), rounding=ROUND_FLOOR)


def sizes() -> list[int]:
    """Where digits change, and what lies between; up to 1e7, and beyond 1e10, where n^-1.1 is the smaller one."""
    powers = [10**k for k in range(8)]
    near = [n + d for k in powers for i in range(1, 10) for n in (i * k, -(-k // i)) for d in (-1, 0, 1)]
    drawn = np.random.default_rng(0).integers(1, 10**7, size=400).tolist()
    return sorted({n for n in [*near, *drawn, 67349, 10**10, 10**10 + 1, 3 * 10**12] if n >= 1})


@pytest.mark.parametrize(
    "num_units, delta",
    [(1, 0.1), (2, 0.05), (3, 0.03), (10, 0.01), (11, 9e-3), (100, 1e-3), (101, 9e-4), (1000, 1e-4), (10**4, 1e-5),
     (67349, 1e-6), (10**6, 1e-7), (10**10, 1e-11), (10**11, 7e-13)],
)  # fmt: skip
def test_known_defaults(num_units, delta):
    assert default_delta(num_units) == delta


def test_the_default_is_the_bound_rounded_down_and_never_increases():
    last = 1.0
    for n in sizes():
        delta = default_delta(n)
        assert Decimal(repr(delta)) == by_definition(n), n
        assert Decimal(repr(delta)) * 10 * n <= 1, n
        assert delta <= last, n
        last = delta


def test_what_the_default_tells_of_n():
    assert sizes_with_default(67349) == (50_001, 100_000)
    assert sizes_with_default(100_001) == (100_001, 111_111)
    for n in (1, 2, 7, 10, 99, 12_345, 10**7, 3 * 10**10):
        first, last = sizes_with_default(n)
        assert first <= n <= last and default_delta(first) == default_delta(last) == default_delta(n)
        assert default_delta(last + 1) < default_delta(n) and (
            first == 1 or default_delta(first - 1) > default_delta(n)
        )


def test_a_delta_above_one_over_n_is_refused_unless_it_is_allowed():
    assert resolve_delta(None, 100, allow_large=False) == 1e-3
    assert resolve_delta(0.0099, 100, allow_large=False) == 0.0099
    with pytest.raises(
        DPConfigError, match="delta=0.02 is above 1/n = 0.01 for n = 100 users.*Use target_delta <= 0.001"
    ):
        resolve_delta(0.02, 100, allow_large=False, unit="user")
    with pytest.warns(PrivacyWarning, match="above"):
        assert resolve_delta(0.02, 100, allow_large=True) == 0.02


def test_one_over_n_as_a_program_computes_it_is_not_above_it():
    for n in (3, 49, 67349, 10**6 + 3):
        with pytest.warns(PrivacyWarning, match="exactly 1/n"):
            assert resolve_delta(1 / n, n, allow_large=False) == 1 / n
