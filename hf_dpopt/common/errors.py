"""Errors a user can meet, and tables of refusals. Each says what was wrong, what is allowed, and how to fix it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec

LONGEST = 1000  # characters of a message; what is longer was quoted from somewhere, and loses its middle


def one_line(message: str) -> str:
    """The message as one line that can be read, whatever value or foreign error it quotes."""
    line = " ".join(message.split()) if any(sign in message for sign in "\n\r") else message
    return line if len(line) <= LONGEST else f"{line[: LONGEST * 2 // 3]} .. {line[-LONGEST // 4 :]}"


def shown(value: Any, longest: int = 80) -> str:
    """A value as it is quoted in a message: its `repr` on one line, and its type alone where that is of no use."""
    try:
        text = one_line(repr(value))
    except Exception:  # of an object of the user's
        return f"<{type(value).__name__}>"
    return text if len(text) <= longest else f"{text[: longest - 20]} .. ({type(value).__name__})"


class OneLineError(Exception):
    """An error whose message is one line, and which a notebook prints as one line."""

    def __init__(self, message: str = ""):
        super().__init__(one_line(message))

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook prints in place of the traceback; `%debug` still finds its frames."""
        return [f"{type(self).__name__}: {self}"]


class DPConfigError(OneLineError, ValueError):
    """A setting, a file or a combination of both under which the privacy statement would be false or undefined."""


class UnsupportedModuleError(DPConfigError):
    """A trainable parameter whose per-record gradient cannot be bounded; the message names it."""


class DPStorageError(DPConfigError):
    """A disk that is full, read-only or failing. What was charged is on the disk, and the run can be resumed."""


class DPBudgetExceeded(OneLineError, RuntimeError):
    """The next step (or the requested run) would spend more than `target_epsilon`; raised before the step runs."""


class PrivacyWarning(UserWarning):
    """A privacy setting that is allowed but weaker than it looks."""


P = ParamSpec("P")
Refusal = tuple[bool, str]  # (does it apply, what is wrong and how to fix it)


def refuses(table: Callable[P, Iterator[Refusal]], *, error: type[DPConfigError] = DPConfigError) -> Callable[P, None]:
    """Make a table of refusals the check that raises the first of them which applies."""

    @functools.wraps(table)
    def check(*args: P.args, **kwargs: P.kwargs) -> None:
        for applies, message in table(*args, **kwargs):
            if applies:
                raise error(message)

    return check
