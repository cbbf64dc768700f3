"""The package's own log: once on every line, whatever other libraries do to the root logger."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import logging
from hf_dpopt.common.log import logger, show
{before}
show(True)
{after}
logger.info("the plan")
"""


def _lines(before: str = "", after: str = "") -> list[str]:
    script = SCRIPT.format(before=before, after=after)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    return done.stderr.splitlines()


def test_a_root_handler_that_comes_later_repeats_nothing():
    assert _lines(after="logging.basicConfig(level=logging.INFO)") == ["[hf_dpopt] the plan"]


def test_an_application_that_set_up_logging_before_has_it_its_way():
    assert _lines(before="logging.basicConfig(level=logging.INFO)") == ["INFO:hf_dpopt:the plan"]
