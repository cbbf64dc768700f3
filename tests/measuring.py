"""Processor time of tests, as properties in reports: what `tests.costs` records, on a busy machine as on an idle one."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from tests import tiers
from tests.costs import OWN, SHARED, Record, recorded


def cpu() -> float:
    """Seconds of processor time of this process and of those it started and waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


class Measuring:
    """A plugin of pytest: what each case costs, and each fixture that cases share."""

    def __init__(self) -> None:
        self._begun, self._of_call = 0.0, 0.0
        self._shared: dict[str, float] = {}
        self._record: Record = recorded()
        self._inside: list[float] = []  # seconds of the fixtures that the fixtures at work asked for

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        self._begun, self._shared = cpu(), {}
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
    ) -> Iterator[None]:
        if fixturedef.scope == "function":
            return (yield)
        begun = cpu()
        self._inside.append(0.0)
        try:
            return (yield)
        finally:
            seconds = cpu() - begun
            index = request.param_index if hasattr(request, "param") else None
            name = tiers.fixture_name(fixturedef.baseid, fixturedef.argname, index)
            self._shared[name] = seconds - self._inside.pop()
            if self._inside:
                self._inside[-1] += seconds

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        begun = cpu()
        try:
            return (yield)
        finally:
            self._of_call = cpu() - begun

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        report = yield
        if item.config.getoption("--tier", "all") == "fast" and call.when == "call" and report.passed:
            if reason := tiers.is_too_slow(item.nodeid, self._of_call, self._record):
                report.outcome, report.longrepr = "failed", reason
        if call.when == "teardown":
            own = cpu() - self._begun - sum(self._shared.values())
            report.user_properties.append((OWN, round(max(own, 0.0), 3)))
            report.user_properties += [
                (SHARED + name, round(seconds, 3)) for name, seconds in self._shared.items() if seconds > 0.05
            ]
        return report


def total(reports: list[pytest.TestReport]) -> float:
    """Seconds of processor time of all cases."""
    return sum(
        float(value) for report in reports for name, value in getattr(report, "user_properties", ()) if _counts(name)
    )


def _counts(name: str) -> bool:
    return name == OWN or name.startswith(SHARED)
