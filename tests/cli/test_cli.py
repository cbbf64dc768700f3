"""The commands: what they print is the plan's, and whatever is wrong ends them with one line and exit code 2."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import HfArgumentParser

import hf_dpopt
from hf_dpopt import DPTrainingArguments
from hf_dpopt.cli import app
from hf_dpopt.plan.advice import TrainingJob, advise
from hf_dpopt.plan.choose import make_plan
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.report.facts import RunFacts
from hf_dpopt.report.report import write_report
from hf_dpopt.run.keys import default_private_dir, new_chain, private_dir, secrets_in
from hf_dpopt.run.run_log import RunLog

Run = Callable[..., tuple[int, str, str]]

SST2 = ["-n", "67349", "-b", "1024", "--delta", "7.424e-6"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `hf-dpopt` with these arguments: (exit code, stdout, stderr)."""

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["hf-dpopt", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            app.main()
        code = stopped.value.code
        assert isinstance(code, int)
        return code, *capsys.readouterr()

    return call


def test_plan_computes_epsilon_from_the_noise(run: Run) -> None:
    code, out, _ = run("plan", *SST2, "--epochs", "3", "--noise-multiplier", "0.7")
    assert code == 0
    assert re.search(r"epsilon\s.*\b3\.877", out) and re.search(r"optimizer steps\s.*\b198\b", out)


def test_plan_computes_the_noise_from_epsilon(run: Run) -> None:
    code, out, _ = run("plan", *SST2, "--steps", "198", "--epsilon", "3", "--json")
    content = json.loads(out)
    assert code == 0 and content["target_epsilon"] == 3.0 and 2.9 < content["epsilon"] <= 3.0
    assert content["noise_multiplier"] == pytest.approx(0.7649, rel=2e-3)  # dp_accounting's own calibration


def test_plan_takes_the_relation_and_the_sampler(run: Run) -> None:
    arguments = [*SST2, "--steps", "198", "--noise-multiplier", "0.7", "--json"]
    content = json.loads(run("plan", *arguments, "--sampling", "fixed_order", "--adjacency", "zero_out")[1])
    assert content["sampler"]["name"] == "fixed_order" and content["adjacency"] == "zero_out"
    assert content["epsilon"] == pytest.approx(13.20, abs=0.01)  # any order, zero-out


@pytest.mark.slow
def test_plan_compares_all_mechanisms_at_the_budget(run: Run) -> None:
    """As the documentation writes it; the numbers of a row are those of a plan with that mechanism."""
    asked = ["--num_examples", "4000", "--batch", "200", "--epochs", "2", "--epsilon", "8"]
    asked += ["--optimizer", "sgd", "--momentum", "0.9"]
    code, out, err = run("plan", *asked, "--compare")
    assert code == 0 and "kept" in out
    for name in ("gaussian", "banded", "blt", "nu_dpftrl", "honaker", "tree"):
        assert name in out
    rows = json.loads(run("plan", *asked, "--compare", "--json")[1])["mechanisms"]
    blt = next(row for row in rows if row["mechanism"] == "blt")
    alone = json.loads(run("plan", *asked, "--noise_mechanism", "blt", "--json")[1])
    assert blt["draw_stddev"] == alone["draw_stddev"] and blt["strategy"] == alone["noise_strategy"]
    assert all(row["epsilon"] <= 8 and row["max_error"] >= row["rmse"] > 0 for row in rows)
    errors = [row["rmse"] for row in rows]
    assert errors[0] <= 1.02 * min(errors)


@pytest.mark.parametrize(
    ("arguments", "mend"),
    [
        (["--epsilon", "3", "--steps", "10", "--noise_mechanism", "laplace"], "Use one of: 'auto', 'gaussian'"),
        (["--epsilon", "3", "--steps", "10", "--noise_kwargs", "nu=1"], "is not JSON. Use --noise-kwargs"),
        (["--epsilon", "3", "--steps", "10", "--optimizer", "adafactor"], "Use one of: 'adamw', 'sgd'"),
        (["--epsilon", "3", "--steps", "10", "--optimizer", "sgd", "--momentum", "1"], "momentum=1.0 is out"),
        (["--epsilon", "3", "--steps", "10", "--momentum", "0.9"], "add --optimizer sgd"),
        (["--steps", "10"], "Give exactly one: target_epsilon"),
        (["--steps", "10", "--epsilon", "3", "--noise-multiplier", "1"], "Give exactly one: target_epsilon"),
        (["--epsilon", "3"], "Neither of --steps and --epochs is given. Give exactly one"),
        (["--epsilon", "3", "--steps", "10", "--epochs", "1"], "Both --steps and --epochs are given"),
        (["--epsilon", "3", "--epochs", "-1"], "Use a finite number > 0"),
        (["--epsilon", "-3", "--steps", "10"], "Use a finite number > 0"),
        (["--epsilon", "3", "--steps", "0"], ": steps=0 is not a positive count. Use an integer >= 1"),
        (["--epsilon", "3", "--steps", "9", "-n", "0"], ": num_examples=0 is not a positive count"),
        (["--epsilon", "3", "--steps", "10", "--sampling", "shuffle"], "Use one of: 'auto'"),
        (
            ["--epsilon", "3", "--steps", "10", "--sampling", "fixed_order", "--adjacency", "add_or_remove_one"],
            "Use adjac",
        ),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_code_2(run: Run, arguments: list[str], mend: str) -> None:
    code, out, err = run("plan", "-n", "1000", "-b", "100", *arguments)
    assert code == 2 and out == "" and mend in err
    assert err.startswith("hf-dpopt: ") and err.count("\n") == 1


def test_without_a_batch_plan_advises(run: Run) -> None:
    code, out, _ = run("plan", "-n", "67349", "--epsilon", "8")
    assert code == 0 and "expected_batch_size" in out and "More passes: 9 would be worth" in out and "Cost: " in out
    facts = json.loads(run("plan", "-n", "67349", "--epsilon", "8", "--json")[1])
    advised = advise(TrainingJob(num_units=67_349, target_epsilon=8.0))
    assert facts["options"]["expected_batch_size"] == advised.batch and facts["verdict"] == "good"
    assert "--start pooled" in out and "84.6 % in 0.75 passes and 86.1 % in 9" in " ".join(out.split())
    assert list(facts["useful_steps_of_passes"]) == ["3", "30", "9"]  # sorted names


@pytest.mark.parametrize(
    "flags",
    [["--finetuning", "full"], ["--finetuning", "head"], ["--objective", "generation"], ["--weights", "7B"]],
    ids=str,
)
def test_advice_is_printed_as_flags_of_a_training_script(run: Run, flags: list[str], tmp_path: Path) -> None:
    asked = ["plan", "-n", "67349", "--epsilon", "8", "--passes", "10", *flags]
    line, options = run(*asked)[1].splitlines()[-1], json.loads(run(*asked, "--json")[1])["options"]
    words = ["--output_dir", str(tmp_path), "--use_cpu", "True", *shlex.split(line)]
    (args,) = HfArgumentParser(DPTrainingArguments).parse_args_into_dataclasses(words)
    assert all(getattr(args, name) == value for name, value in options.items())
    assert args.target_epsilon == 8 and args.num_train_epochs == 10


@pytest.mark.parametrize(("delta", "flags"), [("1e-05", []), ("0.01", ["--allow-large-delta"])])
def test_advice_names_the_delta_that_was_given(run: Run, delta: str, flags: list[str]) -> None:
    lines = run("plan", "-n", "1000", "--epsilon", "8", "--delta", delta, *flags)[1].splitlines()
    named = [line for line in lines if "--target_epsilon" in line]
    assert len(named) == 2 and all(f"--target_delta {delta}" in line for line in named)
    assert all(("--allow_large_delta true" in line) == bool(flags) for line in named)


@pytest.mark.parametrize(("flags", "model"), [([], "all-MiniLM-L6-v2"), (["--weights", "125M"], "your/model")])
def test_the_command_names_a_model_of_the_size_that_was_asked_for(run: Run, flags: list[str], model: str) -> None:
    (command,) = [
        line for line in run("plan", "-n", "67349", "--epsilon", "8", *flags)[1].splitlines() if "glue.py" in line
    ]
    assert f"{model} --train_file" in command


@pytest.mark.slow
def test_a_plan_in_json_has_its_outlook(run: Run) -> None:
    asked = ["plan", "-n", "67349", "-b", "8", "--epochs", "3", "--epsilon", "8", "--json"]
    outlook = json.loads(run(*asked)[1])["outlook"]
    assert outlook["verdict"] == "poor" and outlook["better"]["expected_batch_size"] > 500


def test_a_poor_plan_is_a_warning(run: Run) -> None:
    code, _, err = run("plan", "-n", "100", "--epsilon", "1")
    assert code == 0 and "expected to learn little" in err
    code, out, err = run("plan", "-n", "100", "--epsilon", "1", "--json")
    assert json.loads(out)["verdict"] == "poor" and "expected to learn little" in err


@pytest.mark.parametrize(
    "flags, mend",
    [
        ([], "Add --epsilon 8"),
        (["--epsilon", "8", "--weights", "lots"], "300k, 0.3M or 7B"),
        (["--epsilon", "8", "--finetuning", "qlora"], "finetuning='qlora'"),
        (["--epsilon", "8", "--objective", "x"], "objective='x'"),
        (["--epsilon", "8", "--objective", "generation", "--finetuning", "head"], "Use --finetuning lora or full"),
        (["--epsilon", "8", "--optimizer", "sgd"], "--optimizer plans a run"),
        (["--epsilon", "8", "--optimizer", "lion"], "Use one of: 'adamw', 'sgd'"),
        (["--epsilon", "8", "--sampling", "shuffle"], "Use one of: 'auto'"),
        (["--adjacency", "remove"], "adjacency='remove'"),
        (["--epsilon", "8", "--passes", "1e9"], "more than 100,000"),
        (["--epsilon", "8", "--delta", "0"], "target_delta=0.0 is outside (0, 1)"),
        (["--epsilon", "8", "--delta", "0.01"], "Use target_delta <= 0.0001"),
        (["--epsilon", "8", "--steps", "100"], "--steps plans a run, which needs a batch"),
        (["--epsilon", "8", "--compare"], "--compare plans a run"),
        (["--epsilon", "8", "--sampling", "fixed_order"], "add --batch 1024"),
        (["--noise-multiplier", "1"], "add --batch 1024"),
        (["--epsilon", "8", "-n", "0"], ": num_examples=0 is not a positive count. Use an integer >= 1"),
    ],
    ids=str,
)
def test_advice_that_cannot_be_given(run: Run, flags: list[str], mend: str) -> None:
    code, out, err = run("plan", "-n", "1000", *flags)
    assert code == 2 and out == "" and mend in " ".join(err.split())


@pytest.mark.slow
def test_a_delta_above_one_over_n_needs_a_flag_and_a_weak_one_is_a_warning(run: Run) -> None:
    flags = ["plan", "-n", "100", "-b", "10", "--steps", "5", "--noise-multiplier", "2", "--delta"]
    code, out, err = run(*flags, "0.5")
    assert code == 2 and out == "" and "Use target_delta <= 0.001" in err and "--allow_large_delta" in err
    for allowed in (["0.5", "--allow-large-delta"], ["0.01"]):
        code, _, err = run(*flags, *allowed)
        assert code == 0 and "warning" in err and "Use target_delta <= 0.001" in err


@pytest.fixture
def output_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run of five steps: ledger and report that agree, and keys in the private directory."""
    monkeypatch.setenv("HF_DPOPT_PRIVATE_DIR", str(tmp_path / "private"))
    folder = tmp_path / "out"
    plan = make_plan(PrivacyConfig(noise_multiplier=1.0, expected_batch_size=10), num_examples=100, num_steps=5)
    with open_log(folder) as log:
        log.record_plan(plan.record.to_json(), must_match=())
        chain = new_chain()
        log.start_chain(chain, 0, "first run")
        for step in range(1, 6):
            log.charge(chain.chain_id, step)
        digest = log.digest()
    facts = RunFacts(
        plan=plan.record.to_json(),
        epsilon_spent=plan.epsilon(),
        delta=plan.delta,
        steps_charged=5,
        steps_planned=5,
        chains=1,
        world_size=1,
        ledger_digest=digest,
        self_check="passed",
        unsafe=False,
        model_class="Model",
        num_trainable=10,
    )
    write_report(folder, facts)
    return folder


def open_log(folder: Path) -> RunLog:
    return RunLog.open(folder, private_dir(None, folder))


def key_of_the_run() -> bytes:
    return secrets_in(default_private_dir())[0]


def test_scan_needs_a_folder(run: Run, tmp_path: Path) -> None:
    code, _, err = run("scan", tmp_path / "missing")
    assert code == 2 and "Give the output_dir of a run" in err


def test_scan_passes_a_clean_folder_and_finds_the_runs_own_keys(run: Run, output_dir: Path) -> None:
    code, out, _ = run("scan", output_dir)
    assert code == 0 and "0 finding(s)" in out and "looked for 5 keys" in out
    (output_dir / "notes.txt").write_text(key_of_the_run().hex())
    code, out, _ = run("scan", output_dir)
    assert code == 1 and "notes.txt" in out and key_of_the_run().hex() not in out


def test_scan_takes_another_private_directory(run: Run, output_dir: Path, tmp_path: Path) -> None:
    chain = new_chain()
    with RunLog.open(tmp_path / "other", private_dir(tmp_path / "elsewhere", tmp_path / "other")) as log:
        log.start_chain(chain, 0, "first run")
    (output_dir / "notes.bin").write_bytes(os.urandom(8) + chain.sampling_key)
    assert run("scan", output_dir)[0] == 0  # the default directory does not hold this key
    assert run("scan", output_dir, "--private-state-dir", tmp_path / "elsewhere")[0] == 1


HEAD = ["plan-head", "-n", "67349", "-b", "1024", "--head_radius", "0.1", "--feature_norm", "1", "--delta", "1e-5"]


@pytest.mark.slow
def test_plan_head_says_noise_bound_and_free_steps(run: Run) -> None:
    code, out, _ = run(*HEAD, "--steps", "100000", "--epsilon", "2", "--json")
    found = json.loads(out)
    assert code == 0 and 1.98 < found["epsilon"] <= 2 and found["released"] == "final weights only"
    assert 1000 < found["free_after"] < 100_000 and found["horizon"] < 100_000
    code, out, _ = run(*HEAD, "--steps", "100000", "--noise_multiplier", f"{found['noise_multiplier']}")
    assert code == 0 and "that of the last iterate" in out and f"{found['free_after']:,}" in out
    code, out, _ = run(*HEAD, "--steps", "100", "--epsilon", "2")
    assert code == 0 and "plain composition" in out


@pytest.mark.parametrize(
    "given, mend",
    [
        (["--steps", "10"], "Give exactly one of target_epsilon"),
        (["--steps", "0", "--epsilon", "2"], "num_steps=0"),
        (["--steps", "10", "--epsilon", "2", "--learning_rate", "9"], "Use at most 4"),
    ],
)
def test_a_wrong_head_is_one_line(run: Run, given: list[str], mend: str) -> None:
    code, out, err = run(*HEAD, *given)
    assert code == 2 and not out and mend in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("epsilon", "batch"),
    [
        ("--epsilon", "--batch-size"),
        ("--target_epsilon", "--batch_size"),
        ("--target-epsilon", "--expected_batch_size"),
    ],
)
def test_flags_have_the_name_of_the_option_and_dashes_are_underscores(run: Run, epsilon: str, batch: str) -> None:
    flags = ["--num_examples", "1000", batch, "100", "--steps", "5", "--sampling", "fixed_order", "--json"]
    code, out, _ = run("plan", *flags, epsilon, "3")
    assert code == 0 and json.loads(out)["target_epsilon"] == 3 and json.loads(out)["expected_batch_size"] == 100


def test_one_line_of_help_says_what_a_command_does(run: Run) -> None:
    code, out, _ = run("--help")
    lines = out.partition("Commands:\n")[2].splitlines()
    commands = [
        "train",
        "synth",
        "demo",
        "plan",
        "verify",
        "audit",
        "scan",
        "doctor",
        "tune",
        "ledger",
        "plan-head",
    ]
    assert code == 0 and [line.split()[0] for line in lines] == commands
    assert all(line.endswith(".") and not line.endswith("...") for line in lines)  # whole sentences


def test_the_version_is_that_of_the_package(run: Run) -> None:
    code, out, _ = run("--version")
    assert code == 0 and out == f"hf-dpopt {hf_dpopt.__version__}\n"


def test_tuning_is_planned_beforehand(run: Run) -> None:
    asked = ["-n", "4000", "--batch", "200", "--passes", "2", "--epsilon", "8"]
    code, out, _ = run("plan", *asked, "--tuned-runs", "10")
    assert code == 0 and "epsilon of each run" in out
    of_each = json.loads(run("plan", *asked, "--tuned-runs", "10", "--json")[1])
    assert 7.9 < of_each["epsilon"] <= 8 and of_each["run_epsilon"] < 6.5
    assert of_each["noise_multiplier"] > json.loads(run("plan", *asked, "--json")[1])["noise_multiplier"]


@pytest.mark.parametrize("wrong", [["--tuned-runs", "1"], ["--tuned-runs", "-1"]])
def test_a_tuning_that_is_none(run: Run, wrong: list[str]) -> None:
    code, _, err = run("plan", "-n", "4000", "--batch", "200", "--steps", "9", "--epsilon", "8", *wrong)
    assert code == 2 and len(err.strip().splitlines()) == 1
