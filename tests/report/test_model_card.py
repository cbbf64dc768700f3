"""The card of the stock Trainer, with the privacy section in and un-noised values out."""

from __future__ import annotations

import re

import pytest
import yaml
from huggingface_hub import ModelCard
from transformers.modelcard import TrainingSummary, parse_log_history

from hf_dpopt.report.model_card import END, NOT_RELEASED, START, add_privacy_section, strip_training_losses
from tests.report.conftest import MakeFacts

SECRET_LOSSES = (0.69314, 0.41421)
SECRET_TOKENS = (48128, 96256)

# What `Trainer` with include_num_input_tokens_seen="all" leaves in its log history.
LOG = [
    {"loss": SECRET_LOSSES[0], "grad_norm": 1.5, "epoch": 1.0, "step": 10},
    {
        "eval_loss": 0.5001,
        "eval_accuracy": 0.8125,
        "num_input_tokens_seen": SECRET_TOKENS[0],
        "epoch": 1.0,
        "step": 10,
    },
    {"loss": SECRET_LOSSES[1], "grad_norm": 1.2, "epoch": 2.0, "step": 20},
    {
        "eval_loss": 0.4003,
        "eval_accuracy": 0.8751,
        "num_input_tokens_seen": SECRET_TOKENS[1],
        "epoch": 2.0,
        "step": 20,
    },
    {"train_runtime": 3.0, "train_loss": 0.55, "total_flos": 1e9, "epoch": 2.0, "step": 20},
]


def stock_card(log: list[dict]) -> str:
    """A card made by the installed transformers from a log history."""
    _, lines, results = parse_log_history(log)
    summary = TrainingSummary(
        model_name="private-model",
        license="apache-2.0",
        finetuned_from="roberta-base",
        eval_lines=lines,
        eval_results=results,
        hyperparameters={"learning_rate": 0.0005, "seed": 42},
    )
    return summary.to_model_card()


def test_the_stock_card_holds_what_must_go() -> None:
    """Without this the next test could pass because transformers changed its card."""
    card = stock_card(LOG)
    for value in ("0.6931", "0.4142", "48128", "96256", "Num Input Tokens Seen"):
        assert value in card


def test_training_values_go_and_evaluation_stays() -> None:
    card = stock_card(LOG)
    stripped = strip_training_losses(card)
    for value in ("0.6931", "0.4142", "48128", "96256", "Num Input Tokens Seen"):
        assert value not in stripped
    for value in (
        "0.5001",
        "0.4003",
        "0.8125",
        "0.8751",
        "- Accuracy: 0.8751",
        "- Loss: 0.4003",
        "0.0005",
        "seed: 42",
    ):
        assert value in stripped
    assert stripped.count(NOT_RELEASED) == 4
    widths = {line.count("|") for line in stripped.splitlines() if line.startswith("|")}
    assert len(widths) == 1, "the table lost or won a column"
    assert strip_training_losses(stripped) == stripped


def test_a_card_without_training_values_is_left_alone() -> None:
    kept = ("epoch", "step", "train_runtime")
    log = [{key: value for key, value in entry.items() if key.startswith("eval") or key in kept} for entry in LOG]
    clean = stock_card(log)
    assert "No log" in clean
    assert strip_training_losses(clean) == clean
    other = "# A card\n\n| Training Loss Function | Loss |\n|---|---|\n| hinge | 0.3 |\n"
    assert strip_training_losses(other) == other


def test_only_the_table_with_the_column_is_touched() -> None:
    text = "| Training Loss | A |\n|---|---|\n| 0.25 | 1 |\n\n| B | C |\n|---|---|\n| 0.75 | 2 |\n"
    stripped = strip_training_losses(text)
    assert "0.25" not in stripped and "| 0.75 | 2 |" in stripped and "| 1 |" in stripped


def test_the_section_appears_once_and_is_replaced(make_facts: MakeFacts) -> None:
    card = stock_card(LOG)
    once = add_privacy_section(card, make_facts())
    assert add_privacy_section(once, make_facts()) == once
    later = add_privacy_section(once, make_facts(steps_charged=17))
    assert later.count("## Privacy\n") == 1 and "17 of 40 steps" in later and "40 of 40" not in later
    assert later.count("differential_privacy:") == 1
    assert add_privacy_section(later, make_facts()) == once
    before, after = once.index("## Privacy\n"), once.index("## Training procedure")
    assert once.index("## Intended uses") < before < after


def test_nothing_else_of_the_card_changes(make_facts: MakeFacts) -> None:
    card = stock_card(LOG)
    with_section = add_privacy_section(card, make_facts())
    remaining = re.sub(r"<!-- hf_dpopt.*?start.*?-->.*?<!-- hf_dpopt.*?end -->\n\n", "", with_section, flags=re.DOTALL)
    assert re.sub(r"differential_privacy:\n(  .*\n)+", "", remaining) == card
    front = with_section.split("---\n")[1]
    assert yaml.safe_load(front)["base_model"] == "roberta-base"
    assert len(re.findall("^# ", with_section, re.MULTILINE)) == 1, "the statement's title is no second title"


@pytest.mark.parametrize("card", ["", "# Mine\n\nText.", "---\ntags:\n- x\n---\n# Mine\n"])
def test_any_card_can_take_the_section(make_facts: MakeFacts, card: str) -> None:
    once = add_privacy_section(card, make_facts())
    assert card.partition("---\n# ")[2].rstrip() in once and "## Privacy\n" in once
    assert ("tags:\n- x\n" in once) == ("tags" in card)
    assert add_privacy_section(once, make_facts()) == once


def test_an_unsafe_run_is_stamped_in_the_card(make_facts: MakeFacts) -> None:
    card = add_privacy_section("", make_facts(unsafe=True))
    assert "## Privacy\n\n**NOT PRIVATE:**" in card and "**epsilon =" not in card
    assert ModelCard(card).data.to_dict()["differential_privacy"]["epsilon"] is None


def test_the_metadata_can_be_filtered_by(make_facts: MakeFacts) -> None:
    """They survive loading and saving by huggingface_hub, and numbers are numbers: `1e-05` is a text to PyYAML."""
    facts = make_facts()
    text = add_privacy_section(stock_card(LOG), facts)
    loaded = ModelCard(text)
    assert loaded.data.base_model == "roberta-base"
    found = loaded.data.to_dict()["differential_privacy"]
    assert found == {
        "epsilon": pytest.approx(facts.epsilon, rel=1e-4), "delta": 1e-5, "unit": "example",
        "adjacency": "add_or_remove_one", "accountant": facts.plan["accountant"],
    }  # fmt: skip
    assert found["epsilon"] >= facts.epsilon
    assert ModelCard(str(loaded)).data.to_dict()["differential_privacy"] == found


def test_the_section_is_short_and_leads_to_the_statement(make_facts: MakeFacts) -> None:
    facts = make_facts(non_private_outputs=("training loss",), unvetted=("sampler mine",))
    section = add_privacy_section("", facts).split(START)[1].split(END)[0].strip()
    lines = section.splitlines()
    assert len(lines) <= 10 and "(privacy/statement.md)" in section
    assert "1 outputs left without noise" in section and "`sampler mine`" in section


def test_a_private_evaluation_set_is_covered_by_a_budget_of_its_own(make_facts: MakeFacts) -> None:
    assert "Not covered: evaluation data, choices" in add_privacy_section("", make_facts())
    card = add_privacy_section("", make_facts(evaluations={"target_epsilon": 2.0, "delta": 2e-5}))
    assert "evaluation set have noise: epsilon = 2, delta = 2e-05" in card and "Not covered: choices" in card
