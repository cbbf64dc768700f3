"""Outcome of a verification: one check a line, and what all of them say together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

OK = "ok"
FAILED = "FAILED"
NOT_CHECKED = "not checked"

EPSILON = "epsilon"  # beginning of the names of the checks that recompute it
SIMULATION = "simulation"  # end of the names of those that draw samples
# What libraries raise for numbers that no run has: they are a failure of the claim, not of this program.
UNCOMPUTABLE = (ArithmeticError, ValueError, TypeError, IndexError, MemoryError, AssertionError)


@dataclasses.dataclass(frozen=True)
class Check:
    """Outcome of one check.

    Attributes:
        name: what was looked at.
        status: `OK`, `FAILED` or `NOT_CHECKED`.
        detail: what was found, in one line.
        numbers: values that a program may want, JSON-able; empty for most checks.
    """

    name: str
    status: str
    detail: str
    numbers: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.status:<12} {self.name}: {_in_print(self.detail)}"


def _in_print(text: str) -> str:
    """The text in one line, without characters that steer a terminal: the files that are quoted are not trusted."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


class Contradiction(Exception):
    """The files say something that cannot be true; the message says why."""


class Unknown(Exception):
    """The files name something that is not verified here; the message says what."""


class Inapplicable(Exception):
    """The check is one for other runs; nothing is left open by leaving it out."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """All checks of one folder, in the order in which they were made."""

    checks: tuple[Check, ...]

    @property
    def has_failed(self) -> bool:
        """Whether a check failed."""
        return any(check.status == FAILED for check in self.checks)

    @property
    def num_open(self) -> int:
        """Number of checks that could not be made."""
        return sum(check.status == NOT_CHECKED for check in self.checks)

    @property
    def has_epsilon(self) -> bool:
        """Whether an independent computation supports every epsilon that is part of the claim."""
        claimed = {check.numbers["claim"] for check in self.checks if "claim" in check.numbers}
        return bool(claimed) and claimed == {c.numbers["claim"] for c in self.checks if c.numbers.get("supports")}

    def exit_code(self, *, is_strict: bool) -> int:
        """Exit code: 0 verified; 1 a check failed, or with `is_strict` was left open; 3 nothing supports epsilon."""
        if self.has_failed or (is_strict and self.num_open):
            return 1
        return 0 if self.has_epsilon else 3

    @property
    def verdict(self) -> str:
        """Summary of all checks, in one line."""
        if self.has_failed:
            failed = ", ".join(check.name for check in self.checks if check.status == FAILED)
            return f"FAILED: {failed}. Do not rely on this claim."
        left = f"; {self.num_open} not checked, see above" if self.num_open else ""
        if not self.has_epsilon:
            return f"NOT VERIFIED: no independent computation supports epsilon{left}."
        drawn = any(SIMULATION in check.name and check.numbers.get("supports") for check in self.checks)
        how = ", by a simulation that is no proof" if drawn else ""
        return f"verified: epsilon follows from what the files say{how}{left}. That this code ran is not shown."

    def public_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "verdict": self.verdict,
            "failed": self.has_failed,
            "epsilon_supported": self.has_epsilon and not self.has_failed,
            "not_checked": self.num_open,
            "checks": [dataclasses.asdict(check) for check in self.checks],
        }


def attempt(name: str, look: Callable[..., str | list[Check]], *args: Any, **numbers: Any) -> list[Check]:
    """Make a check, or several.

    Args:
        name: name of the check, where `look` makes one, or none.
        look: returns what it found or the checks that it made, or raises `Contradiction`, `Unknown` or `Inapplicable`.
        args: what it looks at.
        numbers: values of the check.
    """
    try:
        found = look(*args)
        return found if isinstance(found, list) else [Check(name, OK, found, numbers)]
    except Inapplicable:
        return []
    except Unknown as error:
        return [Check(name, NOT_CHECKED, str(error), numbers)]
    except Contradiction as error:
        return [Check(name, FAILED, str(error), numbers)]
    except UNCOMPUTABLE as error:
        detail = f"its numbers cannot be computed with ({type(error).__name__}: {error})"
        return [Check(name, FAILED, detail, numbers)]
