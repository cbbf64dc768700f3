"""The pages beside the code: generated ones are current, the others name what there is."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
from pathlib import Path

import pytest
import yaml

import hf_dpopt
from hf_dpopt.noise import MECHANISMS
from hf_dpopt.plan import options
from hf_dpopt.preclip import PRECLIPS
from hf_dpopt.sampling import SAMPLERS
from tests.house import api_page
from tests.run import kill_storm

PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
# Written by programs, which tests compare with what they were written from.
FOLDERS = ("hf_dpopt", "tests", "docs", "recipes", "benchmarks", ".ci")
COMMAND = r"python -m ((?:hf_dpopt|recipes|benchmarks|tests)(?:\.\w+)*)"
# Made by a command of the page that names them.
MADE = ("privacy/report.json", "privacy/ledger.jsonl", "privacy/statement.md")


def pages(repo: Path) -> list[Path]:
    return [repo / name for name in PAGES] + sorted((repo / "docs").rglob("*.md"))


# --- the API page ---


def test_the_api_page_is_current() -> None:
    assert api_page.PAGE.read_text() == api_page.page(), "run `python -m tests.house.api_page`"


def test_the_api_page_is_complete() -> None:
    """Each exported name has its place, what it is called with, and the first line of its docstring."""
    grouped = [name for names in api_page.GROUPS.values() for name in names]
    assert sorted(grouped) == hf_dpopt.__all__
    text = api_page.PAGE.read_text()
    entries = {part.split("`", 1)[0]: part for part in text.split("\n### `")[1:]}
    assert list(entries) == grouped
    for name, entry in entries.items():
        thing = getattr(hf_dpopt, name)
        first = (inspect.getdoc(thing) or "").splitlines()[0].replace("``", "`")
        assert len(first) > 15 and first in entry, name
        if not (inspect.isclass(thing) and issubclass(thing, (Exception, Warning))):
            called = entry.split("```")[1]
            own = api_page.signature(name, thing)
            assert own in called
            if not name.endswith(("TrainingArguments", "Config")) or name == "PrivacyConfig":
                assert all(parameter in called for parameter in inspect.signature(thing).parameters), name


# --- what the pages name ---


def test_every_path_that_a_page_names_exists(repo: Path) -> None:
    """In links and between backticks, from the root or below `hf_dpopt/`; a path in a module's notation is imported."""
    missing = []
    for page in pages(repo):
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if not re.match(r"https?:|mailto:|#", link) and not (page.parent / link.split("#")[0]).exists():
                missing.append(f"{page.name}: link {link}")
        for named in re.findall(r"`([^`\n]+)`", text):
            path = named.split("::")[0].split(" ")[0].rstrip("/")
            if re.fullmatch(rf"(?:{'|'.join(map(re.escape, FOLDERS))})/[\w./*-]+", path) and path not in MADE:
                if not list(repo.glob(path)):
                    missing.append(f"{page.name}: {named}")
            elif re.fullmatch(r"[a-z_]+/[\w/]+\.py", path) and not (repo / "hf_dpopt" / path).exists():
                missing.append(f"{page.name}: {named}, which is not below hf_dpopt/")
    assert not missing, "\n".join(missing)


def test_every_module_that_a_page_names_is_there(repo: Path) -> None:
    for page in pages(repo):
        for name in re.findall(r"`(hf_dpopt\.[A-Za-z_.]*\w)`", page.read_text()):
            assert _resolves(name), f"{page.name} names {name}"


def test_every_command_that_runs_a_module_finds_it(repo: Path) -> None:
    """On the pages, and in the docstrings of recipes and benchmarks."""
    sources = [*pages(repo), *(repo / "recipes").rglob("*.py"), *(repo / "benchmarks").glob("*.py")]
    named = {(one.name, name) for one in sources for name in re.findall(COMMAND, one.read_text(encoding="utf-8"))}
    assert len(named) > 30
    paths = {where: repo / where[1].replace(".", "/") for where in named}
    assert not [
        w for w, path in paths.items() if not (path.with_suffix(".py").exists() or (path / "__main__.py").exists())
    ]


def _resolves(name: str) -> bool:
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:end]))
        except ImportError:
            continue
        for attribute in parts[end:]:
            found = getattr(found, attribute, None)
        return found is not None
    return False


def choices() -> dict[str, set[str]]:
    """Values of every option that has a list of them, declared with it or in a registry."""
    groups = [group for group in vars(options).values() if dataclasses.is_dataclass(group)]
    declared = {
        field.name: set(field.metadata["choices"])
        for group in groups for field in dataclasses.fields(group) if "choices" in field.metadata
    }  # fmt: skip
    registries = {"noise_mechanism": MECHANISMS, "sampling": SAMPLERS, "preconditioner": PRECLIPS}
    return declared | {name: {*values, "auto", "none"} for name, values in registries.items()}


def test_every_value_that_a_page_gives_an_option_is_one_of_its_choices(repo: Path) -> None:
    """``--option value``, ``option="value"`` and ``"option": "value"``, in blocks and in the text."""
    wrong, seen = [], set()
    for page in pages(repo):
        text = page.read_text()
        own = set(re.findall(r'^    name: ClassVar\[str\] = "(\w+)"', text, re.MULTILINE))  # what its blocks register
        for name, values in choices().items():
            form = rf"(?:--{name}[ =]|\b{name}=[\"']|[\"']{name}[\"']: [\"'])([a-z_][a-z0-9_]*)\b"
            for value in re.findall(form, text):
                seen.add(name)
                if value not in values | own:
                    wrong.append(f"{page.name}: {name} {value}, of {sorted(values)}")
    assert not wrong, "\n".join(wrong)
    assert len(seen) >= 10


OUTCOMES = ("seen", "computed", "tested", "timed", "missing")


def rows_of_papers(repo: Path) -> tuple[list[list[str]], list[list[str]]]:
    """Cells of docs/papers.md: parts of the five papers, and other papers."""
    parts, _, others = (repo / "docs" / "papers.md").read_text().partition("\n## Other papers\n")

    def rows(text: str) -> list[list[str]]:
        cells = (
            [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"
        )
        return [row for row in cells if row[0] not in ("part", "paper") and not row[0].startswith("---")]

    return rows(parts), rows(others)


def test_every_paper_of_the_index_leads_somewhere(repo: Path) -> None:
    _, others = rows_of_papers(repo)
    assert len(others) > 15
    for row in others:
        assert re.search(r"`hf_dpopt/[\w/.]+`", row[1]), row


def test_every_part_of_a_paper_names_a_test_that_is_there_and_an_outcome(repo: Path) -> None:
    """What was seen has an interval and its numbers, what was not looked at a reason; other paths: the tests above."""
    parts, _ = rows_of_papers(repo)
    assert len(parts) > 40
    for part, how, tests, outcome in parts:
        assert outcome.startswith(OUTCOMES), part
        for named in re.findall(r"`([^`]+)`", tests):
            file, _, name = named.partition("::")
            assert re.search(rf"^def {name}\(", (repo / file).read_text(), re.MULTILINE), f"{part}: {named}"
        for module in re.findall(r"`python -m ([\w.]+)", how):
            assert importlib.util.find_spec(module), f"{part}: {module}"
        if outcome.startswith("seen"):
            assert re.search(r"[+-]?[\d.]+ ± [\d.]+", outcome) and ".json](reproductions/" in outcome, part
        elif outcome.startswith("missing"):
            assert re.match(r"missing: \w.{8,}", outcome), part
        elif outcome.startswith("tested"):
            assert tests, part


# --- the pages about the project ---


def test_the_citation_agrees_with_the_package(repo: Path) -> None:
    citation = yaml.safe_load((repo / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)  # what the format demands
    assert citation["cff-version"] == "1.2.0"
    assert str(citation["version"]) == hf_dpopt.__version__
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((repo / "pyproject.toml").read_text())["project"]
    assert (citation["title"], citation["license"]) == (project["name"], project["license"])


def test_the_changelog_has_this_version(repo: Path) -> None:
    text = (repo / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert versions[0] == "Unreleased" and hf_dpopt.__version__ in versions[1]
    kinds = {"Privacy", "Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.+)$", text, re.MULTILINE)) <= kinds


def test_contributors_are_told_of_every_check(repo: Path) -> None:
    text = (repo / "CONTRIBUTING.md").read_text()
    targets = set(re.findall(r"\bmake ([a-z]+)\b(?= |`)", text))
    assert {"check", "test", "nightly", "frozen", "env"} <= targets
    known = set(re.search(r"^\.PHONY: (.*)$", (repo / "Makefile").read_text(), re.MULTILINE)[1].split())
    assert targets <= known
    for command in re.findall(r"`python -m (tests[\w.]*)", text):
        assert importlib.util.find_spec(command), command


def test_the_table_of_kills_is_that_of_the_results(repo: Path) -> None:
    """Printed by `python -m tests.run.kill_storm --out docs/kill_storm.json --table`."""
    results = json.loads((repo / "docs/kill_storm.json").read_text())
    assert kill_storm.table(results) in (repo / "docs/reliability.md").read_text()
    assert not [run for runs in results["runs"].values() for run in runs if "error" in run]


def test_the_table_of_chat_finetuning_is_that_of_the_results(repo: Path) -> None:
    rows = json.loads((repo / "docs/chat.json").read_text())["rows"]
    page = (repo / "docs/chat.md").read_text()
    names = {
        "untrained": "none",
        "epsilon 8": "epsilon 8",
        "epsilon 3": "epsilon 3",
        "stock, rate 1e-3": "stock Trainer",
    }
    for name, shown in names.items():
        row = rows[name]
        losses = f"{row['loss_planted']:.2f} | {row['loss_controls']:.2f}"
        assert f"| {shown} | {row['loss']:.2f} | {row['told']} of 20 | {losses} |" in page


def test_the_table_of_preferences_is_that_of_the_results(repo: Path) -> None:
    results = json.loads((repo / "docs/preferences.json").read_text())
    page = (repo / "docs/preferences.md").read_text()
    formats = {"pairs": "{:,}", "ranked": "{:.1%}", "ranked_by_reward": "{:.1%}", "margin": "{:.3f}"}
    for name, row in results["rows"].items():
        runs = [run[name] for run in (results["earlier"]["rows"], results["rows"]) if name in run]
        if "ranked" in row:  # else a row of time alone
            cells = [
                " / ".join(shown.format(run[key]) for run in runs if key in run) for key, shown in formats.items()
            ]
            assert "".join(f"| {cell} ".replace("  ", " ") for cell in [name, *cells]) + "|" in page
        assert all(("epsilon 8" in name) == ("epsilon" in run) for run in runs), name
        assert all(7.9 < run.get("epsilon", 8) <= 8 for run in runs), name
    assert f"{results['held_out']} held-out pairs" in page
