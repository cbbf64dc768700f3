"""The one way to plant a fault: change the text of a file in a copy of the checkout, and fork a process that runs there.

Forked processes inherit the libraries, which take seconds to import, and import the package and its tests from the
copy; so do the processes that they start.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]
COPIED = ("hf_dpopt", "tests", "recipes", "docs", "benchmarks", "pyproject.toml", "README.md", "constraints.txt")


@dataclasses.dataclass(frozen=True)
class Fault:
    """One change of the package that leaves it running and its claim as it was, and what has to find it.

    Attributes:
        what: the fault, in words.
        file: in which it is planted, from the root of the checkout.
        old: text that is there exactly once.
        new: what it becomes.
        caught_by: tests (pytest's names) of which one at least turns red.
        finding: beginning of the name of the audit's finding that sees it; empty if no audit can.
        settings: what is audited.
        num_ranks: processes of the audit, of which one has to see it.
    """

    what: str
    file: str
    old: str
    new: str
    caught_by: tuple[str, ...] = ()
    finding: str = ""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    num_ranks: int = 1

    def planted(self, source: str) -> str:
        """Return the text of the file with the fault in it.

        Raises:
            ValueError: if the text to replace is not there exactly once.
        """
        if source.count(self.old) != 1:
            raise ValueError(
                f"{self.what!r}: {self.old!r} is {source.count(self.old)} times in {self.file}, not once."
            )
        return source.replace(self.old, self.new)


class Copy:
    """A copy of the checkout."""

    def __init__(self, folder: Path):
        self.folder = folder
        for name in COPIED:
            if (REPO / name).is_dir():
                shutil.copytree(REPO / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(REPO / name, folder / name)

    @contextlib.contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        """Plant a fault, and give the file its text back."""
        path = self.folder / fault.file
        sound = path.read_text(encoding="utf-8")
        path.write_text(fault.planted(sound), encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(sound, encoding="utf-8")

    def run(self, work: Callable[[], Any]) -> Any:
        """Return what a function returns in a forked process, as JSON has it.

        Args:
            work: imports what it needs of the package and its tests itself.

        Raises:
            RuntimeError: if the process ended in another way; the message is the end of what it printed.
        """
        log, result = self.folder / "process.log", self.folder / "result.json"
        result.unlink(missing_ok=True)
        process = os.fork()
        if process == 0:
            try:
                self._enter(log)
                result.write_text(json.dumps(work()))
            except BaseException:
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stdout.flush()
                os._exit(0)
        os.waitpid(process, 0)
        if not result.exists():
            raise RuntimeError(log.read_text(encoding="utf-8")[-4000:])
        return json.loads(result.read_text())

    def _enter(self, log: Path) -> None:
        into = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(into, 1)
        os.dup2(into, 2)
        for name in [name for name in sys.modules if name.split(".")[0] in ("hf_dpopt", "tests", "recipes")]:
            del sys.modules[name]
        sys.path[:] = [str(self.folder), *(p for p in sys.path if Path(p or ".").resolve() != REPO)]
        sys.dont_write_bytecode = True
        os.chdir(self.folder)
        os.environ["PYTHONPATH"] = str(self.folder)  # of the processes that are started
        tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(dir=self.folder)

    def red(self, tests: Iterable[str], *options: str) -> list[str]:
        """Return the names of the tests that fail, without their parameters."""
        arguments = ["-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", "-o", "timeout=0", *options, *tests]
        ended = self.run(lambda: int(pytest.main(arguments)))
        told = (self.folder / "process.log").read_text(encoding="utf-8")
        if ended not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED):
            raise RuntimeError(f"pytest ended with {ended}:\n{told[-4000:]}")
        return list(dict.fromkeys(re.findall(r"^(?:FAILED|ERROR) ([^\s\[]+)", told, flags=re.MULTILINE)))


@contextlib.contextmanager
def copy() -> Iterator[Copy]:
    """A copy of the checkout, in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="hf_dpopt_faults_") as folder:
        yield Copy(Path(folder))
