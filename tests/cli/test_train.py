"""`hf-dpopt train`: a file of settings becomes flags, its mistakes are named, and the ready files train from a wheel."""

from __future__ import annotations

import csv
import importlib
import json
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM, RobertaForSequenceClassification

from hf_dpopt.cli import app, train
from tests.helpers import tiny
from tests.recipes.conftest import as_words, gpt2_dir, save_roberta, t5_dir  # noqa: F401  fixtures
from tests.recipes.test_sft import TEMPLATE
from tests.recipes.texts import DOCUMENTS, PAIRS

CONFIGS = {path.stem: path for path in sorted((train.recipes_folder() / "configs").glob("*.yaml"))}
TEXTS = [f"{good} film number {i}" for i, good in enumerate(["a fine", "no good"] * 30)]
TINY = {
    "max_steps": "2", "expected_batch_size": "8", "target_delta": "1e-3", "use_cpu": "true", "disable_tqdm": "true",
    "report_to": "none", "private_state_dir": "keys",
}  # fmt: skip
MORE = {
    "sst2": ["--train_file", "train.csv", "--validation_file", "validation.csv", "--text_column", "text"],
    "prompts_and_answers": ["--max_new_tokens", "8"],
    "seq2seq": ["--max_new_tokens", "8"],
}


def script_of(name: str) -> list[str]:
    """The script of a ready file, and flags that its job has always."""
    return train.JOBS[train.read_settings(CONFIGS[name])[0]]


# --- a file is flags -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("target_epsilon: 8", ["--target_epsilon=8"]),
        ("target-delta: 1e-5", ["--target_delta=1e-5"]),  # a text to YAML, and a number to the parser
        ("save_strategy: no", ["--save_strategy=no"]),  # false to YAML, and a strategy to the Trainer
        ("lora_target_modules: [q_proj, v_proj]", ["--lora_target_modules", "q_proj", "v_proj"]),
        ("noise_kwargs: {nu: 0.1}", ['--noise_kwargs={"nu": 0.1}']),
        ('prompt_template: "--{a} is:\\n"', ["--prompt_template=--{a} is:\n"]),
    ],
)
def test_a_key_is_the_flag_of_that_name(tmp_path: Path, line: str, words: list[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"# a comment\njob: chat\n{line}\n")
    assert train.read_settings(path) == ("chat", words)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[Any, str, str]]:
    """Runs `hf-dpopt train` with these arguments: (exit code, stdout, stderr)."""

    def call(*arguments: str | Path) -> tuple[Any, str, str]:
        monkeypatch.setattr(sys, "argv", ["hf-dpopt", "train", *map(str, arguments)])
        monkeypatch.setattr(sys, "path", [*sys.path])
        with pytest.raises(SystemExit) as stopped:
            app.main()
        return stopped.value.code, *capsys.readouterr()

    return call


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("target_epsilon: 8", "config.yaml has no key `job`. Use one of: classification"),
        ("job: chatt", "config.yaml, line 1: job='chatt': unknown. Did you mean chat? Use one of:"),
        ("job: [chat]", "config.yaml, line 1: job takes one value, and has a list."),
        ("job: chat\nmax_steps: {a: 1}", "line 2: max_steps takes one value, and has keys of its own."),
        ("job: chat\nepsilon: 3", "config.yaml, line 2: 'epsilon' is not a key. Did you mean target_epsilon?"),
        ("job: chat\nlora_rank: 3", "'lora_rank' is not a key. Did you mean lora_r?"),
        ("job: chat\n[1]: 3", "config.yaml, line 2: "),
        ("job: chat\nconfig: other.yaml", "config.yaml, line 2: 'config' is not a key."),
        ("job: chat\ntarget_epsilon: 3\ntarget_epsilon: 8", "line 3: target_epsilon is there twice. Keep one"),
        ("job: chat\ntarget_epsilon: 3\ntarget-epsilon: 8", "line 3: target_epsilon is there twice. Keep one"),
        ("job: chat\ntarget_epsilon:", "line 2: target_epsilon has no value. Write one, or leave the key out."),
        ("job: chat\nmax_steps: [1, 2]", "line 2: max_steps takes one value, and has a list."),
        (
            "job: chat\nlora_target_modules: [q, --target_epsilon=9]",
            "lora_target_modules has '--target_epsilon=9', a flag.",
        ),
        ("job: chat\nnoise_kwargs: {nu: 0.1, nu: 0.2}", "line 2: nu is there twice in noise_kwargs. Keep one of"),
        ("- job: chat", "config.yaml has no keys. Write one `key: value` per line"),
        ("", "config.yaml has no keys. Write one `key: value` per line"),
        ("job: [chat", 'config.yaml is not YAML: while parsing a flow sequence in "config.yaml", line 1'),
        (b"job: chat # \xff", "config.yaml is not YAML"),
        (None, "config.yaml cannot be read (No such file or directory). Name a YAML file"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path, monkeypatch, run, text: str | bytes | None, says: str) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("config.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    code, out, err = run("config.yaml")
    assert code == 2 and not out and says in err and err.count("\n") == 1


def test_a_tuning_refuses_keys_that_it_refuses_as_flags(tmp_path: Path, run) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("job: chat\npush_to_hub: true\n")
    assert "push_to_hub in " in run(path, "--tuned_runs", "10")[2]


def test_a_file_is_asked_for(run) -> None:
    assert "`file`: missing. Name one" in run()[2]


@pytest.mark.parametrize("flags", [["--target_epsilon", "3"], ["--target_epsilon=3"], ["-x"]])
def test_flags_come_after_the_file(run, flags: list[str]) -> None:
    code, _, err = run(*flags, "config.yaml")
    assert code == 2 and f"Name the file first: `hf-dpopt train config.yaml {flags[0]} ..`." in err


def test_the_file_of_synth_comes_first(monkeypatch, capsys) -> None:
    """Without one the script would run its embedded job."""
    monkeypatch.setattr(sys, "argv", ["hf-dpopt", "synth", "--num_rows", "5"])
    monkeypatch.setattr("hf_dpopt.cli.train.run_script", lambda *_: pytest.fail("the script ran"))
    with pytest.raises(SystemExit) as stopped:
        app.main()
    assert stopped.value.code == 2 and "Name the file first: `hf-dpopt synth patients.csv" in capsys.readouterr().err


def test_synth_runs_its_script_on_a_file(tmp_path, monkeypatch, capsys) -> None:
    """A table without a text gets a draft of its schema: the names of its columns, and no value."""
    pytest.importorskip("trl", reason="TRL is in the test extra: pip install '.[test]'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    flags = ["--model_name_or_path", "m", "--target_epsilon", "8", "--use_cpu"]
    monkeypatch.setattr(sys, "argv", ["hf-dpopt", "synth", "patients.csv", *flags])
    Path("patients.csv").write_text("age,city\n43,Bonn\n")
    with pytest.raises(SystemExit) as stopped:
        app.main()
    err = capsys.readouterr().err
    kinds = "one of integer, number, category, text"
    assert stopped.value.code == 2 and json.dumps({"age": {"type": kinds}, "city": {"type": kinds}}) in err
    assert "43" not in err and "Bonn" not in err and err.count("\n") == 1


# --- ready files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_a_ready_file_has_flags_of_its_script(name: str, tmp_path, monkeypatch) -> None:
    pytest.importorskip("trl", reason="TRL is in the test extra: pip install '.[test]'")
    monkeypatch.chdir(tmp_path)
    _, words = train.read_settings(CONFIGS[name])
    script, *always = script_of(name)
    arguments = importlib.import_module(f"recipes.{script}").parse([*always, *words, "--use_cpu", "true"])
    assert any(getattr(one, "target_epsilon", None) in (2.0, 8.0) for one in arguments)


def test_every_job_has_an_example_that_is_printed(run) -> None:
    assert set(train.JOBS) <= set(CONFIGS)
    for name, path in CONFIGS.items():
        assert run("--example", name) == (0, path.read_text(), "")
        assert f"Run: hf-dpopt train {name}.yaml\n" in path.read_text()
    assert "example='cht': unknown. Did you mean chat? Use one of: chat, " in run("--example", "cht")[2]


def write_files(folder: Path) -> None:
    """Write the training and validation files that the ready files name."""
    labels = ["positive", "negative"] * 30
    people = [f"p{i // 2}" for i in range(60)]
    tables = {
        "train.csv": [("text", "label"), *((f"truly {text}", y) for text, y in zip(TEXTS, labels, strict=True))],
        "people.csv": [("text", "label", "person"), *zip(TEXTS, labels, people, strict=True)],
        "validation.csv": [("text", "label"), *((f"so {TEXTS[i]}", labels[i]) for i in range(10))],
        "pairs.csv": [("question", "answer"), *((f"{asked}, open", told) for asked, told in PAIRS)],
        "held_out.csv": [("question", "answer"), *((asked, f"Here {told}") for asked, told in PAIRS[:8])],
    }
    for name, rows in tables.items():
        with open(folder / name, "w", newline="") as file:
            csv.writer(file).writerows(rows)
    chats = [[{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"it is {i}"}] for i in range(28)]
    pairs = [{"prompt": f"{i}?", "chosen": f" it is {i}", "rejected": " no idea"} for i in range(28)]
    for name, rows in {
        "preferences.jsonl": pairs[:24],
        "held_out_preferences.jsonl": pairs[24:],
        "documents.jsonl": [{"text": text} for text in DOCUMENTS],
        "held_out.jsonl": [{"text": text} for text in DOCUMENTS[:8]],
        "chats.jsonl": [{"messages": chat} for chat in chats[:24]],
        "held_out_chats.jsonl": [{"messages": chat} for chat in chats[24:]],
    }.items():
        (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.fixture(scope="module")
def models(tmp_path_factory, gpt2_dir: str, t5_dir: str) -> dict[str, str]:  # noqa: F811
    """Script, or ready file -> folder of a tiny model."""
    folder = tmp_path_factory.mktemp("models")
    roberta = save_roberta(folder / "roberta", RobertaForSequenceClassification, TEXTS * 2)
    tiny.made(
        LlamaForCausalLM, vocab_size=259, bos_token_id=1, eos_token_id=2, max_position_embeddings=256
    ).save_pretrained(folder / "chat")  # fmt: skip
    tiny.byte_tokenizer(TEMPLATE).save_pretrained(folder / "chat")
    chat = str(folder / "chat")
    return {
        "glue": roberta, "linear_probe": roberta, "clm": gpt2_dir, "seq2seq": t5_dir, "sft": chat, "preferences": chat,
        "synthetic": chat,
    }  # fmt: skip


def changes(name: str, models: dict[str, str]) -> list[str]:
    """Flags that make a ready file a tiny run."""
    words = as_words(TINY)
    encoder = ["--encoder_name_or_path", models["glue"], "--num_rows", "8", "--num_clusters", "8"]
    return [
        *words,
        "--model_name_or_path",
        models.get(name) or models[script_of(name)[0]],
        *(encoder if name == "synthetic" else []),
        *MORE.get(name, []),
    ]


def test_a_ready_file_trains_and_flags_override_it(tmp_path, monkeypatch, run, models) -> None:
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    code, out, err = run(CONFIGS["classification"], *changes("classification", models), "--target_epsilon", "3")
    assert code == 0, err
    assert "epsilon 2.9" in out and "unit: example" in out
    assert (tmp_path / "private-classifier" / "privacy" / "statement.md").is_file()


def _first_line(path: Path) -> None:
    path.write_text(f"{path.read_text().splitlines()[0]}\n" if path.suffix == ".csv" else "\n")


def _other_names(path: Path) -> None:
    first, *rows = path.read_text().splitlines()
    if path.suffix == ".csv":
        rows.insert(0, ",".join("abc"[: 1 + first.count(",")]))
    else:
        rows = [json.dumps({f"x{i}": one for i, one in enumerate(json.loads(row).values())}) for row in (first, *rows)]
    path.write_text("\n".join(rows))


FAULTS: dict[str, tuple[Callable[[Path], Any], str]] = {  # of a file -> how to make it, what is said
    "missing": (Path.unlink, "{option}={file} does not exist. Check the path"),
    "a folder": (lambda path: [path.unlink(), path.mkdir()], "{option}={file} cannot be read: Is a directory. Name"),
    "empty": (lambda path: path.write_text(""), "{option}={file} holds no rows. Name a file"),
    "names alone": (_first_line, "{option}={file} holds no rows. Name a file"),
    "no UTF-8": (lambda path: path.write_bytes(path.read_bytes() + b"\xff\n"), "{option}={file} is not UTF-8 text"),
    "other columns": (_other_names, "{file}"),
    "a key misspelt": (Path.unlink, "--{option}s is not a flag. Did you mean --{option}?"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_wrong_file_is_named_before_a_model_is_loaded(name: str, fault: str, tmp_path, monkeypatch, capsys) -> None:
    """There is no model: to look for one would be another error. No folder and no key is left."""
    pytest.importorskip("trl", reason="TRL is in the test extra: pip install '.[test]'")
    monkeypatch.chdir(tmp_path)
    script, *always = script_of(name)
    words = [*always, *train.read_settings(CONFIGS[name])[1], *as_words(TINY), *MORE.get(name, [])]
    words += ["--model_name_or_path", "nothere"]
    for option in ("train_file", "validation_file"):
        write_files(tmp_path)
        files = sorted(tmp_path.iterdir())
        given = dict(word.removeprefix("--").split("=", 1) for word in words if "=" in word)
        file = given.get(option) or words[words.index(f"--{option}") + 1]
        spoil, says = FAULTS[fault]
        spoil(tmp_path / file)
        more = [f"--{option}s", file] if fault == "a key misspelt" else []
        assert importlib.import_module(f"recipes.{script}").run([*words, *more]) == 2
        [said] = [line for line in capsys.readouterr().err.splitlines() if line]
        assert said.startswith("error: ") and says.format(option=option, file=file) in said and "nothere" not in said
        assert {*tmp_path.iterdir()} <= {*files}, "something was written"
        if (tmp_path / file).is_dir():
            (tmp_path / file).rmdir()


@pytest.fixture(scope="module")
def bare(repo: Path, tmp_path_factory) -> Path:
    """`hf-dpopt` of the wheel, in an environment that has the other packages of this one."""
    pytest.importorskip("hatchling", reason="the build backend is in the extra `test`")
    folder = tmp_path_factory.mktemp("bare")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)], cwd=repo, check=True
    )
    venv.create(folder / "env", with_pip=False)
    python = folder / "env" / "bin" / "python"
    (packages,) = folder.glob("env/lib/*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_paths()["purelib"])
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--force-reinstall", *map(str, folder.glob("*.whl"))], check=True)
    return python.parent / "hf-dpopt"


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_a_ready_file_trains_from_a_bare_wheel(name: str, bare: Path, tmp_path, models) -> None:
    """In a folder without the repository: the file is printed, and trained on."""
    if name == "chat_qlora":
        pytest.importorskip("bitsandbytes", reason="quantised bases need it")
    write_files(tmp_path)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

    def call(*words: str) -> str:
        done = subprocess.run(
            [bare, "train", *words], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    (tmp_path / "config.yaml").write_text(call("--example", name))
    assert "***** Result *****" in call("config.yaml", *changes(name, models))
    assert list(tmp_path.glob("private-*/privacy/statement.md"))
