"""Every option is described once: arguments, configuration, command line and documentation say the same."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from transformers import HfArgumentParser
from typer.main import get_command

from hf_dpopt import DPConfigError, DPTrainingArguments, PrivacyConfig
from hf_dpopt.cli.app import app
from hf_dpopt.clipping import ENGINES
from hf_dpopt.clipping.thresholds import CLIPPINGS, FlatClipping
from hf_dpopt.common.adjacency import Adjacency
from hf_dpopt.noise import MECHANISMS
from hf_dpopt.plan import options
from hf_dpopt.postprocess.mirror_descent import SCHEDULES
from hf_dpopt.sampling import SAMPLERS
from tests.plan import arguments_table

CONFIGURED = {f.name: f for f in dataclasses.fields(PrivacyConfig)}


# --- one description -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(CONFIGURED.keys() & options.OPTIONS.keys()))
def test_the_configuration_has_the_same_description_and_default(name):
    ours, option = CONFIGURED[name], options.OPTIONS[name]
    assert ours.metadata["help"] is option.metadata["help"]
    assert ours.metadata.get("choices") == option.metadata.get("choices")
    if name == "expected_batch_size":  # of a trainer, the batch that its other arguments make
        assert ours.default is dataclasses.MISSING
    else:
        assert ours.default == option.default


def test_the_docstring_of_the_configuration_describes_every_field():
    text = " ".join((PrivacyConfig.__doc__ or "").split())
    for name, field in CONFIGURED.items():
        assert f" {name}: {field.metadata['help'].says}" in text
        assert field.metadata["help"].more in text


@pytest.mark.parametrize("command, num", [("plan", 17), ("plan-head", 8), ("audit", 11)])
def test_flags_of_the_command_line_take_the_words_of_the_option(command, num):
    params = [p for p in get_command(app).commands[command].params if p.name in options.OPTIONS]  # type: ignore[attr-defined]
    assert len(params) == num
    for found in params:
        text, choices = options.help_of(found.name), options.OPTIONS[found.name].metadata.get("choices", ())
        assert found.help.startswith(text.says) and all(name in found.help for name in choices)
        assert f"--{found.name.replace('_', '-')}" in found.opts


@pytest.mark.parametrize(
    "name, registered",
    [
        ("clipping", list(CLIPPINGS)),
        ("clipping_engine", ["auto", *ENGINES]),
        ("adjacency", ["auto", *get_args(Adjacency)]),
        ("public_mirror_descent", sorted(SCHEDULES)),
    ],
)
def test_listed_choices_are_those_of_the_registry(name, registered):
    """The module of the options imports no registry, so that help is printed at once."""
    assert list(options.OPTIONS[name].metadata["choices"]) == registered


def test_a_name_that_was_registered_later_is_accepted(monkeypatch):
    monkeypatch.setitem(CLIPPINGS, "mine", FlatClipping)
    assert PrivacyConfig(noise_multiplier=1.0, expected_batch_size=8, clipping="mine").clipping == "mine"
    with pytest.raises(DPConfigError, match="clipping='yours' is unknown. Use one of: 'flat', .*'mine'"):
        PrivacyConfig(noise_multiplier=1.0, expected_batch_size=8, clipping="yours")


@pytest.mark.parametrize("name, registry", [("noise_mechanism", MECHANISMS), ("sampling", SAMPLERS)])
def test_a_command_line_takes_what_was_registered_later(tmp_path, monkeypatch, name, registry):
    monkeypatch.setitem(registry, "mine", next(iter(registry.values())))
    line = ["--output_dir", str(tmp_path), "--use_cpu", "True", "--noise_multiplier", "1", f"--{name}", "mine"]
    args = HfArgumentParser(DPTrainingArguments).parse_args_into_dataclasses(line)[0]
    assert getattr(args.privacy_config(8), name) == "mine"
    with pytest.raises(DPConfigError, match=f"{name}='yours' is unknown. Use one of: .*'mine'"):
        dataclasses.replace(args, **{name: "yours"}).privacy_config(8)


def test_the_page_is_current():
    assert arguments_table.PAGE.read_text(encoding="utf-8") == arguments_table.page(), (
        "docs/arguments.md is written by: python -m tests.plan.arguments_table"
    )


# --- help without torch ----------------------------------------------------------------------------------------------

HELP = """
import sys, types
package = types.ModuleType("hf_dpopt")  # what hf_dpopt/__init__.py exports is another matter
package.__path__ = [sys.argv[1]]
sys.modules["hf_dpopt"] = package
from hf_dpopt.cli.app import app
for command in ([], ["plan"], ["plan-head"], ["verify"], ["scan"]):
    try:
        app([*command, "--help"])
    except SystemExit as stopped:
        assert stopped.code == 0
heavy = {"torch", "transformers", "numpy", "scipy", "dp_accounting", "matplotlib"} & set(sys.modules)
assert not heavy, heavy
"""


def test_help_is_printed_without_torch(repo: Path):
    done = subprocess.run([sys.executable, "-c", HELP, repo / "hf_dpopt"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "plan-head" in done.stdout and "nu_dpftrl" in done.stdout
