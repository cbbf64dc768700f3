"""The record of what tests cost: read from reports, kept for what a report does not cover, measured on any machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import costs, measuring

REPORT = """<testsuites><testsuite>
<testcase classname="tests.test_costs" name="test_x[1]" time="99"><properties>
  <property name="cpu" value="0.5" /><property name="cpu of tests/test_costs.py::made" value="4" /></properties></testcase>
<testcase classname="tests.test_costs" name="test_x[2]" time="0.7" />
<testcase classname="tests.test_costs.TestIt" name="test_y[a]@group" time="8" />
<testcase classname="tests.test_costs.TestIt" name="test_y[b]@group" time="0.1" />
<testcase classname="tests.test_costs" name="test_z" time="0.1"><skipped /></testcase>
<testcase classname="tests.test_costs" name="test_w" time="0.1"><error /></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def record(tmp_path: Path) -> costs.Record:
    report = tmp_path / "junit.xml"
    report.write_text(REPORT)
    return costs.from_junit(report)


def test_the_record_names_tests_as_pytest_does(record, request):
    assert record.cases["tests/test_costs.py::test_x"] == pytest.approx(0.6)  # processor time first, else wall time
    assert record.cases["tests/test_costs.py::TestIt::test_y"] == pytest.approx(4.05)
    assert request.node.nodeid.startswith("tests/test_costs.py::")
    assert costs.case_of("t.py::test[a@b]@group") == "t.py::test[a@b]" and costs.case_of("t.py::t@group") == "t.py::t"


def test_cases_far_from_the_others_have_a_record_of_their_own(record):
    assert record.of_case("tests/test_costs.py::TestIt::test_y[a]@group") == 8
    assert record.of_case("tests/test_costs.py::TestIt::test_y[b]") == 0.1
    assert record.of_case("tests/test_costs.py::test_x[1]") == pytest.approx(0.6)
    assert record.functions()["tests/test_costs.py::TestIt::test_y"] == 8


def test_what_was_skipped_or_never_ran_has_no_cost(record):
    assert record.of_case("tests/test_costs.py::test_z") is None
    assert record.of_case("tests/test_costs.py::test_w") is None


def test_fixtures_that_tests_share_are_recorded_apart(record):
    assert record.fixtures == {"tests/test_costs.py::made": 4.0}


def test_an_update_replaces_the_functions_that_it_covers_and_no_others(record):
    old = costs.Record(
        {"tests/test_costs.py::test_x": 1.0, "tests/test_costs.py::test_x[1]": 9.0, "tests/other.py::kept": 2.0},
        {"tests/other.py::f": 3.0, "tests/test_costs.py::made": 1.0},
    )
    new = old.updated(record)
    assert "tests/test_costs.py::test_x[1]" not in new.cases and new.cases["tests/other.py::kept"] == 2.0
    assert new.fixtures == {"tests/other.py::f": 3.0, "tests/test_costs.py::made": 4.0}


@pytest.mark.parametrize("options", [[], ["--anew"]])
def test_the_command_keeps_the_rest_unless_all_is_anew(record, tmp_path, monkeypatch, options):
    monkeypatch.setattr(costs, "FILE", tmp_path / "costs.json")
    costs.write(costs.Record({"tests/other.py::kept": 2.0}))
    costs.main([*options, str(tmp_path / "junit.xml")])
    assert ("tests/other.py::kept" in costs.recorded().cases) is (not options)
    assert costs.recorded().of_case("tests/test_costs.py::TestIt::test_y[a]") == 8


def test_a_record_is_read_as_it_was_written(record, tmp_path):
    costs.write(record, tmp_path / "costs.json")
    assert costs.recorded(tmp_path / "costs.json") == record


def test_the_record_of_the_suite_is_there():
    assert len(costs.recorded().functions()) > 1000


def test_waiting_costs_nothing_and_working_does():
    begun = measuring.cpu()
    time.sleep(0.2)
    slept = measuring.cpu() - begun
    while measuring.cpu() < begun + slept + 0.2:
        pass
    assert slept < 0.1


CONFTEST = """
from tests.measuring import Measuring

def pytest_configure(config):
    config.pluginmanager.register(Measuring())
"""
MODULE = """
import pytest
from tests.measuring import cpu

def work(seconds):
    end = cpu() + seconds
    while cpu() < end: pass

@pytest.fixture(scope="module")
def inner(): work(0.2)

@pytest.fixture(scope="module")
def made(request): request.getfixturevalue("inner"); work(0.4)

@pytest.fixture
def own(): work(0.3)

@pytest.mark.parametrize("n", [1, 2])
def test_it(made, own, n): work(0.1)
"""


def test_a_case_pays_for_itself_and_not_for_what_it_shares(tmp_path, repo):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(MODULE)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--rootdir=.",
        "--junitxml=j.xml",
        "test_it.py",
    ]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(repo)}, capture_output=True)
    assert done.returncode == 0, done.stdout.decode()
    record = costs.from_junit(tmp_path / "j.xml")
    assert record.cases["test_it.py::test_it"] == pytest.approx(0.4, abs=0.15)
    assert record.fixtures["test_it.py::made"] == pytest.approx(0.4, abs=0.15)
    assert record.fixtures["test_it.py::inner"] == pytest.approx(0.2, abs=0.15)
