"""Cases drawn by hypothesis from a seed, and run one after the other in one process."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import torch
from hypothesis import HealthCheck, Phase

from tests.fuzz.outcome import SECONDS, Case, Outcome, outcome_of

MORE = 4  # times as many are drawn as are run
PARTS = {  # function of this package that makes the strategy -> share of the cases
    "arguments.options_case": 0.08, "arguments.numbers_case": 0.08, "arguments.noise_case": 0.10,
    "arguments.stages_case": 0.08, "arguments.users_case": 0.05,
    "arguments.plans_case": 0.06, "arguments.heads_case": 0.04,
    "command_line.plan_case": 0.12, "command_line.head_case": 0.02,
    "command_line.folder_case": 0.03, "command_line.script_case": 0.05,
    "data.record_case": 0.07, "data.piece_case": 0.07, "data.pieces_case": 0.05, "files.any_case": 0.08,
}  # fmt: skip


def cases(part: str, count: int, seed: int) -> list[Case]:
    """So many cases of a part, always the same for a seed.

    Args:
        part: a name in `PARTS`.
        count: number of cases.
        seed: of hypothesis.
    """
    found: dict[str, Case] = {}
    module, _, function = part.partition(".")
    strategy = getattr(importlib.import_module(f"tests.fuzz.{module}"), function)()

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=MORE * count, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @hypothesis.given(strategy)
    def draw(case: Case) -> None:
        found.setdefault(repr(case), case)

    draw()
    return _spread(list(found.values()), count)


def _spread(several: list[Case], count: int) -> list[Case]:
    """Every so manyth of them: hypothesis draws cases that are alike one after the other."""
    return several if len(several) <= count else [several[i * len(several) // count] for i in range(count)]


def drawn(
    part: str, count: int, seed: int, home: Path, abandoned: float = 0.0, seconds: float = SECONDS
) -> Iterator[tuple[Case, Outcome, float]]:
    """Run the cases; yield each with its end and the seconds of the processor it took.

    Args:
        part, count, seed: as for `cases`.
        home: folder for the folders of the cases.
        abandoned: seconds after which a case that no signal reaches ends the process; 0 for none.
        seconds: of the processor, that a case may take.
    """
    for case in cases(part, count, seed):
        if abandoned:
            faulthandler.dump_traceback_later(abandoned, exit=True)
        with folder_in(home) as folder:
            began = time.process_time()
            outcome = outcome_of(case, folder, seconds=seconds)
            taken = time.process_time() - began
        faulthandler.cancel_dump_traceback_later()
        torch.set_default_dtype(torch.float32)
        gc.collect()
        yield case, outcome, taken


@contextlib.contextmanager
def folder_in(home: Path) -> Iterator[Path]:
    """An empty folder, the working directory meanwhile."""
    folder, before = Path(tempfile.mkdtemp(dir=home, prefix="case_")), os.getcwd()
    os.chdir(folder)
    try:
        yield folder
    finally:
        os.chdir(before)
        shutil.rmtree(folder, ignore_errors=True)
