"""Bad input of every recipe: one line that says what to do, exit status 2, and nothing written."""

from __future__ import annotations

import errno
import re
from pathlib import Path
from types import ModuleType

import pytest

from recipes import running
from tests.recipes import (
    test_clm,
    test_glue,
    test_linear_probe,
    test_prompts,
    test_seq2seq,
    test_stackoverflow,
)
from tests.recipes.conftest import enter

model_dir, probed_dir, masked_dir = test_glue.model_dir, test_linear_probe.probed_dir, test_prompts.masked_dir
FAST = (test_glue, test_prompts)
MODULES = (*FAST, test_clm, test_linear_probe, test_seq2seq, test_stackoverflow)


@pytest.mark.parametrize(
    ("module", "case"),
    [
        pytest.param(
            module,
            case,
            id=f"{module.__name__.split('test_')[-1]}, {case}",
            marks=[pytest.mark.slow] * (module not in FAST),
        )
        for module in MODULES
        for case in module.REFUSED
    ],
)
def test_bad_input(
    module: ModuleType,
    case: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = enter(module, tmp_path, monkeypatch)
    model = request.getfixturevalue(module.MODEL) if module.MODEL else ""
    before, (changes, mend) = sorted(folder.iterdir()), module.REFUSED[case]
    assert module.run(module.arguments(model, **changes)) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error") or "Traceback" in line]
    assert len(errors) == 1 and re.search(mend, errors[0]), errors
    assert sorted(folder.iterdir()) == before, "something was written"


@pytest.mark.parametrize(
    ("path", "flags", "said"),
    [
        (
            "/proc/out/a",
            ["--output_dir", "/proc/out"],
            "--output_dir=/proc/out: /proc/out/a could not be written .* free",
        ),
        (
            "/proc/out/a",
            ["--output_dir=/proc/out"],
            "--output_dir=/proc/out: /proc/out/a could not be written .* free",
        ),
        (None, ["--output_dir", "/proc/out"], "--output_dir=/proc/out: a file could not be written .*free in /proc"),
        (
            "/proc/.model",
            ["--output_dir", "/proc/out"],
            "next to --output_dir=/proc/out: /proc/.model could not .* Make room there",
        ),
        ("/elsewhere/a", ["--output_dir", "/proc/out"], "error: /elsewhere/a could not be written"),
    ],
)
def test_a_full_disk_is_named_with_the_flag_of_its_folder(
    path: str | None, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def entry(argv: list[str]) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", path)

    assert running.run(flags, entry) == running.USAGE_ERROR
    error = capsys.readouterr().err
    assert re.search(said, error) and "Steps that were charged stay charged" in error and error.count("\n") == 1
