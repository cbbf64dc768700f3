"""The command line: every flag of `hf-dpopt`, folders that it is shown, and the flags of a training script."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import strategies as st
from transformers import HfArgumentParser

from hf_dpopt import DPSeq2SeqTrainingArguments, DPTrainer, DPTrainingArguments
from hf_dpopt.cli import app
from hf_dpopt.noise import MECHANISMS
from hf_dpopt.preclip import PRECLIPS
from hf_dpopt.sampling import SAMPLERS
from tests import tiny
from tests.fuzz import arguments, files
from tests.fuzz.outcome import Case
from tests.fuzz.values import BAD_JSON, NUMBERS, TEXTS, shown

WORDS = (*map(str, NUMBERS), *TEXTS, *BAD_JSON, "1k", "7B", "-7B", "0.3M", "1e400", "1_000", "0x10", "１２", "--steps")
PLAN = (
    "--num-examples", "--batch", "--steps", "--epochs", "--epsilon", "--noise-multiplier", "--delta", "--sampling",
    "--adjacency", "--noise-mechanism", "--noise-kwargs", "--noise-restart-every", "--noise-at-changes",
    "--preconditioner", "--preconditioner-kwargs", "--amplification-samples", "--privacy-unit", "--records-per-user",
    "--optimizer", "--momentum", "--schedule", "--weights", "--finetuning",
    "--objective", "--compare", "--json", "--allow-large-delta", "--unknown",
)  # fmt: skip
HEAD = (
    "--num-examples", "--batch", "--steps", "--head-radius", "--feature-norm", "--epsilon", "--noise-multiplier",
    "--delta", "--learning-rate", "--l2", "--num-weights", "--json", "--allow-large-delta",
)  # fmt: skip
KEYS = ("num_buffers", "num_bands", "nu", "coefs", "block", "poles")
SWITCHES = ("--json", "--compare", "--allow-large-delta")
GOOD = (*MECHANISMS, "auto", *SAMPLERS, *PRECLIPS, "add_or_remove_one", "replace_one", "zero_out", "adamw", "sgd",
        "constant", "linear", "full", "lora", "head", "classification", "generation")  # fmt: skip


def call(*words: str) -> None:
    """Run `hf-dpopt` with these words in this process."""
    with mock.patch.object(sys, "argv", ["hf-dpopt", *words]):
        app.main()


def plan_case() -> st.SearchStrategy[Case]:
    """`hf-dpopt plan` with one to five flags changed."""
    base = {"--num-examples": "10000", "--batch": "256", "--steps": "100", "--noise-multiplier": "1",
            "--amplification-samples": "0"}  # fmt: skip
    asked = {"--num-examples": "10000", "--epsilon": "8"}  # advice
    options = st.builds(lambda key, value: json.dumps({key: value}), st.sampled_from(KEYS), st.sampled_from(NUMBERS))
    given = st.dictionaries(st.sampled_from(PLAN), st.one_of(words(), options), min_size=1, max_size=5)
    starts = st.sampled_from((base, base, {**base, "--epsilon": "3", "--noise-multiplier": ""}, asked))
    return st.builds(lambda start, changed: _command("plan", {**start, **changed}), starts, given)


def head_case() -> st.SearchStrategy[Case]:
    """`hf-dpopt plan-head` with one to three flags changed."""
    base = {"--num-examples": "10000", "--batch": "256", "--steps": "100", "--head-radius": "1", "--feature-norm": "1",
            "--noise-multiplier": "1"}  # fmt: skip
    given = st.dictionaries(st.sampled_from(HEAD), words(), min_size=1, max_size=3)
    return given.map(lambda changed: _command("plan-head", {**base, **changed}))


def folder_case() -> st.SearchStrategy[Case]:
    """`hf-dpopt verify`, `scan` and `doctor` of folders that are no runs, or damaged ones."""
    commands = st.sampled_from(("verify", "scan", "doctor"))
    places = st.sampled_from(("missing", "", "empty", "file", "a\x00b", "ε" * 300, "link"))

    def odd(command: str, place: str) -> Case:
        def prepare(folder: Path) -> None:
            (folder / "empty").mkdir()
            (folder / "file").write_bytes(b"\x00\xff" * 50)
            (folder / "link").symlink_to("link")

        return Case("command line", f"{command} {shown(place)}", lambda folder: call(command, place), prepare)

    def damaged(command: str, damage: files.Damage) -> Case:
        return Case("files", f"{command}, {damage}", lambda folder: call(command, str(folder / "out"), *(
            ("--private-state-dir", str(folder / "keys")) if command != "verify" else ())), damage.apply)  # fmt: skip

    return st.one_of(st.builds(odd, commands, places), st.builds(damaged, commands, files.damages()))


def script_case() -> st.SearchStrategy[Case]:
    """The flags of a training script, read by HfArgumentParser, and one step if they were understood."""
    names = st.sampled_from(
        (*arguments.OWN, "max_steps", "num_train_epochs", "learning_rate", "optim", "optim_args", "unknown")
    )
    given = st.dictionaries(names, st.one_of(words(), st.sampled_from(BAD_JSON)), min_size=1, max_size=2)

    def case(values: dict[str, str], cls: type) -> Case:
        flags = {name: text for name, text in values.items() if name not in arguments.FILES}

        def run(folder: Path) -> None:
            fixed = {"output_dir": str(folder / "out"), "use_cpu": "True", "report_to": "none", "max_steps": "2",
                     "noise_multiplier": "1.0", "save_strategy": "no", "remove_unused_columns": "False",
                     "expected_batch_size": "16", "target_delta": "1e-3"}  # fmt: skip
            line = [word for name, text in {**fixed, **flags}.items() for word in (f"--{name}", text)]
            (args,) = HfArgumentParser(cls).parse_args_into_dataclasses(line)
            trainer = DPTrainer(
                model=tiny.model(), args=args, train_dataset=tiny.records(), data_collator=tiny.collate,
                callbacks=[tiny.StopAt(1)],
            )  # fmt: skip
            trainer.train()

        return Case("command line", f"script {' '.join(f'--{k} {shown(v)}' for k, v in flags.items())}", run)

    return st.builds(
        case, given, st.sampled_from((DPTrainingArguments, DPTrainingArguments, DPSeq2SeqTrainingArguments))
    )


def words() -> st.SearchStrategy[str]:
    """Words that flags may be followed by."""
    return st.one_of(
        st.sampled_from(WORDS),
        st.sampled_from(GOOD),
        st.text(max_size=6),
        st.floats().map(str),
        st.integers(-5, 500).map(str),
    )


def _command(name: str, given: dict[str, Any]) -> Case:
    line = [name]
    for flag, word in given.items():
        if flag in SWITCHES:
            line.append(flag)
        elif word or flag not in ("--noise-multiplier",):
            line += [flag, word]
    return Case("command line", shown(" ".join(line)), lambda folder: call(*line))
