"""Unknown flags are refused before the libraries are imported; without flags, a recipe is the embedded job."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from hf_dpopt import DPTrainingArguments
from hf_dpopt.convex import HeadTrainingArguments
from recipes import canaries, clm, flags, glue, linear_probe, options, stackoverflow

RECIPES = {
    "clm": (clm.ModelArguments, clm.DataTrainingArguments, DPTrainingArguments),
    "glue": (glue.ModelArguments, glue.DataTrainingArguments, DPTrainingArguments),
    "linear_probe": (linear_probe.ModelArguments, linear_probe.DataTrainingArguments, HeadTrainingArguments),
    "stackoverflow": (stackoverflow.ModelArguments, stackoverflow.DataTrainingArguments, DPTrainingArguments),
    "canaries make": (canaries.MakeArguments, clm.ModelArguments, clm.DataTrainingArguments),
    "canaries score": (canaries.ScoreArguments,),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_flag_of_a_recipe_is_known(recipe: str) -> None:
    parser = options.Parser(RECIPES[recipe])
    flags.refuse_unknown([flag for action in parser._actions for flag in action.option_strings])


@pytest.mark.parametrize(("recipe", "own"), [("sft", "DataArguments"), ("synthetic", "SyntheticArguments")])
def test_every_flag_of_a_recipe_with_trl_is_known(recipe: str, own: str) -> None:
    trl = pytest.importorskip("trl")
    module = importlib.import_module(f"recipes.{recipe}")
    parser = trl.TrlParser((getattr(module, own), module.DPSFTConfig, trl.ModelConfig))
    flags.refuse_unknown([flag for action in parser._actions for flag in action.option_strings])


@pytest.mark.parametrize(
    "recipe",
    ["canaries", "clm", "glue", "linear_probe", "preferences", "sft", "stackoverflow", "synthetic"],
)
def test_an_unknown_flag_is_refused_before_torch_is_imported(recipe: str) -> None:
    command = [sys.executable, "-X", "importtime", f"recipes/{recipe}.py", "--lora-rank=8", "--max-steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    errors = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert done.returncode == 2
    assert errors == ["error: --lora_rank is not a flag. Did you mean --lora_r? --help lists all flags."]
    assert not any(line.endswith(" torch") for line in done.stderr.splitlines())


@pytest.mark.parametrize(
    ("recipe", "own"),
    [(glue, {"target_epsilon": 8.0}), (clm, {"target_epsilon": 8.0, "eval_on_start": True}), (linear_probe, {})],
)
def test_no_arguments_are_the_embedded_job(
    recipe: ModuleType, own: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model_args, data_args, training_args = recipe.parse([])
    assert data_args.embedded and model_args.model_name_or_path is None
    job = {"target_delta": 1e-5, "do_train": True, "do_eval": True, "do_predict": False, "eval_data_privacy": "public"}
    assert {name: getattr(training_args, name) for name in job | own} == job | own
    assert training_args.output_dir.startswith("runs/embedded-") and not list(tmp_path.iterdir())


def test_the_embedded_head_takes_the_steps_of_its_job() -> None:
    given = linear_probe.parse([])[2].head_config(30_000)
    assert given.num_steps == linear_probe.EMBEDDED["max_steps"]
