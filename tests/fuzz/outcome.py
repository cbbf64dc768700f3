"""One case, and how it ended."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hf_dpopt.common.errors import DPBudgetExceeded, DPConfigError
from hf_dpopt.run.ledger import LEDGER

SECONDS = 5.0  # of the processor, for one case after the imports; of the clock twelve times as many, for other work may run beside
LONGEST = 1200  # characters of a line that is still read
GOOD = ("ran", "refused", "usage")


@dataclasses.dataclass(frozen=True)
class Case:
    """Something a user might do.

    Attributes:
        family: row of the table.
        what: how it differs from what works, as text.
        run: does it in a folder; raises `SystemExit` where a command line would end.
        prepare: puts files into the folder first.
    """

    family: str
    what: str
    run: Callable[[Path], Any]
    prepare: Callable[[Path], Any] = lambda folder: None

    def __repr__(self) -> str:
        return f"{self.family}: {self.what}"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The end of a case.

    Attributes:
        kind: ran; refused (one line of ours); usage (argparse's, typer's or transformers' own refusal); raw (any other
            error, or several lines); charged (an error after a step was charged); hung.
        message: of the error; empty if it ran.
        where: the place in the code that raised a raw error, or was busy.
    """

    kind: str
    message: str = ""
    where: str = ""

    @property
    def is_good(self) -> bool:
        """Whether the promise was kept."""
        return self.kind in GOOD


class TimeUp(BaseException):
    """The case took too long; no `Exception`, which code under test may catch."""


def outcome_of(case: Case, folder: Path, *, seconds: float = SECONDS) -> Outcome:
    """Run a case in an empty folder, and say how it ended."""
    case.prepare(folder)
    before, spoken = charged(folder), io.StringIO()
    try:
        with quiet(spoken), _limit(seconds):
            case.run(folder)
        return Outcome("ran")
    except TimeUp as up:
        return Outcome("hung", f"more than {seconds:g} s", _place(up))
    except SystemExit as stop:
        found = _of_exit(stop.code, spoken.getvalue())
    except Exception as error:
        found = _of_error(error)
    return dataclasses.replace(found, kind="charged") if charged(folder) > before else found


def charged(folder: Path) -> int:
    """Steps in all ledgers below a folder, whether the files are whole or not."""
    files = [path for path in folder.rglob(Path(LEDGER).name) if path.is_file()]
    return sum(path.read_bytes().count(b'"kind":"step"') for path in files)


def _of_error(error: Exception) -> Outcome:
    message = str(error)
    if isinstance(error, DPConfigError | DPBudgetExceeded):
        return Outcome("refused" if _is_one_line(message) else "raw", message, _place(error))
    frames = traceback.extract_tb(error.__traceback__)
    file = frames[-1].filename if frames else ""
    said = (frames[-1].line or "") if frames else ""  # a refusal is a raise, not an operation that failed
    is_theirs = type(error) in (ValueError, ImportError) and "/transformers/" in file and said.startswith("raise ")
    return Outcome("usage" if is_theirs else "raw", f"{type(error).__name__}: {message}", _place(error))


def _of_exit(code: Any, said: str) -> Outcome:
    """What a command ended with: 0, 1 for findings it was asked for, 2 with a line that says what is wrong."""
    lines = [line for line in said.splitlines() if line.strip()]
    if "Traceback (most recent" in said:
        return Outcome("raw", said[-400:])
    if code in (0, None, 1):
        return Outcome("ran")
    ours = [line for line in lines if line.startswith("hf-dpopt: ") and not line.startswith("hf-dpopt: warning")]
    if code == 2 and len(ours) == 1 and _is_one_line(ours[0]):
        return Outcome("refused", ours[0])
    if code == 2 and lines and ("Error" in lines[-1] or "error:" in lines[-1]):
        return Outcome("usage", lines[-1])
    return Outcome("raw", f"exit {code}: {said[-400:]}")


def _is_one_line(message: str) -> bool:
    return 10 <= len(message) <= LONGEST and "\n" not in message and "Traceback" not in message


def _place(error: BaseException) -> str:
    """The innermost place in the library, and the innermost of all."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/hf_dpopt/" in frame.filename]
    named = [f"{Path(f.filename).parent.name}/{Path(f.filename).name}:{f.lineno}" for f in (*ours[-1:], *frames[-1:])]
    return " > ".join(dict.fromkeys(named))


@contextlib.contextmanager
def quiet(spoken: io.StringIO) -> Iterator[None]:
    """What is printed goes to `spoken`; logs and warnings go nowhere."""
    with contextlib.redirect_stdout(spoken), contextlib.redirect_stderr(spoken), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


@contextlib.contextmanager
def _limit(seconds: float) -> Iterator[None]:
    """Raise `TimeUp` after so many seconds of the processor, or twelve times as many of the clock.

    The processor's time is what a case costs on a machine of its own; the clock's finds what waits for ever.
    """

    def up(*_: Any) -> None:
        raise TimeUp

    before = {number: signal.signal(number, up) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, 12 * seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
