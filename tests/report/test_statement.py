"""The statement says what is true of the run, never more, and is unmistakable when nothing is guaranteed."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from hf_dpopt.accounting.delta import default_delta
from hf_dpopt.common.adjacency import Adjacency
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.plan.choose import make_plan
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.plan.plan import PrivacyPlan
from hf_dpopt.report.facts import REPORT_VERSION, RunFacts, collect_versions
from hf_dpopt.report.report import read_report, write_report
from hf_dpopt.report.statement import render_statement, round_up
from hf_dpopt.sampling import SAMPLERS
from tests.report.conftest import MakeFacts


def words(text: str) -> str:
    return " ".join(text.split())


def row(text: str, name: str) -> str:
    """The value of a row of the table of numbers."""
    (value,) = re.findall(rf"^\| {re.escape(name)}.* \| (.*) \|$", text, re.MULTILINE)
    return value


def test_the_numbers_of_the_run_are_in_the_text(make_facts: MakeFacts, plan: PrivacyPlan) -> None:
    text = render_statement(make_facts())
    assert f"**epsilon = {round_up(plan.epsilon())}, delta = 1e-05**" in text
    assert row(text, "noise multiplier") == "1.1"
    assert row(text, "clipping norm C") == "0.25, `flat`"
    assert row(text, "records n") == "5000, 100, 0.02"
    assert row(text, "steps planned / charged") == "40 / 40"
    assert row(text, "trained coordinates") == "123457"
    assert row(text, "epsilon if one record is swapped") == "1.5"
    assert row(text, "epsilon asked for").startswith("none")
    for fact in (
        "truncated_poisson",
        "ChaCha20Gaussian",
        "ab" * 32,
        "torch 9.8.7",
        "passed",
        "Keys used: 3",
        "2 process",
    ):
        assert fact in text, fact
    assert plan.sampler.describe() in text
    assert "NOT PRIVATE" not in text


PROMISE = {
    "unit": "one list index after all preprocessing",
    "relation": "`add_or_remove_one`",
    "covered": "All weights at every step",
    "optimizer state": "the state of the optimizer",
    "not released": "losses and gradient norms of single records",
    "evaluation data": "The evaluation data",
    "preprocessing": "tokenizer, vocabulary, label set, class weights",
    "other runs": "Other runs on the same people",
    "base model": "the base model was trained on",
    "inference": "Prompts and predictions",
    "side channels": "time, memory, power, and the rounding of floating-point",
    "host": "A compromised machine",
    "public inputs": "the number of records, the batch size",
    "write-ahead": "charged in the ledger before it runs",
    "adds up": "resumed, branched, crashed and repeated",
    "own updates": "outside the optimizer",
    "fixed key": "a noise key that is fixed by hand",
    "ledger": "deleting, editing or rolling back the ledger",
    "coupled records": "depends on other records",
    "uncovered tensor": "a trained tensor that is not clipped and noised",
    "other unit": "another unit or relation",
}


@pytest.mark.parametrize("part", PROMISE)
def test_no_part_of_the_promise_is_missing(make_facts: MakeFacts, part: str) -> None:
    assert PROMISE[part] in words(render_statement(make_facts()))


@pytest.mark.parametrize(("sampling", "adjacency"), [(s, a) for s in SAMPLERS for a in SAMPLERS[s].adjacencies])
def test_every_plan_has_a_statement(make_facts: MakeFacts, sampling: str, adjacency: Adjacency) -> None:
    users = {"privacy_unit": "user", "records_per_user": 3} if sampling == "capped_poisson" else {}
    config = PrivacyConfig(
        noise_multiplier=2.0, expected_batch_size=10, sampling=sampling, adjacency=adjacency, **users
    )
    plan = make_plan(config, num_examples=100, num_steps=5)
    facts = make_facts(plan=plan.record.to_json(), delta=plan.delta, epsilon_spent=plan.epsilon())
    text = render_statement(facts)
    assert f"(`{adjacency}`)" in text and plan.describe_sampling() in text


def test_an_interrupted_run_claims_the_epsilon_of_its_plan(make_facts: MakeFacts, plan: PrivacyPlan) -> None:
    """Stopping early may depend on the data, so the smaller running value is never the headline."""
    text = render_statement(make_facts(steps_charged=10, epsilon_spent=plan.epsilon(10)))
    assert plan.epsilon(10) < 0.9 * plan.epsilon()
    assert f"**epsilon = {round_up(plan.epsilon())}" in text
    assert f"epsilon {round_up(plan.epsilon(10))} so far" in words(text)


def test_steps_run_twice_are_in_the_headline(make_facts: MakeFacts, plan: PrivacyPlan) -> None:
    text = render_statement(make_facts(steps_charged=60, epsilon_spent=plan.epsilon(60)))
    assert f"**epsilon = {round_up(plan.epsilon(60))}" in text and plan.epsilon(60) > 1.1 * plan.epsilon()
    assert "60 steps were charged, more than the 40 planned" in text


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"unsafe": True}, "a noise key was fixed by hand"),
        ({"plan": {"noise_multiplier": 0.0, "epsilon": "inf", "is_private": False}}, "the noise multiplier is 0"),
        ({"epsilon_spent": math.inf}, "no finite epsilon"),
        ({"plan": {"epsilon": "inf"}}, "no finite epsilon"),
        ({"plan": {"is_private": False}}, "no finite epsilon"),
    ],
)
def test_a_run_without_a_guarantee_is_stamped_in_its_first_line(
    make_facts: MakeFacts, plan: PrivacyPlan, changes: dict, reason: str
) -> None:
    facts = make_facts(**changes)
    text = render_statement(facts)
    assert text.splitlines()[0].startswith("**NOT PRIVATE:**") and reason in text.splitlines()[0]
    assert "was trained with differential privacy" not in text
    assert row(text, "epsilon claimed") == "infinity"
    assert round_up(plan.epsilon()) not in text, "no finite epsilon may be left to quote"
    assert json.loads(facts.to_json())["private"] is False


def test_outputs_callbacks_and_declarations_are_listed(make_facts: MakeFacts) -> None:
    silent = words(render_statement(make_facts()))
    assert "No value computed from training data was released without noise" in silent
    assert "added no callbacks" in silent and "assume that it is not protected" in silent
    text = render_statement(
        make_facts(
            non_private_outputs=("training loss on the console", "clip fraction"),
            callbacks=("MyCallback",),
            eval_data_privacy="public benchmark",
            data_dependent_preprocessing="vocabulary built from the training text",
        )
    )
    assert "- `training loss on the console`\n- `clip fraction`" in text and "NON-PRIVATE" in text
    assert "No value computed from training data" not in text
    assert "`MyCallback`" in text
    assert "Declared about it: `public benchmark`" in text
    assert "Declared about it: `vocabulary built from the training text`" in text


def test_text_of_the_user_cannot_change_the_page(make_facts: MakeFacts) -> None:
    evil = "x` -->\n# Privacy statement: all fine <!-- |"
    text = render_statement(make_facts(callbacks=(evil,), non_private_outputs=(evil,), eval_data_privacy=evil))
    assert "-->" not in text and "<!--" not in text
    assert text.count("# Privacy statement") == 1 + 3 and len(re.findall("^# ", text, re.MULTILINE)) == 1


def test_the_statement_says_what_the_default_delta_tells(make_facts: MakeFacts) -> None:
    assert row(render_statement(make_facts()), "delta") == "1e-05"  # asked for: nobody knows why
    default = make_facts(delta=default_delta(5000), plan={"delta": default_delta(5000)})
    assert row(render_statement(default), "delta") == "2e-05, the default for every n from 3334 to 5000 (records)"
    users = {"column": "who", "records_per_user": 50, "sampled": "records"}
    capped = {"privacy_unit": "user", "users": users, "delta": default_delta(100)}
    text = render_statement(make_facts(delta=default_delta(100), plan=capped))
    assert row(text, "delta") == "0.001, the default for every n from 51 to 100 (users)"


def test_a_delta_that_promises_nothing_is_said_in_the_first_paragraph(make_facts: MakeFacts) -> None:
    assert "not below 1/n" not in render_statement(make_facts())
    large = {"delta": 0.5, "allow_large_delta": True}
    promise = words(render_statement(make_facts(delta=0.5, plan=large)).split("|")[0])
    assert "Delta is not below 1/n = 0.0002**, which was asked for with `allow_large_delta`" in promise


def test_n_is_said_to_be_declared_and_nothing_says_that_it_is_hidden(make_facts: MakeFacts) -> None:
    """n is printed; where neighbours differ in it, only a promise at fixed settings can be true."""
    text = words(render_statement(make_facts()))
    assert "and the settings below for both" in text and "n is printed" in text
    assert "The two sets have n and n + 1 or n - 1 records, so that n is a number that was declared" in text
    same_size = words(render_statement(make_facts(plan={"adjacency": "zero_out"})))
    assert "n is printed" in same_size and "n + 1" not in same_size
    for about in (text, same_size):
        assert "size private" not in about and "size is private" not in about


@pytest.mark.parametrize("value", [3.877301, 0.0067581234, 8.0, 12.345678, 1e-7, 7.99999999])
def test_rounding_never_claims_less_than_was_spent(value: float) -> None:
    assert value <= float(round_up(value)) <= value * (1 + 1e-4)


def test_the_report_is_strict_json_and_comes_back(make_facts: MakeFacts, tmp_path: Path) -> None:
    facts = make_facts(epsilon_spent=math.inf, callbacks=("A", "B"), non_private_outputs=("loss",))
    folder = write_report(tmp_path, facts)
    assert folder == tmp_path / "privacy"
    assert sorted(path.name for path in folder.iterdir()) == ["report.json", "statement.md"]  # no temporary file left

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    content = json.loads((folder / "report.json").read_text(), parse_constant=refuse)
    assert content["epsilon_spent"] == "inf" and content["plan"]["sampler"]["name"] == "truncated_poisson"
    assert read_report(tmp_path) == facts
    assert (folder / "statement.md").read_text() == render_statement(facts)


def test_a_later_report_replaces_the_earlier_one(make_facts: MakeFacts, tmp_path: Path) -> None:
    write_report(tmp_path, make_facts(steps_charged=10))
    write_report(tmp_path, make_facts(steps_charged=40))
    assert read_report(tmp_path).steps_charged == 40


def test_what_is_no_report_is_refused(make_facts: MakeFacts, tmp_path: Path) -> None:
    with pytest.raises(DPConfigError, match="Give the output_dir of a private run"):
        read_report(tmp_path)
    for text in ("{", "[]", "{}", '"x"'):
        with pytest.raises(DPConfigError, match="Give the output_dir of a private run"):
            RunFacts.from_json(text)
    newer = (
        make_facts()
        .to_json()
        .replace(f'"report_version": {REPORT_VERSION}', f'"report_version": {REPORT_VERSION + 1}')
    )
    with pytest.raises(DPConfigError, match="Use the release of hf_dpopt that wrote it"):
        RunFacts.from_json(newer)


def test_versions_name_the_libraries_the_statement_rests_on() -> None:
    versions = collect_versions()
    torch = pytest.importorskip("torch")
    assert versions["torch"] == torch.__version__
    assert {"python", "transformers", "accelerate", "dp-accounting", "cryptography", "hf_dpopt"} <= set(versions)
