"""The package's own log: every line once, whatever the application and other libraries do to the root logger."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_dpopt.common.errors import DPBudgetExceeded, DPConfigError, DPStorageError, PrivacyWarning
from tests.helpers import tiny

SCRIPT = """
import logging
from hf_dpopt.common.log import logger, show
{before}
show(True)
{after}
logger.info("the plan")
"""
TO_CONSOLE = "logging.basicConfig(level=logging.INFO)"
FORMAT = "logging.basicConfig(level=logging.INFO, format='%(levelname)s %(message)s')"


def _lines(before: str = "", after: str = "") -> list[str]:
    script = SCRIPT.format(before=before, after=after)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    return done.stderr.splitlines()


PLAIN = ["[hf_dpopt] the plan"]


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        ("", "", PLAIN),
        ("show(True)", "", PLAIN),
        (TO_CONSOLE, "", ["INFO:hf_dpopt:the plan"]),  # an application that set up logging has it its way
        ("", FORMAT, ["INFO the plan"]),
        (
            "",
            TO_CONSOLE,
            PLAIN,
        ),  # `logging.info(..)` of any library gives the root this handler, in the middle of a run
        ("", "show(False)", []),  # another process than the first
    ],
)
def test_every_line_is_printed_once(before: str, after: str, lines: list[str]):
    assert _lines(before, after) == lines


def test_a_log_file_of_the_application_holds_the_lines(tmp_path: Path):
    file = tmp_path / "log"
    assert _lines(after=f"logging.basicConfig(filename={str(file)!r}, level=logging.INFO)") == PLAIN
    assert file.read_text().splitlines() == ["INFO:hf_dpopt:the plan"]


def test_a_notebook_prints_a_refusal_as_one_line():
    """IPython prints what `_render_traceback_` returns in place of the traceback; warnings it prints as ever."""
    for kind in (DPConfigError, DPBudgetExceeded, DPStorageError):
        assert kind("30 steps are\n charged")._render_traceback_() == [f"{kind.__name__}: 30 steps are charged"]
    assert not hasattr(PrivacyWarning, "_render_traceback_")


RUNS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "everything": dict(
        noise_mechanism="nu_dpftrl", noise_kwargs='{"nu": 0.1}', filter="momentum", average_iterate="tail",
        preconditioner="dp2_rmsprop", optim="sgd", preconditioner_kwargs='{"delay": 2}', log_private_metrics=0.02, save_strategy="steps",
    ),
    "users": dict(
        privacy_unit="user", user_id_column="author", records_per_user=2,
        train_dataset=[{**record, "author": i // 2} for i, record in enumerate(tiny.records(200))],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", RUNS)
def test_the_log_before_the_first_step_is_short(tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture) -> None:
    given = dict(noise_multiplier=None, target_epsilon=8.0, skip_self_check=False, train_dataset=tiny.records(200))
    seen: list[str] = []
    before = tiny.At("step_begin", lambda state, model: seen.extend(r.getMessage() for r in caplog.records), step=1)
    run = tiny.trainer(tmp_path / "out", callbacks=[before], **given | RUNS[case])
    run.train()
    assert 0 < len(seen) <= 10 and not any("\n" in line for line in seen), seen
    first = next(line for line in seen if line.startswith("Private training:"))
    unit = "user (" if case == "users" else "record ("
    assert f"epsilon {run.plan.epsilon():.4g}" in first and f"each {unit}{run.plan.adjacency})" in first
    keys = Path(first.rsplit("Keys, to be kept private: ", 1)[1])
    assert keys.parent.name == "runs" and not keys.is_relative_to(tmp_path / "out")


def test_the_rest_of_the_log_is_there_on_demand(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        tiny.trainer(tmp_path, log_level="debug", max_steps=1).train()
    assert "Clipping engine: book_keeping" in caplog.text
