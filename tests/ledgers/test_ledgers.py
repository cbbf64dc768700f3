"""What a release wrote, every later one reads, reports and goes on with.

One folder for each version (or commit) that wrote runs, and in it one run for each format; see `tests.ledgers.runs`.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from typer.testing import CliRunner

import hf_dpopt
from hf_dpopt import DPConfigError
from hf_dpopt.cli.app import app
from hf_dpopt.common import version
from hf_dpopt.common.chained import GENESIS, seal_record
from hf_dpopt.report.facts import RunFacts
from hf_dpopt.report.report import read_report
from hf_dpopt.run import ledger as ledgers
from hf_dpopt.run.ledger import Ledger
from tests.ledgers import runs

KEPT = sorted(path for path in runs.HERE.glob("*/*") if (path / "out").is_dir())
LATER = "99.0.0"


@pytest.fixture(params=KEPT, ids=[str(path.relative_to(runs.HERE)) for path in KEPT])
def kept(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a run, under a later release; its secrets are the owner's alone again."""
    shutil.copytree(request.param, tmp_path, dirs_exist_ok=True)
    for path in (tmp_path / "private").rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    (tmp_path / "private").chmod(0o700)
    monkeypatch.setattr(version, "__version__", LATER)
    return tmp_path


def test_one_of_each_format_is_kept() -> None:
    this = {path.name for path in KEPT if path.parent.name == "0.1.0"}
    assert this == set(runs.RUNS)
    assert hf_dpopt.__version__ in {path.parent.name for path in KEPT}, "run `python -m tests.ledgers` and commit it"


def test_it_is_read(kept: Path) -> None:
    ledger, facts = Ledger.read(kept / "out" / "privacy" / "ledger.jsonl"), read_report(kept / "out")
    assert ledger.num_charged == facts.steps_charged == runs.STOPPED
    assert ledger.contains(facts.ledger_digest)
    assert 0 < facts.epsilon_spent < facts.epsilon_planned


def test_it_is_reported(kept: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(kept / "out")])
    assert result.exit_code == 0, result.output
    assert "The ledger agrees: 2 steps" in result.output


def test_a_statement_that_was_edited_is_still_found(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the release that wrote it, which knows its own words."""
    facts = read_report(kept / "out")
    statement = kept / "out" / "privacy" / "statement.md"
    monkeypatch.setattr(version, "__version__", facts.versions["hf_dpopt"])
    statement.write_text(statement.read_text().replace("psilon", "psi", 1))
    result = CliRunner().invoke(app, ["report", str(kept / "out")])
    assert result.exit_code == 1 and "edited" in result.output


@pytest.mark.slow_but(1)
def test_it_is_resumed(kept: Path, request: pytest.FixtureRequest) -> None:
    facts, name = read_report(kept / "out"), request.node.callspec.id.split("/")[-1]
    if facts.versions["transformers"] != transformers.__version__:
        pytest.skip("another transformers has other entries in its configurations, which a resumed run compares")
    charged = Ledger.read(kept / "out" / "privacy" / "ledger.jsonl")
    had_marks = (kept / "private" / "used").is_dir()
    trainer = runs.trainer(name, kept)
    before = {key: value.clone() for key, value in trainer.model.state_dict().items()}
    trainer.train(resume_from_checkpoint=True)
    trainer.save_model()
    now = Ledger.read(kept / "out" / "privacy" / "ledger.jsonl")
    assert now.contains(charged.digest()) and now.num_charged == runs.PLANNED
    # without a mark nobody knows how far the key was used, so the steps get a fresh one
    assert len(now.chains) == (1 if had_marks else 2)
    assert trainer.plan.noise_multiplier == charged.plan["noise_multiplier"]
    assert trainer.plan.noise_stream == now.plan["noise_rng"] == charged.plan["noise_rng"]
    if facts.noise_generator == "SecureGaussian":  # a run that began with AES ends with it
        assert now.plan["noise_rng"] == "secure" and "AES-256-CTR" in (kept / "out/privacy/statement.md").read_text()
    assert any(not torch.equal(value, before[key]) for key, value in trainer.model.state_dict().items())
    after = read_report(kept / "out")
    assert after.steps_charged == runs.PLANNED and after.epsilon >= facts.epsilon * (1 - 1e-9)  # other processors
    assert after.versions["hf_dpopt"] == LATER
    result = CliRunner().invoke(app, ["report", str(kept / "out")])  # its words are now those of this release
    assert result.exit_code == 0, result.output


def _header(path: Path, version: int) -> None:
    _, line = seal_record({"kind": "header", "version": version}, GENESIS)
    path.write_bytes(line + b"\n")


def test_a_ledger_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    """What such a file charges is unknown, so it is neither reported nor written to."""
    _header(path := tmp_path / "ledger.jsonl", ledgers.VERSION + 1)
    for attempt in (Ledger.read, Ledger.open):
        with pytest.raises(DPConfigError, match=r"format 2.*knows format 1.*newer release"):
            attempt(path)
    assert len(path.read_bytes().splitlines()) == 1


def test_a_report_of_a_newer_format_is_refused(kept: Path) -> None:
    content = json.loads((kept / "out" / "privacy" / "report.json").read_text())
    with pytest.raises(DPConfigError, match=r"wrote it, 88\.1, or a newer one"):
        RunFacts.from_json(json.dumps(content | {"report_version": 99, "versions": {"hf_dpopt": "88.1"}}))


def test_the_installed_version_is_the_one_of_the_package() -> None:
    assert importlib.metadata.version("hf_dpopt") == hf_dpopt.__version__
