"""`DPTrainingArguments` on a command line, in a config file, and in what is logged."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from transformers import HfArgumentParser, TrainingArguments

from hf_dpopt import DPConfigError, DPSeq2SeqTrainingArguments, DPTrainingArguments, PrivacyConfig

KEY = "ab" * 32
CLASSES = [DPTrainingArguments, DPSeq2SeqTrainingArguments]

# Every field of ours with a value that is not its default, as it stands on a command line and in the program.
FIELDS: dict[str, tuple[str, Any]] = {
    "max_grad_norm": ("2.5", 2.5),
    "target_epsilon": ("3", 3.0),
    "target_delta": ("1e-7", 1e-7),
    "allow_large_delta": ("True", True),
    "noise_multiplier": ("0.75", 0.75),
    "clipping_norm": ("0.1", 0.1),
    "clipping": ("per_layer", "per_layer"),
    "clipping_engine": ("two_pass", "two_pass"),
    "expected_batch_size": ("2048", 2048),
    "sampling": ("fixed_order", "fixed_order"),
    "adjacency": ("replace_one", "replace_one"),
    "privacy_unit": ("user", "user"),
    "user_id_column": ("author", "author"),
    "records_per_user": ("4", 4),
    "user_weighting": ("mean", "mean"),
    "local_training": ('{"learning_rate": 0.5}', {"learning_rate": 0.5}),
    "advisor": ("none", "none"),
    "noise_mechanism": ("blt", "blt"),
    "noise_kwargs": ('{"num_buffers": 2}', {"num_buffers": 2}),
    "noise_restart_every": ("100", 100),
    "noise_at_changes": ("restart", "restart"),
    "amplification_samples": ("0", 0),
    "earlier_runs": ("runs/head", ["runs/head"]),
    "tuned_runs": ("10", 10.0),
    "privacy_ledger": ("people.jsonl", "people.jsonl"),
    "privacy_ledger_epsilon": ("16", 16.0),
    "privacy_ledger_entry": ("tuning-1", "tuning-1"),
    "preconditioner": ("dp2_yogi", "dp2_yogi"),
    "preconditioner_kwargs": ('{"factored": true}', {"factored": True}),
    "filter": ("butterworth:2:0.1", "butterworth:2:0.1"),
    "public_batch_size": ("8", 8),
    "public_mirror_descent": ("linear", "linear"),
    "average_iterate": ("tail", "tail"),
    "private_state_dir": ("/secret/place", "/secret/place"),
    "journal_limit": ("0.5", 0.5),
    "log_unprivatized": ("True", True),
    "log_private_metrics": ("0.02", 0.02),
    "private_metrics_kwargs": ('{"loss_bound": 2}', {"loss_bound": 2}),
    "eval_data_privacy": ("private", "private"),
    "eval_target_epsilon": ("2", 2.0),
    "eval_times": ("3", 3),
    "eval_loss_bound": ("4", 4.0),
    "data_dependent_preprocessing": ("vocabulary of 8000", "vocabulary of 8000"),
    "skip_self_check": ("True", True),
    "rows_are_records": ("True", True),
    "unsafe_fixed_noise_key": (KEY, KEY),
}


def own_fields() -> set[str]:
    inherited = {f.name for f in dataclasses.fields(TrainingArguments)} - {"max_grad_norm"}
    return {f.name for f in dataclasses.fields(DPTrainingArguments)} - inherited


@pytest.fixture
def parse(tmp_path):
    def run(cls: type, *flags: str) -> DPTrainingArguments:
        line = ["--output_dir", str(tmp_path / "out"), "--use_cpu", "True", "--report_to", "none", *flags]
        return HfArgumentParser(cls).parse_args_into_dataclasses(line)[0]

    return run


def test_the_table_above_has_every_field():
    assert FIELDS.keys() == own_fields()


@pytest.mark.parametrize("cls", CLASSES)
def test_all_flags_at_once_and_back_from_a_file(parse, cls, tmp_path):
    args = parse(cls, *(word for name, (text, _) in FIELDS.items() for word in (f"--{name}", text)))
    for name, (_, value) in FIELDS.items():
        assert getattr(args, name) == value and type(getattr(args, name)) is type(value), name
    values = {name: getattr(args, name) for name in FIELDS}
    path = tmp_path / "run.json"
    path.write_text(json.dumps({**values, "output_dir": str(tmp_path / "out"), "use_cpu": True}))
    again = HfArgumentParser(cls).parse_json_file(str(path))[0]
    assert {name: getattr(again, name) for name in FIELDS} == values


@pytest.mark.parametrize("name", ["clipping", "adjacency", "privacy_unit", "eval_data_privacy"])
def test_closed_choices_are_refused_on_the_command_line(parse, name, capsys):
    with pytest.raises(SystemExit):
        parse(DPTrainingArguments, f"--{name}", "nonsense")
    assert "invalid choice: 'nonsense'" in capsys.readouterr().err


@pytest.mark.parametrize("cls", CLASSES)
def test_the_choices_offered_are_those_that_are_accepted(parse, cls):
    offered = [(f.name, c) for f in dataclasses.fields(cls) if f.name in FIELDS for c in f.metadata.get("choices", ())]
    assert offered
    for name, choice in offered:
        of_users = ["--user_id_column", "author"] if choice in ("user", "capped_poisson") else []
        of_users += ["--privacy_unit", "user"] if choice == "capped_poisson" else []
        args = parse(cls, "--noise_multiplier", "1", f"--{name}", choice, *of_users)
        assert getattr(args, name) == choice
        assert args.privacy_config(expected_batch_size=8).noise_multiplier == 1


@pytest.mark.parametrize("cls", CLASSES)
def test_defaults(parse, cls):
    """`max_grad_norm` is 1 in the Trainer, where it clips the only gradient there is; here it would clip the noise."""
    args = parse(cls)
    assert args.max_grad_norm == 0.0
    assert (args.target_epsilon, args.noise_multiplier, args.expected_batch_size) == (None, None, None)
    assert not args.log_unprivatized and not args.skip_self_check and args.eval_data_privacy == "undeclared"


# --- what is logged --------------------------------------------------------------------------------------------------


# --- the privacy side ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left_out", [{"local_training"}, {"log_private_metrics", "private_metrics_kwargs"}])
def test_privacy_config_takes_every_field_over(parse, left_out):
    """But for those that do not go together."""
    ours = {f.name for f in dataclasses.fields(PrivacyConfig)} - {"expected_batch_size", "noise_multiplier"} - left_out
    words = {name: text for name, (text, _) in FIELDS.items() if name in ours}
    config = parse(DPTrainingArguments, *(w for name, text in words.items() for w in (f"--{name}", text)))
    config = config.privacy_config(expected_batch_size=77)
    assert config.expected_batch_size == 77 and config.noise_multiplier is None
    assert {name: getattr(config, name) for name in words} == {name: FIELDS[name][1] for name in words}


def test_no_budget_is_refused(parse):
    with pytest.raises(DPConfigError, match="Neither target_epsilon nor noise_multiplier.*Add --target_epsilon 8"):
        parse(DPTrainingArguments).privacy_config(expected_batch_size=8)


def test_values_are_checked(parse):
    with pytest.raises(DPConfigError, match="clipping_norm=-1.0.*finite number > 0"):
        parse(DPTrainingArguments, "--noise_multiplier", "1", "--clipping_norm", "-1").privacy_config(8)
    with pytest.raises(DPConfigError, match="Give exactly one"):
        parse(DPTrainingArguments, "--noise_multiplier", "1", "--target_epsilon", "8").privacy_config(8)
