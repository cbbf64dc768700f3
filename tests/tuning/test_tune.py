"""Tuning: as many runs as were drawn, one law for all, and nothing of any but the best."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hf_dpopt.accounting.best_of_runs import RunCount
from hf_dpopt.cli import tune
from hf_dpopt.cli.tune import run_tuning
from hf_dpopt.common.chained import ChainedFile
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.report.report import read_report
from hf_dpopt.run.dataset_ledger import DatasetLedger
from hf_dpopt.run.keys import private_dir
from hf_dpopt.run.ledger import Ledger
from hf_dpopt.run.run_log import RunLog
from hf_dpopt.tuning import search
from hf_dpopt.tuning.command import Command, check_space
from hf_dpopt.tuning.search import Candidate, RunFailed, Tuning
from hf_dpopt.tuning.space import Space

TOY = [
    sys.executable, str(Path(__file__).parent / "toy_run.py"), "--use_cpu", "True", "--disable_tqdm", "True",
    "--remove_unused_columns", "False", "--per_device_train_batch_size", "16", "--expected_batch_size", "16",
    "--max_steps", "2", "--save_strategy", "no", "--skip_self_check", "True", "--target_delta", "1e-3",
    "--eval_data_privacy", "public", "--logging_steps", "1",
]  # fmt: skip
RATES = {"learning_rate": [0.1, 0.2, 0.3]}


# --- the space ---


def test_options_are_drawn_from_their_laws():
    space = Space.read(
        '{"learning_rate": {"low": 1e-4, "high": 1e-1, "log": true}, "warmup_steps": {"low": 0, "high": 2, '
        '"integer": true}, "weight_decay": [0, 0.1]}'
    )
    drawn = [space.draw(random.SystemRandom()) for _ in range(400)]
    rates = [one["learning_rate"] for one in drawn]
    assert all(1e-4 <= rate <= 1e-1 for rate in rates)
    below = sum(rate < 10**-2.5 for rate in rates)
    assert 130 < below < 270  # half of them on a log scale; missed with probability 2e-12
    assert set(Counter(one["warmup_steps"] for one in drawn)) == {0, 1, 2}
    assert {one["weight_decay"] for one in drawn} == {0, 0.1}
    assert Space.read(space.public_dict()) == space


@pytest.mark.parametrize(
    "given, match",
    [
        ("no such file", "no file of JSON"),
        ("[1]", "has no options"),
        ("{}", "has no options"),
        ({"expected_batch_size": [64, 128]}, "decides what a run costs"),
        ({"noise_multiplier": [1.0]}, "has no place in one"),
        ({"target_epsilon": [1.0]}, "which the tuning sets"),
        ({"learning_rate": {"low": 0, "high": 1, "log": True}}, "is no law"),
        ({"learning_rate": {"low": 1, "high": 1}}, "is no law"),
        ({"learning_rate": 0.1}, "is no law"),
        ({"learning_rate": []}, "is no law"),
        ({"warmup_steps": {"low": 0.5, "high": 3, "integer": True}}, "is no law"),
    ],
)
def test_spaces_that_are_none(given, match):
    with pytest.raises(DPConfigError, match=match):
        Space.read(given)


# --- the command ---


def command(words=TOY, metric="eval_loss", **changes) -> Command:
    return Command(words, law=RunCount(mean=3.0), target_epsilon=8.0, metric=metric, **changes)


@pytest.mark.parametrize(
    "words, metric, match",
    [
        ([], "eval_loss", "no command to tune"),
        (["no-such-program", *TOY[1:]], "eval_loss", "is no program here"),
        ([*TOY, "--target_epsilon", "8"], "eval_loss", "--target_epsilon in the command"),
        ([*TOY, "--output-dir=x"], "eval_loss", "--output_dir in the command"),
        ([*TOY, "--push_to_hub", "True"], "eval_loss", "--push_to_hub in the command"),
        (TOY, "train_loss", "no score on evaluation data"),
        ([word for word in TOY if word not in ("--eval_data_privacy", "public")], "eval_loss", "whose they are"),
        ([*TOY, "--eval_data_privacy", "private"], "eval_loss", "choice costs the people in the evaluation set"),
    ],
)
def test_commands_that_are_refused(words, metric, match):
    with pytest.raises(DPConfigError, match=match):
        command(words, metric)


def test_a_space_does_not_repeat_the_command():
    with pytest.raises(DPConfigError, match="learning_rate are in the space and in the command"):
        check_space(Space.read(RATES), [*TOY, "--learning_rate", "0.1"])


# --- the runs ---


class FixedCount(RunCount):
    """As many runs as its mean."""

    def draw(self, source: random.Random) -> int:
        return int(self.mean)


def place_of(tmp_path: Path) -> Path:
    """Folder of the tuning's log, and of its runs."""
    (place,) = (tmp_path / "private").glob("work/*/tuning")
    return place


def tuning(tmp_path: Path, *, count: float = 3.0, **changes: Any) -> Tuning:
    options = {
        "law": FixedCount(mean=count), "space": Space.read(RATES), "output_dir": tmp_path / "out",
        "private_dir": tmp_path / "private", "asked": {"metric": "eval_accuracy"},
    }  # fmt: skip
    return Tuning(**options | changes)


def test_the_best_of_all_runs_is_chosen_and_failed_ones_count(tmp_path: Path):
    scores = iter([0.5, RunFailed(), 0.9, float("nan"), 0.7])
    trained: list[Candidate] = []

    def train(candidate: Candidate) -> float:
        trained.append(candidate)
        score = next(scores)
        if isinstance(score, Exception):
            raise score
        return score

    best = tuning(tmp_path, count=5.0).run(train)
    assert best is not None and best.score == 0.9 and best.candidate == trained[2]
    assert len(trained) == 5 and len({one.name for one in trained}) == 5
    file = place_of(tmp_path) / "tuning.jsonl"
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    smallest = tuning(tmp_path / "other", is_greater_better=False).run(iter_scores(0.4, 0.2, 0.3))
    assert smallest is not None and smallest.score == 0.2


def iter_scores(*scores: float):
    left = iter(scores)
    return lambda candidate: next(left)


def test_an_interrupted_tuning_goes_on_and_trains_no_run_twice(tmp_path: Path):
    seen: list[str] = []

    def interrupted(candidate: Candidate) -> float:
        seen.append(candidate.name)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return 0.5

    with pytest.raises(KeyboardInterrupt):
        tuning(tmp_path).run(interrupted)

    def rest(candidate: Candidate) -> float:
        seen.append(candidate.name)
        return 0.6

    best = tuning(tmp_path).run(rest)
    assert len(seen) == 4 and seen[1] == seen[2] and len(set(seen)) == 3  # the one that was going on, and the last
    assert best is not None and best.score == 0.6
    again = tuning(tmp_path)
    assert again.run(lambda candidate: pytest.fail("no run is left")) == best
    again.finish()
    with pytest.raises(DPConfigError, match="was finished and released"):
        tuning(tmp_path).run(rest)
    assert not [path for path in again.place.iterdir() if path.name.startswith(("run-", "keys-"))]


@pytest.mark.parametrize(
    "changes",
    [
        {"space": Space.read({"learning_rate": [0.1]})},
        {"law": FixedCount(mean=4.0)},
        {"asked": {"metric": "eval_loss"}},
        {"is_greater_better": False},
    ],
)
def test_a_tuning_goes_on_with_what_it_began_with_alone(tmp_path: Path, changes):
    tuning(tmp_path).run(iter_scores(1, 2, 3))
    with pytest.raises(DPConfigError, match="was begun with another"):
        tuning(tmp_path, **changes).run(iter_scores())


def test_a_run_that_is_killed_again_and_again_counts_as_failed(tmp_path: Path):
    def killed(candidate: Candidate) -> float:
        raise KeyboardInterrupt

    for _ in range(search.MOST_STARTS):
        with pytest.raises(KeyboardInterrupt):
            tuning(tmp_path, count=2.0).run(killed)
    trained = []
    assert tuning(tmp_path, count=2.0).run(lambda candidate: trained.append(candidate.name) or 0.5).score == 0.5
    assert len(trained) == 1


def test_nothing_is_chosen_where_no_run_gave_a_score(tmp_path: Path):
    assert tuning(tmp_path).run(iter_scores(*[float("nan")] * 3)) is None


def test_a_refusal_stops_the_first_run_and_later_ones_tell_nothing(tmp_path: Path):
    def refused(candidate: Candidate) -> float:
        raise DPConfigError("no")

    with pytest.raises(DPConfigError):
        tuning(tmp_path).run(refused)
    scores = iter([0.5, DPConfigError("no"), 0.4])

    def train(candidate: Candidate) -> float:
        score = next(scores)
        if isinstance(score, Exception):
            raise score
        return score

    assert tuning(tmp_path).run(train).score == 0.5


def test_two_tunings_of_one_folder_do_not_go_on_at_once(tmp_path: Path):
    def train(candidate: Candidate) -> float:
        with pytest.raises(DPConfigError, match="is going on in process"):
            tuning(tmp_path).run(iter_scores())
        return 0.1

    tuning(tmp_path, count=2.0).run(train)


@pytest.mark.parametrize(
    "plans, match",
    [
        ([{"noise_multiplier": 1.0}, {"noise_multiplier": 1.1}], "differ in noise_multiplier"),
        ([{"num_steps": 3}, {"num_steps": 4}], "differ in num_steps"),
        ([{"tuned": None}, {"tuned": None}], "were not planned as ones of several"),
    ],
)
def test_runs_of_unlike_cost_are_not_released(tmp_path: Path, plans, match):
    law = FixedCount(mean=2.0)
    left = iter(plans)

    def train(candidate: Candidate) -> float:
        with RunLog.open(candidate.folder, private_dir(candidate.keys, candidate.folder)) as log:
            log.record_plan({"tuned": law.public_dict(), **next(left)}, must_match=())
        return 0.5

    with pytest.raises(DPConfigError, match=match):
        tuning(tmp_path, law=law).run(train)


# --- the command line, with real runs ---


def asked(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    options = {
        "command": TOY, "output_dir": tmp_path / "out", "epsilon": 8.0, "space": json.dumps(RATES),
        "metric": "eval_rate", "runs": 2.0, "minimize": False,
        "private_state_dir": tmp_path / "private", "privacy_ledger": str(tmp_path / "people.jsonl"),
        "privacy_ledger_epsilon": 40.0,
    }  # fmt: skip
    return options | changes


@pytest.mark.slow
def test_the_best_run_alone_is_released(tmp_path: Path, capfd, monkeypatch):
    """Two runs, of which one fails: neither folder, files nor console tell that there were two."""
    monkeypatch.setattr(RunCount, "draw", lambda self, source: 2)
    drawn = iter([0.2, 0.3])
    monkeypatch.setattr(Space, "draw", lambda self, source: {"learning_rate": next(drawn)})
    assert run_tuning(**asked(tmp_path, command=[*TOY, "--fails_above", "0.25"]))
    out = tmp_path / "out"
    said = json.loads((out / "tuning.json").read_text())
    assert said["options"] == {"learning_rate": 0.2} and said["score"] == 0.2
    facts = read_report(out)
    assert facts.plan["tuned"] == {"mean": 2.0, "shape": 1.0}
    assert 7.9 < facts.epsilon <= 8 and facts.plan["run_epsilon"] < facts.epsilon
    assert facts.ledger_digest == Ledger.find(out).digest()
    names = {path.name for path in out.rglob("*")}
    assert "model.safetensors" in names and not names & {
        "training_args.bin",
        "trainer_state.json",
        "ledger.jsonl.lock",
    }
    (ledger,) = DatasetLedger.read(tmp_path / "people.jsonl").entries.values()
    assert ledger.what == "tuning"
    place = place_of(tmp_path)
    runs = next(iter(ChainedFile.read(place / "tuning.jsonl").records))["runs"]
    assert len(runs) == 2 and {path.name for path in place.iterdir()} == {
        "tuning.jsonl", "tuning.jsonl.lock", "tuning.lock",
    }  # fmt: skip
    console = "".join(capfd.readouterr())
    everything = console.encode() + b"".join(path.read_bytes() for path in out.rglob("*") if path.is_file())
    for run in runs:
        assert run["name"].encode() not in everything and str(place).encode() not in everything
    assert "fail" not in console and "0.3" not in console and "for the whole tuning" in console


def test_two_tunings_have_two_entries_in_the_ledger_of_the_people(tmp_path: Path, monkeypatch):
    """Same output_dir, another private folder (a new container, say): one entry would be charged once for both."""
    script = (
        "import json, pathlib, sys; at = {a: b for a, b in zip(sys.argv, sys.argv[1:])}; "
        "out = pathlib.Path(at['--output_dir']); out.mkdir(); "
        "(out / 'eval_results.json').write_text('{\"eval_rate\": 1}'); "
        "open(sys.argv[1], 'a').write(at['--privacy_ledger_entry'] + '\\n')"
    )
    said = tmp_path / "said"
    words = [sys.executable, "-c", script, str(said), "--eval_data_privacy", "public"]
    monkeypatch.setattr(RunCount, "draw", lambda self, source: 2)
    for name in ("has_begun", "has_charged"):
        monkeypatch.setattr(Candidate, name, property(lambda self: self.folder.exists()))
    monkeypatch.setattr(Tuning, "_check_same_mechanism", lambda self, candidates: None)  # it reads their ledgers
    won = {"options": {}, "score": 1.0, "epsilon": 8.0, "delta": 1e-5, "run_epsilon": 4.0}
    monkeypatch.setattr(tune, "release", lambda *a, **k: won)
    for private in ("first", "second"):
        assert run_tuning(**asked(tmp_path, command=words, private_state_dir=tmp_path / private / "private"))
    first, again, second, last = said.read_text().split()
    assert first == again and second == last and first != second


def test_a_command_that_is_refused_says_why(tmp_path: Path):
    refuses = [sys.executable, "-c", "import sys; print('error: this is wrong.'); sys.exit(2)"]
    words = [*refuses, "--eval_data_privacy", "public"]
    with pytest.raises(DPConfigError, match="refused before it took a step: error: this is wrong"):
        run_tuning(**asked(tmp_path, command=words, privacy_ledger=None, privacy_ledger_epsilon=None))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("program", ["raise SystemExit(1)", "pass"])
def test_a_command_that_begins_no_private_run_ends_the_tuning(tmp_path: Path, program: str):
    words = [sys.executable, "-c", f"print('what I print'); {program}", "--eval_data_privacy", "public"]
    with pytest.raises(DPConfigError, match="no private run took a step") as refused:
        run_tuning(**asked(tmp_path, command=words, privacy_ledger=None, privacy_ledger_epsilon=None))
    (log,) = (tmp_path / "private").glob("work/*/tuning/run-*.log")
    assert log.read_text() == "what I print\n" and str(log) in str(refused.value)
    assert "what I print" not in str(refused.value)


def test_nothing_begins_with_what_no_run_can_use(tmp_path: Path):
    (tmp_path / "file").write_text("no ledger\n")
    for changes, match in [
        ({"epsilon": -3.0}, "target_epsilon=-3 is outside"),
        ({"epsilon": float("nan")}, "target_epsilon=nan"),
        ({"output_dir": tmp_path / "file"}, "is no folder"),
        ({"privacy_ledger": str(tmp_path / "file")}, "line 1"),
    ]:
        with pytest.raises(DPConfigError, match=match):
            run_tuning(**asked(tmp_path, **changes))
    assert {path.name for path in tmp_path.iterdir()} == {"file"}
