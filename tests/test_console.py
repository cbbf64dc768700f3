"""The package's own log: every line once, whatever the application and other libraries do to the root logger."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hf_dpopt.common.errors import DPBudgetExceeded, DPConfigError, DPStorageError, PrivacyWarning

SCRIPT = """
import logging
from hf_dpopt.common.log import logger, show
{before}
show(True)
{after}
logger.info("the plan")
"""
TO_CONSOLE = "logging.basicConfig(level=logging.INFO)"


def _lines(before: str = "", after: str = "") -> list[str]:
    script = SCRIPT.format(before=before, after=after)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    return done.stderr.splitlines()


def test_it_prints_where_nobody_set_up_logging():
    assert _lines() == ["[hf_dpopt] the plan"]


def test_it_prints_once_when_it_is_shown_twice():
    assert _lines(before="show(True)") == ["[hf_dpopt] the plan"]


FORMAT = "logging.basicConfig(level=logging.INFO, format='%(levelname)s %(message)s')"


def test_an_application_that_set_up_logging_has_it_its_way():
    assert _lines(before=TO_CONSOLE) == ["INFO:hf_dpopt:the plan"]


@pytest.mark.parametrize("order", ["before", "after"])
def test_an_application_with_a_format_of_its_own_has_it_its_way(order: str):
    assert _lines(**{order: FORMAT}) == ["INFO the plan"]


@pytest.mark.parametrize("call", ["logging.info('something')", TO_CONSOLE])
def test_a_library_that_logs_by_the_root_does_not_take_our_lines(call: str):
    """``logging.info(..)`` gives the root a handler in the default format, in the middle of a run."""
    assert _lines(after=call)[-1:] == ["[hf_dpopt] the plan"]
    assert sum("the plan" in line for line in _lines(after=call)) == 1


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_log_file_of_the_application_holds_the_lines(order: str, tmp_path: Path):
    file = tmp_path / "log"
    assert _lines(**{order: f"logging.basicConfig(filename={str(file)!r}, level=logging.INFO)"}) == [
        "[hf_dpopt] the plan"
    ]
    assert file.read_text().splitlines() == ["INFO:hf_dpopt:the plan"]


def test_a_handler_of_the_applications_own_for_this_log_is_enough():
    assert _lines(after="logger.addHandler(logging.StreamHandler())") == ["the plan"]


def test_other_processes_than_the_first_are_quiet():
    assert _lines(after="show(False)") == []


def test_a_notebook_prints_a_refusal_as_one_line():
    """IPython prints what `_render_traceback_` returns in place of the traceback; warnings it prints as ever."""
    for kind in (DPConfigError, DPBudgetExceeded, DPStorageError):
        assert kind("30 steps are\n charged")._render_traceback_() == [f"{kind.__name__}: 30 steps are charged"]
    assert not hasattr(PrivacyWarning, "_render_traceback_")
