"""`recipes/canaries.py` from end to end: canaries among a user's records, a run of the real recipe, a bound."""

from __future__ import annotations

import csv
import json
import re
import stat
from pathlib import Path

import numpy as np
import pytest

from recipes import canaries, clm, running
from recipes.canaries import mix
from recipes.tables import TEXT_EXTENSIONS, Table, read_table
from tests.recipes.conftest import save_gpt2
from tests.recipes.texts import DOCUMENTS, PAIRS

TRAINING = {"--use_cpu": "true", "--disable_tqdm": "true", "--report_to": "none", "--save_strategy": "no",
            "--logging_strategy": "no", "--per_device_train_batch_size": "32", "--learning_rate": "1e-2",
            "--lr_scheduler_type": "constant"}  # fmt: skip
BOUND = re.compile(r"epsilon >= ([\d.]+) by one_run,")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_gpt2(tmp_path_factory.mktemp("gpt2"), n_embd=64, n_layer=1)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the same records in files of every kind."""
    with open(tmp_path / "train.csv", "w", newline="") as file:
        csv.writer(file).writerows([("mr", "ref"), *PAIRS])
    (tmp_path / "train.txt").write_text("\n".join(DOCUMENTS) + "\n")
    (tmp_path / "train.tsv").write_text(
        "text\tauthor\n" + "".join(f"{text}\t{i % 7}\n" for i, text in enumerate(DOCUMENTS))
    )
    (tmp_path / "there.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*argv: str) -> int:
    return running.run(list(argv), canaries.main)


def make(model: str, kind: str = "csv", num: int = 150, **flags: str) -> int:
    more = [part for name, value in flags.items() for part in (f"--{name}", value)]
    return run("make", "--model_name_or_path", model, "--train_file", f"train.{kind}",
               "--output_file", "with.jsonl", "--secret_file", "secret.json", "--num_canaries", str(num),
               "--num_tokens", "6", *more)  # fmt: skip


def training(model: str, output: str, **flags: str | None) -> list[str]:
    given = TRAINING | {"--model_name_or_path": model, "--train_file": "with.jsonl", "--output_dir": output}
    given |= {f"--{name}": value for name, value in flags.items() if value is not None}
    return [part for pair in given.items() for part in pair]


def score(capsys: pytest.CaptureFixture[str], *argv: str) -> float:
    """The bound that is printed."""
    capsys.readouterr()
    assert run("score", "--secret_file", "secret.json", *argv) == 0
    found = BOUND.search(capsys.readouterr().out)
    assert found is not None
    return float(found[1])


# --- the files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["csv", "txt"])
def test_the_records_stay_in_order_and_the_drawn_canaries_stand_between(gpt2: str, files: Path, kind: str) -> None:
    assert make(gpt2, kind) == 0
    secret = json.loads((files / "secret.json").read_text())
    before, after = (read_table(name, kinds=TEXT_EXTENSIONS) for name in (f"train.{kind}", "with.jsonl"))
    assert list(after.columns) == list(before.columns) and len(after) == secret["num_rows"]
    rows = [dict(zip(after.columns, row, strict=True)) for row in zip(*after.columns.values(), strict=True)]
    drawn = [row for row, is_in in zip(secret["rows"], secret["included"], strict=True) if is_in]
    left_out = [row for row, is_in in zip(secret["rows"], secret["included"], strict=True) if not is_in]
    assert all(row in rows for row in drawn) and not any(row in rows for row in left_out)
    own = [dict(zip(before.columns, row, strict=True)) for row in zip(*before.columns.values(), strict=True)]
    assert [row for row in rows if row not in drawn] == own
    assert 35 < len(drawn) < 115, "150 draws of 1/2: outside with probability 1e-10"
    assert stat.S_IMODE((files / "secret.json").stat().st_mode) == 0o600


def test_places_are_drawn() -> None:
    """Of one canary among 40 rows; that it stands in one half 60 times has probability 2e-18."""
    table = Table("t", {"text": [str(i) for i in range(40)]})
    places = [mix(table, [{"text": "canary"}]).index({"text": "canary"}) for _ in range(60)]
    assert min(places) < 20 < max(places)


def test_canaries_of_users_are_users(gpt2: str, files: Path) -> None:
    assert make(gpt2, "tsv", user_id_column="author") == 0
    secret = json.loads((files / "secret.json").read_text())
    assert len({row["author"] for row in secret["rows"]}) == 150


BAD = {
    "no command": ("attack", "Use make or score"),
    "few": ("make {} --num_canaries 3", "num_canaries=3 .* Use 20"),
    "no file": ("make {} --train_file none.csv", "none.csv does not exist"),
    "format": ("make {} --output_file with.xml", "with.xml: must end in .jsonl"),
    "there": ("make {} --output_file there.jsonl", "there.jsonl is there"),
    "users": ("make {} --user_id_column who", "no column 'who'"),
    "secret": ("score --secret_file train.csv --trained out", "secret_file=train.csv is none that make wrote"),
    "gone": ("score --secret_file gone.json --trained out", "secret_file=gone.json is none that make wrote"),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_what_is_wrong_is_told_in_a_line(
    gpt2: str, files: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    text, match = BAD[what]
    given = f"--model_name_or_path {gpt2} --train_file train.csv --output_file with.jsonl --secret_file s.json"
    flags = text.replace("{}", "").split()
    usual = given.split() if "{}" in text else []
    for name in flags[1::2]:  # given twice, the second one counts
        if name in usual:
            del usual[usual.index(name) : usual.index(name) + 2]
    assert run(flags[0], *usual, *flags[1:]) == running.USAGE_ERROR
    line = capsys.readouterr().err
    assert re.search(match, line) and line.count("\n") == 1 and "Traceback" not in line


# --- whole runs ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_without_privacy_is_bounded_from_below_and_a_private_one_keeps_its_claim(
    gpt2: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make(gpt2, block_size="48") == 0
    steps = {"block_size": "48", "num_train_epochs": "15"}
    clm.main([*training(gpt2, "plain", **steps), "--non_private"])
    assert score(capsys, "--trained", "plain", "--initial", gpt2, "--delta", "1e-6") > 0.2
    clm.main([*training(gpt2, "private", block_size="48", max_steps="4", target_epsilon="2", target_delta="1e-3",
                        expected_batch_size="32", skip_self_check="true")])  # fmt: skip
    assert score(capsys, "--trained", "private", "--scores_file", "scores.csv") <= 2
    scores = np.loadtxt("scores.csv", delimiter=",", skiprows=1)
    assert scores.shape == (150, 2) and set(scores[:, 1]) == {0, 1}
    secret = json.loads((files / "secret.json").read_text())
    for change, match in (
        ({"num_rows": 7}, "the file of these canaries has 7"),
        ({"rows": []}, "none that make wrote"),
    ):
        (files / "other.json").write_text(json.dumps(secret | change))
        assert run("score", "--secret_file", "other.json", "--trained", "private") == running.USAGE_ERROR
        assert match in capsys.readouterr().err
    assert run("score", "--secret_file", "secret.json", "--trained", "plain") == running.USAGE_ERROR
    assert "say at which --delta" in capsys.readouterr().err
