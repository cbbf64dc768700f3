"""Refusals that preconditioners share."""

from __future__ import annotations

from typing import Any

from hf_dpopt.config import check_real
from hf_dpopt.errors import DPConfigError
from hf_dpopt.preclip.base import check_positive
from hf_dpopt.preclip.second_moments import RULES


def check_moment(second_moment: Any, beta: Any, eps: Any, factored: Any) -> None:
    """Refuses options of a second moment that are out of range; an eps of None passes."""
    if second_moment not in RULES:
        raise DPConfigError(f"second_moment={second_moment!r} is unknown. Use one of: {', '.join(map(repr, RULES))}.")
    check_real("beta", beta, "a number in [0, 1); 0.9 is usual")
    if not 0 <= beta < 1:
        raise DPConfigError(f"beta={beta} is outside [0, 1). Use 0.9, or 0 to forget earlier phases.")
    check_positive(eps=eps)
    if not isinstance(factored, bool):
        raise DPConfigError(f"factored={factored!r} is neither true nor false.")
