"""`recipes/preferences.py` as a user meets it: pairs in JSON lines, both jobs, one-line errors, what is printed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import fingerprint

pytest.importorskip("trl", reason="TRL is in the test extra: pip install '.[test]'")

from recipes import preferences, sft
from recipes.embedded import chats
from tests.helpers import tiny
from tests.helpers.ranks import Ranks
from tests.recipes.test_sft import FLAGS, TEMPLATE, folder  # noqa: F401  a fixture

FLAGS = FLAGS | {"train_file": "pairs.jsonl", "validation_file": "held_out.jsonl", "max_length": "64"}


def _pairs(first: int, num: int, word: str) -> list[dict[str, Any]]:
    """Answers that differ in one letter, which decides."""
    return [{"prompt": f"{word} {i}?", "chosen": f" a {i}", "rejected": f" z {i}"} for i in range(first, first + num)]


@pytest.fixture
def pairs(folder) -> Path:  # noqa: F811
    for name, rows in (("pairs", _pairs(0, 24, "what")), ("held_out", _pairs(100, 6, "why"))):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def _words(without: str | None = None, **changes: str) -> list[str]:
    given = FLAGS | changes
    return [word for name, value in given.items() if name != without for word in (f"--{name}", value)]


@pytest.mark.parametrize("job", ["dpo", "reward"])
def test_a_file_of_pairs_is_learned(pairs, capsys, job):
    lora = {"use_peft": "true", "lora_r": "2", "lora_target_modules": "all-linear"}
    assert preferences.run(_words(job=job, **lora)) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    assert re.search(r"held-out pairs +[\d.]+% ranked correctly before, [\d.]+% after", printed)
    assert "epsilon 7.9" in printed and ("reward accuracy" in printed) == (job == "dpo")
    assert (pairs / "out" / "privacy" / "statement.md").is_file()
    assert "**epsilon = 7.9" in (pairs / "out" / "README.md").read_text()
    adapter = json.loads((pairs / "out" / "adapter_config.json").read_text())
    assert adapter["task_type"] == {"dpo": "CAUSAL_LM", "reward": "SEQ_CLS"}[job]


def test_a_number_in_one_prompt_is_in_no_other(pairs):
    """TRL takes the prompts out of the answers, and one type for all would make 2.0 of 2 because one record has 2.5."""
    template = TEMPLATE.replace("<eos>", "{% if m['about'] %}{{ m['about'] | tojson }}{% endif %}<eos>")
    tiny.byte_tokenizer(template).save_pretrained("model")
    seen = []
    for output_dir, of_one in (("without", 1), ("with", 2.5)):
        rows = []
        for i in range(24):
            asked = [{"role": "user", "content": f"what {i}?", "about": {"days": of_one if i == 0 else 2}}]
            answers = ([{"role": "assistant", "content": f"{word} {i}"}] for word in "az")
            rows.append({name: asked + answer for name, answer in zip(("chosen", "rejected"), answers, strict=True)})
        Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        data_args, args, model_args, _ = preferences.parse(_words("validation_file", output_dir=output_dir))
        found = sft.load_rows(data_args, None, preferences.LAYOUTS)
        trainer = sft.make_trainer(preferences.DPDPOTrainer, args, model_args, found)
        seen.append([row["prompt_ids"] for row in trainer.train_dataset])
    assert [i for i in range(24) if seen[0][i] != seen[1][i]] == [0]


def test_two_processes_share_the_values_of_the_reference(pairs, monkeypatch):
    """`accelerate launch`: the rows are in memory, and the files of datasets in a folder of each process."""
    monkeypatch.setattr(fingerprint, "_TEMP_DIR_FOR_TEMP_CACHE_FILES", None)

    def train() -> None:
        assert preferences.run(_words()) == 0

    ranks = Ranks(train, 2, pairs / "logs")
    ranks.wait()
    assert ranks.codes == {0: 0, 1: 0}, "".join(log.read_text() for log in (pairs / "logs").iterdir())[-2000:]


def test_the_number_of_pairs_is_not_printed_where_users_are_protected(pairs, capsys):
    rows = [row | {"who": f"p{i % 8}"} for i, row in enumerate(_pairs(0, 24, "what"))]
    Path("pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = _words(privacy_unit="user", user_id_column="who", expected_batch_size="4", target_delta="1e-2")
    assert preferences.run(words) == 0, capsys.readouterr().err
    result = capsys.readouterr().out.partition("Result")[2]
    assert re.search(r"users +8\n", result) and "unit: user" in result and "\n  pairs " not in result
    kept = "".join(path.read_text() for path in (pairs / "out").glob("*.json"))
    assert '"train_users": 8' in kept and '"train_samples":' not in kept


@pytest.mark.parametrize("job", ["dpo", "reward"])
def test_a_preference_is_learned_without_privacy(pairs, capsys, job):
    words = _words("target_epsilon", job=job, non_private="true", learning_rate="1e-2", max_steps="30")
    assert preferences.run(words) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    assert "100.0% after" in printed and "NONE (--non_private)" in printed


@pytest.mark.parametrize("flag", [["--job", "reward"], ["--job=reward"], ["--config", "run.yaml"]])
def test_the_job_is_named_by_a_flag_or_a_file_of_flags(pairs, flag):
    Path("run.yaml").write_text("job: reward\n")
    _, training, model, _ = preferences.parse([*_words(), *flag])
    assert isinstance(training, preferences.DPRewardConfig) and model.lora_task_type == "SEQ_CLS"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"prompt": "a", "completion": "b"},
            "Needed are `prompt` and `chosen` and `rejected`, or `chosen` and `rejec",
        ),
        ({"prompt": "a", "chosen": "b", "rejected": " "}, "line 1: 'rejected' must be a string that is not empty"),
        ({"prompt": "a", "chosen": [{"role": "assistant"}], "rejected": "b"}, "line 1: 'chosen' must be a string"),
    ],
)
def test_a_row_that_is_no_pair_is_named(pairs, capsys, row, says):
    Path("pairs.jsonl").write_text(json.dumps(row) + "\n")
    assert preferences.run(_words()) == 2
    assert says in capsys.readouterr().err and not Path("out").exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"job": "kto"}, "job='kto' is not a job. Use one of: dpo, reward."),
        ({"job": "reward", "beta": "0.2"}, "--beta is not a flag"),
        ({"eval_data_privacy": "private", "eval_target_epsilon": "1"}, "not supported by this recipe"),
        (
            {"job": "reward", "lora_alpha": "32"},
            "lora_alpha=32: LoRA is off, so all weights would be trained. Add --u",
        ),
        ({"config": "list.yaml"}, "config=list.yaml: the file has no flags"),
        ({"max_eval_samples": "0"}, "max_eval_samples=0 is not a positive count"),
    ],
)
def test_wrong_flags_end_in_one_line(pairs, capsys, changes, says):
    Path("list.yaml").write_text("- use_peft")
    assert preferences.run(_words(**changes)) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1 and not Path("out").exists()


def test_an_answer_that_breaks_off_is_rejected():
    for rows in chats.read_pairs().values():
        assert len(rows) > 300
        for row in rows:
            (chosen,), (rejected,) = row["chosen"], row["rejected"]
            assert chosen["content"].startswith(rejected["content"].split()[0])
            assert 0 < len(rejected["content"]) < len(chosen["content"])


def test_pairs_are_ranked_by_the_likelier_answer(pairs, monkeypatch):
    """Equal to a loop over single answers."""
    made = []
    monkeypatch.setattr(preferences.running, "train", lambda trainer, args: made.append(trainer))
    monkeypatch.setattr(preferences.running, "publish", lambda trainer, args: None)
    assert preferences.run(_words()) == 0
    (trainer,) = made
    wins = []
    for row in trainer.eval_dataset:
        scores = []
        for answer in (row["chosen_ids"], row["rejected_ids"]):
            ids = torch.tensor([row["prompt_ids"] + answer])
            with torch.no_grad():
                log_p = trainer.model.eval()(input_ids=ids).logits[0, :-1].log_softmax(-1)
            scores.append(log_p.gather(1, ids[0, 1:, None])[-len(answer) :].sum().item())
        wins.append(scores[0] > scores[1])
    assert preferences.share_ranked_correctly(trainer) == pytest.approx(sum(wins) / len(wins))
