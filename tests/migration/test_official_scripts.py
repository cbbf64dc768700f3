"""The official scripts with the two names changed, and the table of docs/support.md that they fill."""

from __future__ import annotations

import json
import os

import pytest

from tests.migration.official_scripts import (
    ANOTHER,
    CASES,
    EXACT,
    FAILED,
    REFUSED,
    RESULTS,
    find_script,
    run_case,
    with_names,
    workplace,
)

QUICK = ("run_glue",)  # the others take a minute each: `-m slow`, or the command


def _results() -> dict:
    return json.loads(RESULTS.read_text(encoding="utf-8"))


def test_only_the_names_are_changed():
    source = "from transformers import (\n    AutoConfig,\n    Trainer,\n    TrainingArguments,\n)\n\nx = Trainer(1)\n"
    assert with_names(source) == (
        "from transformers import AutoConfig\nfrom hf_dpopt import DPTrainer as Trainer\n"
        "from hf_dpopt import DPTrainingArguments as TrainingArguments\n\nx = Trainer(1)\n"
    )
    inside = "def main():\n    from trl import SFTTrainer, get_dataset\n    return SFTTrainer\n"
    assert with_names(inside) == (
        "def main():\n    from trl import get_dataset\n    from hf_dpopt import DPSFTTrainer as SFTTrainer\n"
        "    return SFTTrainer\n"
    )


def test_every_script_has_a_result_and_every_way_out_was_run():
    rows = _results()["scripts"]
    assert rows.keys() == CASES.keys()
    for name, row in rows.items():
        assert row["result"] in (EXACT, ANOTHER, REFUSED, FAILED), name
        if row["result"] in (ANOTHER, REFUSED):
            assert row["ways"] and all(way["ran"] for way in row["ways"]), name


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_a_script_does_what_the_table_says(name, shared_data, minilm_path, tmp_path, monkeypatch):
    if "HF_DPOPT_EXAMPLES" not in os.environ or find_script(CASES[name]) is None:
        pytest.skip(
            f"no {CASES[name].script}: set HF_DPOPT_EXAMPLES to a folder that holds transformers' pytorch examples"
        )
    monkeypatch.setattr(os, "environ", os.environ.copy())
    with workplace(shared_data) as folder:
        row = run_case(name, folder)
        log = (folder / "log.txt").read_text()[-2000:]
    assert row["result"] == _results()["scripts"][name]["result"], log
