"""The run over a sample: one forked process after the other, results written as they come."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import sys
import time
from pathlib import Path
from typing import Any

from tests.mutants import child, touching
from tests.mutants.verdicts import VERDICTS, key_of

Row = dict[str, Any]
PACKAGES = ("hf_dpopt", "cosmic-ray", "torch", "transformers", "pytest")
OPEN = ("survived", "not covered")
NUM_FILES = 24  # of tests for one mutant: each is imported anew, which is not in its seconds
WALL = 40.0  # seconds of waiting for one of the budget: on a machine with others, most of it is theirs


def load(path: Path) -> tuple[Row, list[Row]]:
    """The head and the rows of a file of results."""
    head, *rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return head, rows


def save(path: Path, head: Row, rows: list[Row]) -> None:
    """Write all of it, whole or not at all."""
    text = "".join(json.dumps(line) + "\n" for line in [head, *rows])
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def run(repo: Path, path: Path, options: argparse.Namespace) -> None:
    """Draw a sample, or take the one that is there, and run what has no result yet."""
    from tests.mutants import sample

    options.work.mkdir(parents=True, exist_ok=True)
    if options.resume:
        head, rows = load(path)
    else:
        if path.exists() and any("kind" in row for row in load(path)[1]):
            sys.exit(f"{path} has results. Go on with --resume, or delete it.")
        chosen = sample.sample(repo, options.sample, options.seed)
        rows = [{"area": area, **dataclasses.asdict(found.mutant)} for area, found in chosen]
        head = {"command": f"python -m tests.mutants --sample {options.sample} --seed {options.seed}"}
        save(path, head, rows)
    head["versions"] = {name: importlib.metadata.version(name) for name in PACKAGES}
    _import_libraries()
    lines = touching.record(repo, options.work / "lines.json", log=options.work / "lines.log")
    campaign = _Campaign(repo, options, lines)
    todo = [i for i, row in enumerate(rows) if _is_open(row, options)]
    for i in todo[: options.at_most]:
        rows[i] = campaign.result(rows, i, head)
        save(path, head, rows)
        print(_said(i, rows[i]), flush=True)


def _is_open(row: Row, options: argparse.Namespace) -> bool:
    if "kind" not in row:
        return True
    verdict, why = VERDICTS.get(key_of(row), ("open", ""))
    has_reason = verdict in ("same", "harmless") and "::" not in why
    return options.survivors and row["kind"] in OPEN and not has_reason


def _said(i: int, row: Row) -> str:
    where = f"{row['file']}:{row['line']} {row['operator']}: {row['after']}"
    return f"{i:3} {row['kind']:11} {row['seconds']:6.1f} s  {where}  [{row['by']}]"


def _import_libraries() -> None:
    """What every test imports, once, for the processes that are forked; of this package nothing."""
    import accelerate  # noqa: F401
    import datasets  # noqa: F401
    import dp_accounting.pld  # noqa: F401
    import peft  # noqa: F401
    import scipy.optimize
    import scipy.stats  # noqa: F401
    import torch
    import transformers

    torch.set_num_threads(1)
    assert transformers.Trainer and transformers.BertForSequenceClassification  # imported when they are asked for
    assert not any(name.partition(".")[0] == "hf_dpopt" for name in sys.modules)


class _Campaign:
    """Runs the mutants of one sample against the tests that touch them."""

    def __init__(self, repo: Path, options: argparse.Namespace, lines: touching.Lines):
        self.repo, self.options, self.lines = repo, options, lines
        self.tests = touching.all_tests(repo)
        self.green = set(lines)
        self.red: set[str] = set()

    def result(self, rows: list[Row], i: int, head: Row) -> Row:
        """The row with what became of its mutant, or of another of its area where its line is gone."""
        from tests.mutants.operators import Mutant, mutants_of, mutated

        names = [field.name for field in dataclasses.fields(Mutant)]
        row = {name: rows[i][name] for name in ("area", *names)}
        found = {one.mutant: one for one in mutants_of(self.repo, row["file"])}
        mutant = Mutant(**{name: row[name] for name in names})
        if mutant not in found:
            row = self._replacement(rows, i, head)
            mutant = Mutant(**{name: row[name] for name in names})
            found = {one.mutant: one for one in mutants_of(self.repo, row["file"])}
        one, start = found[mutant], time.monotonic()
        sound = (self.repo / row["file"]).read_text(encoding="utf-8")
        source = mutated(sound, one)
        outcome = self._outcome(row, one.line, source, self.options.work / f"{i}.log")
        before = {"was": rows[i]["kind"]} if rows[i].get("kind") in OPEN else {}
        return (
            row
            | before
            | {
                "line": one.line,
                "after": _changed(sound, source),
                "kind": outcome.kind,
                "by": outcome.by,
                "why": outcome.why,
                "num_tests": len(outcome.passed),
                "seconds": round(time.monotonic() - start, 1),
                "date": str(datetime.date.today()),
            }
        )

    def _replacement(self, rows: list[Row], i: int, head: Row) -> Row:
        from tests.mutants import sample
        from tests.mutants.operators import mutants_of

        area = rows[i]["area"]
        found = [one for file in sample.files_of(self.repo, area) for one in mutants_of(self.repo, file)]
        taken = {(row["file"], row["text"], row["column"]) for row in rows}
        free = [one for one in found if (one.mutant.file, one.mutant.text, one.mutant.column) not in taken]
        seed = f"{head['command'].rpartition(' ')[2]} {area} instead of {i}"
        return {"area": area, **dataclasses.asdict(next(sample.drawn(self.repo, free, seed)).mutant)}

    def _outcome(self, row: Row, line: int, source: str, log: Path) -> child.Outcome:
        place = touching.place_of(self.repo, row["file"], line)
        named = touching.named_tests(self.repo, VERDICTS.get(key_of(row), ("", ""))[1])
        first = touching.first_tests(self.lines, self.tests, place)
        further = touching.further_tests(self.lines, self.tests, place)
        seconds, more = self.options.first, self.options.second
        passed: list[str] = []
        outcome = child.Outcome("not covered")
        for tests, budget, cases in ((named, more, None), (first, seconds, 6), (further, more, None)):
            outcome = self._trusted(tests, budget, cases, place, source, log)
            passed += outcome.passed
            if outcome.kind in ("killed", "timed out"):
                break
        outcome.passed = passed
        if passed and outcome.kind == "not covered":
            outcome.kind = "survived"
        return outcome

    def _trusted(
        self, tests: list[str], seconds: float, cases: int | None, place: touching.Place, source: str, log: Path
    ) -> child.Outcome:
        """The outcome, after tests that are red without a mutant, too, were left out."""
        while True:
            some = self._within(tests, seconds)
            if not some:
                return child.Outcome("not covered")
            order = child.Order(tuple(some), self.tests, cases, seconds, place.file, source, place.words)
            outcome = child.run(order, log, wall_seconds=WALL * (seconds + 10))
            culprit = outcome.by.partition("[")[0]
            if outcome.kind != "killed" or culprit not in self.tests or self._is_green(culprit):
                return outcome

    def _within(self, tests: list[str], seconds: float) -> list[str]:
        chosen, files, left = list[str](), set[str](), seconds
        for test in tests:
            file = test.partition("::")[0]
            cost = self.tests.get(test, 1.0)
            fits = cost <= min(left, seconds / 2)
            if test not in self.red and fits and (file in files or len(files) < NUM_FILES):
                left -= cost
                chosen.append(test)
                files.add(file)
        return chosen

    def _is_green(self, test: str) -> bool:
        """Whether a test passes in a forked process without a mutant."""
        if test not in self.green | self.red:
            order = child.Order((test,), self.tests)
            outcome = child.run(order, self.options.work / "sound.log", wall_seconds=WALL * 60)
            (self.green if outcome.kind == "survived" else self.red).add(test)
        return test in self.green


def _changed(before: str, after: str) -> str:
    """The first line that differs, as it is in the mutant."""
    pairs = zip(before.splitlines(), after.splitlines(), strict=False)
    return next((new.strip() for old, new in pairs if old != new), "")
