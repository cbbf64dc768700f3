"""A forked process that runs some tests over the package, a file of which may be mutated in memory.

The files on disk are never changed, so tests that start a new interpreter do not see the mutant.
"""

from __future__ import annotations

import dataclasses
import importlib.abc
import importlib.machinery
import importlib.util
import json
import linecache
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]
LONGEST_TEST = 20.0  # seconds of CPU that any test may take
SLOWER = 6.0  # times what it is taken for


@dataclasses.dataclass(frozen=True)
class Order:
    """Tests to run.

    Attributes:
        tests: functions, as ``file::name``, in the order in which they run.
        costs: seconds that a case of each is taken for; others count as cheap.
        cases: of a parametrisation that run, at most; None for all.
        seconds: limit of the sum of `costs`; the rest is not run.
        file, source: the file that is mutated, relative to the repository, and its text; None for no mutant.
        words: cases whose parameters have one of them run first.
        traced: folders and files of which the executed lines are recorded; empty for none.
        goes_on: whether to go on after a test that fails; no test has a limit of its time then.
    """

    tests: tuple[str, ...]
    costs: dict[str, float]
    cases: int | None = None
    seconds: float = 1e9
    file: str | None = None
    source: str | None = None
    words: tuple[str, ...] = ()
    traced: tuple[str, ...] = ()
    goes_on: bool = False


@dataclasses.dataclass
class Outcome:
    """What became of an order.

    Attributes:
        kind: "killed", "timed out", "survived", or "not covered" where there was no test to run.
        by: the test that failed, or what was going on when the time was over.
        why: the line of the error.
        passed: functions of which every case that ran was green.
        lines: function -> file -> lines that it executed; the name "" stands for imports and collection.
    """

    kind: str = "survived"
    by: str = ""
    why: str = ""
    passed: list[str] = dataclasses.field(default_factory=list)
    lines: dict[str, dict[str, list[int]]] = dataclasses.field(default_factory=dict)


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads one module from a text that is not on the disk."""

    def __init__(self, name: str, path: str, source: str):
        super().__init__(name, path)
        self.source = source

    def get_code(self, fullname: str) -> Any:
        return compile(self.source, self.path, "exec", dont_inherit=True)

    def get_source(self, fullname: str) -> str:
        return self.source


class _Mutated(importlib.abc.MetaPathFinder):
    """Finds the mutated module before Python finds the file."""

    def __init__(self, file: str, source: str):
        self.path, self.source = str(REPO / file), source
        self.name = ".".join(Path(file).with_suffix("").parts).removesuffix(".__init__")
        # kernels and compiled functions read their own text
        linecache.cache[self.path] = (len(source), None, source.splitlines(keepends=True), self.path)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != self.name:
            return None
        loader = _Loader(fullname, self.path, self.source)
        return importlib.util.spec_from_file_location(fullname, self.path, loader=loader)


class _Tracer:
    """Lines of the package that each test executes."""

    def __init__(self, traced: tuple[str, ...]):
        self.traced = tuple(str(REPO / name) for name in traced)
        self.lines: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        self.test = ""
        self._is_ours: dict[str, bool] = {}

    def call(self, frame: Any, event: str, arg: Any) -> Any:
        file = frame.f_code.co_filename
        ours = self._is_ours.get(file)
        if ours is None:
            ours = self._is_ours[file] = file.startswith(self.traced)
        if not ours:
            return None
        seen = self.lines[self.test][file]
        seen.add(frame.f_lineno)

        def line(frame: Any, event: str, arg: Any) -> Any:
            seen.add(frame.f_lineno)
            return line

        return line

    def result(self) -> dict[str, dict[str, list[int]]]:
        return {
            test: {str(Path(file).relative_to(REPO)): sorted(lines) for file, lines in files.items()}
            for test, files in self.lines.items()
        }


class _Plugin:
    """Chooses the cases, limits the time of each test, and notes what became of it."""

    def __init__(self, order: Order, pipe: int, tracer: _Tracer | None):
        self.order, self.pipe, self.tracer = order, pipe, tracer
        self.failed: set[str] = set()
        self.now = "collection"

    def say(self, **what: Any) -> None:
        os.write(self.pipe, (json.dumps(what) + "\n").encode())

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        place = {test: i for i, test in enumerate(self.order.tests)}
        cases: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in items:
            cases[_function(item.nodeid)].append(item)
        left, keep = self.order.seconds, list[pytest.Item]()
        for test in sorted((test for test in cases if test in place), key=place.__getitem__):
            some, cost = cases[test], max(self.order.costs.get(test, 0.1), 0.001)
            most = min(len(some), int(left / cost) if keep else max(1, int(left / cost)))
            if self.order.cases is not None:
                most = min(most, max(self.order.cases, int(1.0 / cost)))  # a second of each, where they are cheap
            if most > 0:
                some = _chosen(some, most, self.order.words)
                left -= cost * len(some)
                keep += some
        items[:] = keep

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        self.now = item.nodeid
        function = _function(item.nodeid)
        cost = self.order.costs.get(function, 1.0)
        if not self.order.goes_on:
            signal.setitimer(signal.ITIMER_PROF, max(LONGEST_TEST, SLOWER * cost))
        if self.tracer is not None:
            self.tracer.test = function
            sys.settrace(self.tracer.call)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            signal.setitimer(signal.ITIMER_PROF, 0.0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(_function(report.nodeid))
            self.say(kind="killed", by=report.nodeid, why=_reason(report))
        elif report.when == "teardown" and report.passed:
            self.say(passed=_function(report.nodeid))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.say(kind="killed", by=f"collection of {report.nodeid}", why=_reason(report))

    def pytest_internalerror(self, excrepr: Any) -> None:
        self.say(kind="killed", by=self.now, why=str(excrepr)[-200:])


def _chosen(cases: list[pytest.Item], most: int, words: tuple[str, ...]) -> list[pytest.Item]:
    """Cases whose parameters name what is mutated, then some of the others, evenly spaced."""
    near = [item for item in cases if any(word in item.nodeid.partition("[")[2].lower() for word in words)][:most]
    others, room = [item for item in cases if item not in near], most - len(near)
    return near + (others[:: -(-len(others) // room)] if others and room > 0 else [])


def _function(nodeid: str) -> str:
    return nodeid.partition("[")[0].partition("@")[0]


def _reason(report: Any) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    lines = [line for line in text.splitlines() if line.strip()] or [""]
    return (lines[0] if crash is not None else lines[-1]).strip()[:160]


def _work(order: Order, pipe: int) -> None:
    """Everything that happens in the forked process."""
    signal.signal(signal.SIGPROF, lambda *_: os._exit(3))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if order.file is not None and order.source is not None:
        sys.meta_path.insert(0, _Mutated(order.file, order.source))
    tracer = _Tracer(order.traced) if order.traced else None
    plugin = _Plugin(order, pipe, tracer)
    arguments = ["-q", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "timeout=0"]
    arguments += [] if order.goes_on else ["-x"]
    if not order.goes_on:
        signal.setitimer(signal.ITIMER_PROF, 3 * LONGEST_TEST)  # of imports and collection
    if tracer is not None:
        sys.settrace(tracer.call)
    code = pytest.main([*arguments, *order.tests], plugins=[plugin])
    plugin.say(lines=tracer.result() if tracer is not None else {})
    plugin.say(done=int(code))


def run(order: Order, log: Path, *, wall_seconds: float) -> Outcome:
    """Run an order in a forked process.

    Args:
        order: the tests, and the mutant.
        log: file for what pytest prints.
        wall_seconds: when the process is ended; tests are limited by the CPU time that they use, see `SLOWER`, which
            waiting does not use.
    """
    folder = Path(tempfile.mkdtemp(prefix="hf_dpopt_mutant_"))
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            os.close(ours)
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1), os.dup2(output, 2)
            os.environ["TMPDIR"], tempfile.tempdir = str(folder), str(folder)
            _work(order, theirs)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(theirs)
    said, is_late = _read(ours, time.monotonic() + wall_seconds)
    if is_late:
        _end(pid)
    _, status = os.waitpid(pid, 0)
    _end(pid)  # what it started
    shutil.rmtree(folder, ignore_errors=True)
    return _outcome([json.loads(line) for line in said.splitlines()], is_late or os.WEXITSTATUS(status) == 3)


def _end(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _read(pipe: int, until: float) -> tuple[str, bool]:
    """Everything that is written to a pipe until it is closed; and whether it was not in time."""
    parts = list[bytes]()
    with os.fdopen(pipe, "rb", buffering=0) as file:
        while (left := until - time.monotonic()) > 0:
            if select.select([file], [], [], left)[0]:
                part = file.read(1 << 16)
                if not part:
                    return b"".join(parts).decode(), False
                parts.append(part)
                if b'"done"' in part:  # what it has started may keep the pipe open
                    return b"".join(parts).decode(), False
    return b"".join(parts).decode().rpartition("\n")[0], True


def _outcome(said: list[dict[str, Any]], is_late: bool) -> Outcome:
    result = Outcome()
    failures = [line for line in said if line.get("kind") == "killed"]
    passed = dict.fromkeys(line["passed"] for line in said if "passed" in line)
    done = [line["done"] for line in said if "done" in line]
    if failures:
        result.kind, result.by, result.why = "killed", failures[0]["by"], failures[0]["why"]
        red = {_function(line["by"]) for line in failures}
        passed = {test: None for test in passed if test not in red}
    elif is_late:
        result.kind, result.by = "timed out", f"after {list(passed)[-1] if passed else 'collection'}"
    elif not done:
        result.kind, result.by = "killed", f"the process ended after {list(passed)[-1] if passed else 'nothing'}"
    elif not passed:
        result.kind, result.by = "not covered", f"pytest ended with {pytest.ExitCode(done[0]).name}"
    result.passed = list(passed)
    for line in said:
        result.lines.update(line.get("lines", {}))
    return result
