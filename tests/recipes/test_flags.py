"""Unknown flags are refused before the libraries are imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hf_dpopt import DPSeq2SeqTrainingArguments, DPTrainingArguments
from hf_dpopt.convex import HeadTrainingArguments
from recipes import canaries, clm, flags, glue, linear_probe, options, seq2seq, stackoverflow

RECIPES = {
    "clm": (clm.ModelArguments, clm.DataTrainingArguments, DPTrainingArguments),
    "glue": (glue.ModelArguments, glue.DataTrainingArguments, DPTrainingArguments),
    "linear_probe": (linear_probe.ModelArguments, linear_probe.DataTrainingArguments, HeadTrainingArguments),
    "seq2seq": (seq2seq.ModelArguments, seq2seq.DataTrainingArguments, DPSeq2SeqTrainingArguments),
    "stackoverflow": (stackoverflow.ModelArguments, stackoverflow.DataTrainingArguments, DPTrainingArguments),
    "canaries make": (canaries.MakeArguments, clm.ModelArguments, clm.DataTrainingArguments),
    "canaries score": (canaries.ScoreArguments,),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_flag_of_a_recipe_is_known(recipe: str) -> None:
    parser = options.Parser(RECIPES[recipe])
    flags.refuse_unknown([flag for action in parser._actions for flag in action.option_strings])


def test_every_flag_of_the_chat_recipe_is_known() -> None:
    trl = pytest.importorskip("trl")
    from recipes import sft

    parser = trl.TrlParser((sft.DataArguments, sft.DPSFTConfig, trl.ModelConfig))
    flags.refuse_unknown([flag for action in parser._actions for flag in action.option_strings])


@pytest.mark.parametrize("recipe", ["canaries", "clm", "glue", "linear_probe", "seq2seq", "sft", "stackoverflow"])
def test_an_unknown_flag_is_refused_before_torch_is_imported(recipe: str) -> None:
    command = [sys.executable, "-X", "importtime", f"recipes/{recipe}.py", "--lora-rank=8", "--max-steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    errors = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert done.returncode == 2
    assert errors == ["error: --lora_rank is not a flag. Did you mean --lora_r? --help lists all flags."]
    assert not any(line.endswith(" torch") for line in done.stderr.splitlines())
