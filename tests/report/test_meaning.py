"""What epsilon means, as people and programs read it; and that a stage of another author is named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from hf_dpopt.huggingface.release_guard import unvetted_stages
from hf_dpopt.plan.choose import make_plan
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.plan.plan import PrivacyPlan
from hf_dpopt.plan.privacy_profile import meaning_of_plan, profile_of_plan
from hf_dpopt.report.meaning import percent, plan_rows
from hf_dpopt.report.report import read_report, write_report
from hf_dpopt.report.statement import render_statement
from hf_dpopt.sampling import SAMPLERS
from hf_dpopt.verify.claims import Report
from hf_dpopt.verify.epsilons import check_attackers
from hf_dpopt.verify.outcome import Contradiction
from hf_dpopt.verify.reading import Fields
from tests.report.conftest import MakeFacts


@pytest.mark.parametrize(
    ("rate", "text"), [(0.001, "0.1 %"), (0.01, "1 %"), (0.10331, "10.4 %"), (0.99999, "100 %"), (1.0, "100 %")]
)
def test_rates_are_rounded_up(rate: float, text: str) -> None:
    assert percent(rate) == text


def test_the_statement_says_what_it_means(make_facts: MakeFacts, plan: PrivacyPlan, tmp_path: Path) -> None:
    """Through the file that a reader gets; without a profile, or a promise, nothing is said."""
    facts = make_facts(meaning=meaning_of_plan(plan))
    write_report(tmp_path, facts)
    text = (tmp_path / "privacy" / "statement.md").read_text()
    assert text == render_statement(read_report(tmp_path))
    one = profile_of_plan(plan).true_positives(0.01)
    row = next(line for line in text.splitlines() if line.startswith("| 1 % |"))
    shown = float(row.split("|")[2].strip(" %")) / 100
    assert one <= shown < 1.01 * one + 1e-3
    assert "finds at most" in text and "If one record is replaced by any other" in text
    assert "## What epsilon means" not in render_statement(make_facts())
    assert "## What epsilon means" not in render_statement(make_facts(meaning=facts.meaning, unsafe=True))


def test_rows_of_the_plan(plan: PrivacyPlan) -> None:
    rows = plan_rows(meaning_of_plan(plan), "record")
    assert len(rows) == 4 and plan_rows({}, "record") == {}
    (rates,) = [value for name, value in rows.items() if name.startswith("attacker")]
    assert [float(rate.strip(" %")) for rate in rates.split("/")] == sorted(
        float(rate.strip(" %")) for rate in rates.split("/")
    )


@pytest.mark.parametrize("name", ["sampled", "fixed_order"])
def test_verification_recomputes_the_attackers(make_facts: MakeFacts, name: str) -> None:
    """Claims as computed pass; a rate that is 5 % lower is refused."""
    options = {} if name == "sampled" else {"sampling": "fixed_order"}
    config = PrivacyConfig(noise_multiplier=1.1, target_delta=1e-5, expected_batch_size=100, **options)
    plan = make_plan(config, num_examples=5000, num_steps=40)
    facts = dataclasses.replace(make_facts(), plan=plan.record.to_json(), meaning=meaning_of_plan(plan))

    def check(text: str) -> str:
        return check_attackers(Report(Fields(json.loads(text), "the report")))

    assert "at 0.01" in check(facts.to_json())
    forged = json.loads(facts.to_json())
    for row in forged["meaning"]["true_positives"]:
        row["whole_profile"] *= 0.95
    with pytest.raises(Contradiction, match="the most true ones are"):
        check(json.dumps(forged))


def test_stages_of_others_are_named(make_facts: MakeFacts) -> None:
    """A sampler that is defined here, outside of the package, is not vetted, and the statement says so."""
    config = PrivacyConfig(noise_multiplier=1.1, target_delta=1e-5, expected_batch_size=100)
    plan = make_plan(config, num_examples=5000, num_steps=40)
    assert unvetted_stages(plan) == ()
    base = SAMPLERS["poisson"]
    mine = type("Mine", (base,), {"name": "mine", "__module__": __name__})
    sampler = mine(num_examples=5000, expected_batch_size=100)
    theirs = dataclasses.replace(plan, release=dataclasses.replace(plan.release, sampler=sampler))
    assert unvetted_stages(theirs) == ("sampler mine",)
    text = render_statement(make_facts(unvetted=unvetted_stages(theirs)))
    assert "**Not vetted**: `sampler mine`." in text and "Not vetted" not in render_statement(make_facts())


def test_the_numbers_of_the_page(repo: Path) -> None:
    """Those of `docs/what_epsilon_means.md` are what its first command prints."""
    config = PrivacyConfig(target_epsilon=8, target_delta=1e-5, expected_batch_size=1032)
    meaning = meaning_of_plan(make_plan(config, num_examples=67349, num_steps=198))
    page = (repo / "docs" / "what_epsilon_means.md").read_text()
    for row in meaning["true_positives"]:
        parts = (row["false_positives"], row["whole_profile"], row["pair_alone"])
        assert f"| {' | '.join(percent(part) for part in parts)} |" in page
    for size in (2, 3, 5):
        assert percent(meaning["groups"][size - 1]["true_positives"]) in page
    assert all(percent(rate).removesuffix(" %") in page for rate in meaning["replaced"]["true_positives"])
