"""Participation of a record in a run: how often, and how far apart."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from hf_dpopt.common.checks import check_count
from hf_dpopt.common.errors import DPConfigError

Kind = Literal["min_sep", "fixed_epoch"]


@dataclasses.dataclass(frozen=True)
class Participation:
    """The participation patterns that a sampler promises: sets of steps in which one record may be used.

    Args:
        max_participations: k, largest number of steps with the record; >= 1.
        min_sep: b, any two of them are at least this many steps apart; >= 1. 1 means that every step is allowed.
        kind: "min_sep" for every pattern within k and b; "fixed_epoch" for ``o, o + b, o + 2 b, ..`` alone, with any
            offset ``o < b`` (one order for all epochs of b steps).

    Raises:
        DPConfigError: for counts below 1 or an unknown kind.
    """

    max_participations: int = 1
    min_sep: int = 1
    kind: Kind = "min_sep"

    def __post_init__(self) -> None:
        check_count("max_participations", self.max_participations)
        check_count("min_sep", self.min_sep)
        if self.kind not in get_args(Kind):
            raise DPConfigError(f"kind={self.kind!r} is unknown. Use 'min_sep' or 'fixed_epoch'.")

    def fits(self, n: int) -> int:
        """Largest number of participations that fit into n steps."""
        return min(self.max_participations, -(-n // self.min_sep))

    def check(self, n: int) -> None:
        """Refuse more participations than n steps have room for: somebody counted epochs or steps wrong."""
        if self.fits(n) < self.max_participations:
            raise DPConfigError(
                f"{self.max_participations} participations at least {self.min_sep} steps apart do not fit into {n} "
                f"steps. Use max_participations <= {self.fits(n)}, a smaller min_sep, or more steps."
            )
