"""The fast tier: cheap tests, a rotating sample of large parametrisations, and no test that grew in silence."""

from __future__ import annotations

import pytest

from tests import costs

RECORD = {"t.py::cheap": 0.01, "t.py::many": 0.02, "t.py::dear": 9.0}
CASES = ["t.py::cheap", "t.py::dear", "t.py::new", *(f"t.py::many[{i}]" for i in range(50))]


def test_what_is_dear_waits_for_the_whole_suite():
    found = costs.chosen(CASES, RECORD, day=1)
    assert {"t.py::cheap", "t.py::new"} <= found and "t.py::dear" not in found
    assert not costs.chosen(["t.py::dear@group"], RECORD, day=1)


def test_every_case_of_a_large_parametrisation_has_its_day():
    days = [costs.chosen(CASES, RECORD, day=day) for day in range(200)]
    assert all(sum("many" in case for case in found) == costs.SAMPLE for found in days)
    assert set().union(*days) == set(CASES) - {"t.py::dear"}


def test_the_tier_fits_its_time():
    record = {f"t.py::t{i}": 0.3 for i in range(5000)}
    found = costs.chosen(list(record), record, day=1)
    assert costs.SECONDS * 0.99 <= 0.3 * len(found) + 0.3 and 0.3 * len(found) <= costs.SECONDS


@pytest.mark.parametrize("name", ["t.py::many[3]", "t.py::unknown"])
def test_a_slow_test_fails_with_or_without_a_record(name):
    assert not costs.is_too_slow(name, 2.9, RECORD)
    assert "make costs" in costs.is_too_slow(name, 3.1, RECORD)


def test_the_record_names_tests_as_pytest_does(tmp_path, request):
    report = tmp_path / "junit.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="tests.test_costs" name="test_x[1]" time="0.5"/>'
        '<testcase classname="tests.test_costs" name="test_x[2]" time="1.25"/></testsuite></testsuites>'
    )
    assert costs.from_junit(report) == {"tests/test_costs.py::test_x": 1.25}
    assert request.node.nodeid.startswith("tests/test_costs.py::")


def test_the_record_of_the_suite_is_there():
    assert len(costs.recorded()) > 1000
