"""Values that no option expects, and those that some do."""

from __future__ import annotations

import decimal
import math
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 3, 7, 99, 10**6, 10**9, 10**12, 2**31, 2**63, 10**30, -(10**9), 0.0, -0.0, 0.5, 0.999, 1.5, 1e-300,
    5e-324, 1e-9, 1e9, 1e300, -1e300, math.inf, -math.inf, math.nan, True, False,
)  # fmt: skip
TEXTS: tuple[Any, ...] = (
    "", " ", "8", "nan", "inf", "1e9", "-1", "abc", "none", "None", "auto", "ε∞", "a" * 5000, "\x00", "a\nb", "../..",
    "{", "[]", "{}", "null", '{"a": 1}', "'; DROP", "True",
)  # fmt: skip
OBJECTS: tuple[Any, ...] = (
    None, [], [1], [None], {}, {"a": 1}, {1: 2}, (), (1, 2), set(), b"x", object(), len, int, 1j, decimal.Decimal("NaN"),
    np.float64("nan"), np.int64(3), np.float32(0.5), np.zeros(0), np.ones(3), torch.tensor(1.0), torch.ones(2, 2),
    range(3),
)  # fmt: skip
BAD_JSON = (
    "{", "}", '{"a":}', "[1, 2]", '"x"', "null", "1", "nan", '{"num_buffers": NaN}', '{"delay": 1e999}',
    '{"delay": 5} x', "{'delay': 5}", '{"delay": [[[[[[[[]]]]]]]]}', "[" * 3000, '{"a": ' * 2000, "\ufeff{}", "{} {}",
    '{"delay": 5, "delay": 6}', '{"\\u0000": 1}', "{true}", "   ", '{"clipping_norm": "5"}', '{"nu": -1e400}',
)  # fmt: skip


def anything() -> st.SearchStrategy[Any]:
    """A value of any kind, mostly numbers."""
    return st.one_of(
        st.sampled_from(NUMBERS), st.sampled_from(NUMBERS), st.sampled_from(TEXTS), st.sampled_from(OBJECTS),
        st.floats(), st.integers(), st.text(max_size=8),
    )  # fmt: skip


def numbers() -> st.SearchStrategy[Any]:
    """A number, plain or not."""
    return st.one_of(st.sampled_from(NUMBERS), st.floats(), st.integers(-3, 40))


def shown(value: Any) -> str:
    """A value as a line of a report, short."""
    text = " ".join(repr(value).split())
    return text if len(text) < 200 else f"{text[:120]} .. ({len(text)} characters)"
