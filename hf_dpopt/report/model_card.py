"""The model card: adds a privacy section, removes the un-noised training values of the Trainer's own card."""

from __future__ import annotations

import json
import re

from hf_dpopt.report.facts import RunFacts
from hf_dpopt.report.statement import StatementView, fill_joined, plain, round_up

START = "<!-- hf_dpopt privacy statement: start (generated, edits are lost) -->"
END = "<!-- hf_dpopt privacy statement: end -->"
NOT_RELEASED = "not released"
NO_LOG = "No log"  # the Trainer's own word for a loss it never logged

_SECTION = re.compile(r"\n*" + re.escape(START) + r".*?" + re.escape(END) + r"\n*", re.DOTALL)
_FRONT = re.compile(r"---\n(?P<front>(?:.*\n)*?)---\n")
_METADATA = re.compile(r"^differential_privacy:.*\n(?:[ \t]+.*\n)*", re.MULTILINE)
# The section stands before these headings of the Trainer's card, else at the end.
_BEFORE = ("## Training procedure", "### Framework versions")

# `TrainingSummary.to_model_card` turns a log key into a column ("num_input_tokens_seen" loses its first word there)
# and into a line of the results list (where it keeps it). "Loss" and "Validation Loss" come from the evaluation.
_COLUMNS = ("Training Loss", "Input Tokens Seen", "Tokens Per Second", "Flos", "Train Loss")
_LINES = ("Num Input Tokens Seen", "Train Tokens Per Second", "Train Samples Per Second", "Total Flos", "Train Loss")
_LINE = re.compile(r"^- (?:" + "|".join(_LINES) + r"): .*\n?", re.MULTILINE)


def add_privacy_section(card_text: str, facts: RunFacts) -> str:
    """The card with exactly one privacy section, before the training procedure if the card has one, and its metadata.

    Calling it again, with the same or with newer facts, replaces both: they never appear twice.

    Args:
        card_text: a model card in Markdown, YAML front matter included; may be empty.
        facts: the facts of the run that the section states.
    """
    lines = fill_joined("report/card.md.j2", **vars(StatementView.of(facts)))
    section = f"{START}\n{lines}{END}"
    card = _with_metadata(_SECTION.sub("\n\n", card_text), facts)
    for heading in _BEFORE:
        match = re.search(rf"^{re.escape(heading)}", card, flags=re.MULTILINE)
        if match:
            return f"{card[: match.start()].rstrip()}\n\n{section}\n\n{card[match.start() :]}".lstrip("\n")
    return f"{card.rstrip()}\n\n{section}\n".lstrip("\n")


def _with_metadata(card: str, facts: RunFacts) -> str:
    """The card with `differential_privacy` in its front matter, which a hub can filter by."""
    is_private = not facts.not_private_reasons
    values = {
        "epsilon": _yaml(float(round_up(facts.epsilon))) if is_private else "null",
        "delta": _yaml(facts.delta),
        "unit": json.dumps(facts.plan["privacy_unit"]),
        "adjacency": facts.plan["adjacency"],
        "accountant": json.dumps(plain(str(facts.plan["accountant"]))),
    }
    block = "".join(["differential_privacy:\n", *(f"  {name}: {value}\n" for name, value in values.items())])
    found = _FRONT.match(card)
    if found is None:
        return f"---\n{block}---\n\n{card.lstrip()}"
    front = _METADATA.sub("", found["front"])
    return f"---\n{front}{block}---\n{card[found.end() :]}"


def _yaml(value: float) -> str:
    """A float that every version of YAML reads as one: `1e-05` is a text in some."""
    mantissa, _, exponent = repr(float(value)).partition("e")
    dotted = mantissa if "." in mantissa else f"{mantissa}.0"
    return f"{dotted}e{exponent}" if exponent else dotted


def strip_training_losses(card_text: str) -> str:
    """The card without the values that the stock Trainer computes from un-noised training batches.

    Blanks, in every Markdown table, the columns that hold the training loss and the token counts, and removes such
    values from the results list. Evaluation results, hyperparameters and versions stay. Idempotent.
    """
    lines = _LINE.sub("", card_text).split("\n")
    blanked: list[int] = []  # cells to blank in the table that the current line belongs to
    for number, line in enumerate(lines):
        if not line.lstrip().startswith("|"):
            blanked = []
            continue
        cells = line.split("|")
        names = [cell.strip() for cell in cells]
        if any(name in _COLUMNS for name in names):
            blanked = [index for index, name in enumerate(names) if name in _COLUMNS]
        elif not re.fullmatch(r"[\s|:-]+", line):
            for index in blanked:
                if index < len(cells) and names[index] not in (NO_LOG, NOT_RELEASED):
                    cells[index] = f" {NOT_RELEASED} ".ljust(len(cells[index]))
            lines[number] = "|".join(cells)
    return "\n".join(lines)
