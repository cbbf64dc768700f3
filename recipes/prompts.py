"""Templates and label words for classification by the language head: which there are, and how texts are put in."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_dpopt import DPConfigError
from recipes.glue_data import GLUE_LABELS

# Templates and words, in the order of the labels of `GLUE_LABELS`: Gao et al. 2021 (arXiv:2012.15723), which Li et al.
# 2022 (arXiv:2110.05679, section 3.2) found to help private finetuning.
TASKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "cola": ("{text} This is {mask}.", ("incorrect", "correct")),
    "mnli": ("{text} ? {mask} , {pair}", ("Yes", "Maybe", "No")),
    "mrpc": ("{text} {mask} , {pair}", ("No", "Yes")),
    "qnli": ("{text} ? {mask} , {pair}", ("Yes", "No")),
    "qqp": ("{text} {mask} , {pair}", ("No", "Yes")),
    "rte": ("{text} ? {mask} , {pair}", ("Yes", "No")),
    "sst2": ("{text} It was {mask}.", ("terrible", "great")),
}


@dataclass(frozen=True)
class Prompt:
    """A template and its label words.

    Args:
        template: text with {text}, {mask}, and {pair} for pairs.
        words: one word per label, in the order of the labels.

    Raises:
        DPConfigError: for a template without a gap or a text.
    """

    template: str
    words: tuple[str, ...]

    def __post_init__(self) -> None:
        if (
            self.template.count("{mask}") != 1
            or self.template.count("{text}") != 1
            or self.template.count("{pair}") > 1
        ):
            raise DPConfigError(
                f"prompt={self.template!r} needs {{text}} and {{mask}} once, and {{pair}} at most once. Write e.g. "
                "'{text} It was {mask}.'"
            )

    def check(self, labels: Sequence[str] | None, *, has_pairs: bool, is_causal: bool) -> None:
        """Refuse a template that does not fit the data or the model.

        Raises:
            DPConfigError: for another number of words than labels, regression, a missing {pair}, or a gap that a
                causal model cannot see the text before.
        """
        if labels is None:
            raise DPConfigError("The labels are numbers, and no words stand for them. Leave --prompt out.")
        if len(self.words) != len(labels) or len(set(self.words)) < len(self.words):
            raise DPConfigError(
                f"label_words={list(self.words)} are not one word for each of the labels {', '.join(labels)}. Give "
                f"{len(labels)} different words in that order."
            )
        if has_pairs != ("{pair}" in self.template):
            raise DPConfigError(
                f"The prompt {self.template!r} does not fit records of {'two texts' if has_pairs else 'one text'}. "
                f"Write it with {'{text} and {pair}' if has_pairs else '{text} alone'}."
            )
        if is_causal and not self.template.endswith("{mask}"):
            raise DPConfigError(
                f"A causal model reads from left to right, so the gap of {self.template!r} has to be its end. Write "
                "e.g. '{text} It was {mask}'."
            )


def make_prompt(
    prompt: str, words: Sequence[str] | None, task: str | None, *, labels: Sequence[str] | None, is_causal: bool
) -> Prompt:
    """The prompt that was asked for, or that of a GLUE task for "auto".

    Args:
        prompt: a template, or "auto".
        words: label words in the order of `labels`, or None for those of the task.
        task: GLUE task, or None.
        labels: labels of the data, in the order of their ids; None for numbers.
        is_causal: whether the model reads from left to right: the gap of a task's template is its end then.

    Raises:
        DPConfigError: if there is none.
    """
    if prompt != "auto":
        if not words:
            raise DPConfigError(
                "A prompt needs a word for every label. Add --label_words, in the order of the labels."
            )
        return Prompt(prompt, tuple(words))
    if task not in TASKS:
        raise DPConfigError(
            f"There is no known prompt for {task or 'files without --task_name'}, only for {', '.join(TASKS)}. "
            "Give one: --prompt '{text} It was {mask}.' --label_words terrible great."
        )
    template, own = TASKS[task]
    if is_causal:
        if "{pair}" in template:
            raise DPConfigError(
                f"The prompt of {task} has text behind its gap, which a causal model has not read. Give one that ends "
                "in the gap: --prompt '{text} Question: {pair} True or false? {mask}' --label_words True False."
            )
        template = template[: template.index("{mask}") + len("{mask}")]
    if words is None:
        by_name = dict(zip(GLUE_LABELS[task] or (), own, strict=True))
        missing = [label for label in labels or () if label not in by_name]
        if missing:
            raise DPConfigError(
                f"The words of --prompt auto are for {', '.join(by_name)}, and there are labels {', '.join(missing)}. "
                "Add --label_words, in the order of the labels."
            )
        words = [by_name[label] for label in labels or ()]
    return Prompt(template, tuple(words))


def word_ids(prompt: Prompt, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens of the label words, as they stand after a space.

    Raises:
        DPConfigError: for a word that is no single token of its own.
    """
    found = []
    for word in prompt.words:
        ids = tokenizer(f" {word}", add_special_tokens=False)["input_ids"]
        if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
            raise DPConfigError(
                f"The label word {word!r} is {len(ids)} tokens of this model, {tokenizer.convert_ids_to_tokens(ids)}. "
                "Use words that are one token: usually short, common ones."
            )
        found += ids
    if len(set(found)) < len(found):
        raise DPConfigError(f"The label words {list(prompt.words)} are the same token of this model. Use others.")
    return found


def fill(template: str, tokenizer: PreTrainedTokenizerBase, max_length: int) -> Callable[..., dict[str, Any]]:
    """A function that puts one record into the template and tokenizes it; long texts are cut, the template never is.

    Raises:
        DPConfigError: if the template alone is longer.
    """
    gap = tokenizer.mask_token or ""
    template = template.replace("{mask}", gap).rstrip()
    fixed = len(tokenizer(_put(template, text="", pair=""))["input_ids"])
    room = max_length - fixed - 4  # words that were cut may be tokenized otherwise beside the template
    if room < 1:
        raise DPConfigError(f"max_seq_length={max_length} leaves no room beside the prompt. Use {fixed + 5} or more.")

    def filled(text: str, pair: str = "") -> dict[str, Any]:
        texts = [part.replace(gap, " ") if gap else part for part in (text, pair)]
        sizes = [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
        first = min(sizes[0], max(room - sizes[1], room - room // 2 if sizes[1] else room))
        parts = [_cut(texts[0], first, tokenizer), _cut(texts[1], room - min(first, sizes[0]), tokenizer)]
        while True:
            ids = tokenizer(_put(template, text=parts[0], pair=parts[1]))
            if len(ids["input_ids"]) <= max_length:
                return dict(ids) if gap else _without_ending(dict(ids), tokenizer)
            longer = 0 if len(parts[0]) >= len(parts[1]) else 1
            parts[longer] = parts[longer][: len(parts[longer]) * 3 // 4]

    return filled


def _without_ending(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Drop the tokens that some causal tokenizers end texts with: asked is what follows the text, not its end."""
    size = len(row["input_ids"])
    while size > 1 and row["input_ids"][size - 1] in (tokenizer.eos_token_id, tokenizer.sep_token_id):
        size -= 1
    return {name: values[:size] for name, values in row.items()}


def _put(template: str, **texts: str) -> str:
    """Put texts into a template at once: one that holds {pair} itself stays as it is."""
    return re.sub(r"\{(text|pair)\}", lambda found: texts[found.group(1)], template)


def _cut(text: str, most: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """The beginning of a text, of that many tokens."""
    if most <= 0:
        return ""
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=tokenizer.is_fast)
    if len(found["input_ids"]) <= most:
        return text
    if tokenizer.is_fast:
        return text[: found["offset_mapping"][most - 1][1]]
    return tokenizer.decode(found["input_ids"][:most])
