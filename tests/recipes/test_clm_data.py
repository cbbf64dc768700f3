"""Which columns are used, which tokens carry loss, and what one record is."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Tokenizer, PreTrainedTokenizerBase

from hf_dpopt import DPConfigError
from recipes.clm import DataTrainingArguments
from recipes.clm_data import (
    IGNORED,
    Documents,
    Pairs,
    Record,
    choose_block_size,
    find_kind,
    report,
    tokenize,
)
from recipes.embedded.build import make_gpt2_tokenizer
from recipes.tables import TEXT_EXTENSIONS, Table, read_table


@pytest.fixture
def tokenizer() -> GPT2Tokenizer:
    return make_gpt2_tokenizer(["name[The Mill], food[English]", "At the mill there is food.", "user assistant"] * 5)


def table(**columns: list[Any]) -> Table:
    return Table("some.jsonl", columns)


def records(kind: Any, columns: dict[str, list[Any]], tokenizer: PreTrainedTokenizerBase, size: int) -> list[Record]:
    return list(kind.records(columns, tokenizer, size))


# --- which tokens carry loss -----------------------------------------------------------------------------------------


def test_loss_is_on_the_target_and_the_end_token_only(tokenizer: GPT2Tokenizer) -> None:
    kind = Pairs("{mr}", "ref", "\n")
    (record,) = records(kind, {"mr": ["name[The Mill]"], "ref": ["At the mill."]}, tokenizer, 60)
    prompt = tokenizer("name[The Mill]\n")["input_ids"]
    target = [*tokenizer("At the mill.")["input_ids"], tokenizer.eos_token_id]
    assert record.input_ids == prompt + target
    assert record.labels == [IGNORED] * len(prompt) + target
    assert not record.is_cut
    assert kind.prompt_ids(["name[The Mill]"], tokenizer) == [prompt]  # what is generated from


def test_a_record_is_cut_at_the_end_and_may_lose_its_target(tokenizer: GPT2Tokenizer) -> None:
    kind = Pairs("{mr}", "ref", " | ")
    columns = {"mr": ["name[The Mill], food[English]"], "ref": ["At the mill."]}
    (whole,) = records(kind, columns, tokenizer, 1000)
    num_prompt = whole.labels.count(IGNORED)
    (cut,) = records(kind, columns, tokenizer, num_prompt + 1)
    assert (cut.input_ids, cut.labels) == (whole.input_ids[: num_prompt + 1], whole.labels[: num_prompt + 1])
    assert cut.is_cut and cut.labels[-1] != IGNORED
    (lost,) = records(kind, columns, tokenizer, num_prompt)
    assert lost.is_cut and set(lost.labels) == {IGNORED}
    for size, num_lost in ((num_prompt + 1, 0), (num_prompt, 1)):
        assert tokenize(table(**columns), kind, tokenizer, block_size=size).num_without_target == num_lost
    single = tokenize(table(text=[""]), Documents("text"), tokenizer, block_size=9)
    assert single.num_without_target == 1  # nothing stands before the first token


def test_prompts_from_several_columns(tokenizer: GPT2Tokenizer) -> None:
    kind = find_kind(
        {"train": table(instruction=["Add", "Go"], input=["1 {x}", ""], output=["2", "ok"])}, DataTrainingArguments()
    )
    assert isinstance(kind, Pairs) and kind.columns == ("instruction", "input", "output")
    assert kind.prompts({"instruction": ["Add", "Go"], "input": ["1 {x}", ""]}) == ["Add\n1 {x}", "Go"]
    args = DataTrainingArguments(prompt_template="Data: {mr}. Text:", separator=" ")
    kind = find_kind({"train": table(mr=["m"], ref=["r"])}, args)
    assert isinstance(kind, Pairs) and kind.prompts({"mr": ["m {ref}"]}) == ["Data: m {ref}. Text:"]


def test_all_of_a_document_is_learned_and_it_ends(tokenizer: GPT2Tokenizer) -> None:
    texts = ["At the mill there is food.", "At the mill"]
    ids = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
    whole = records(Documents("text"), {"text": texts}, tokenizer, 1000)
    assert [r.input_ids for r in whole] == ids == [r.labels for r in whole]
    size = len(ids[0]) - 2
    cut = records(Documents("text"), {"text": texts}, tokenizer, size)
    assert [r.input_ids for r in cut] == [ids[0][:size], ids[1]] and [r.is_cut for r in cut] == [True, False]


class WithStart:
    """The tokenizer, as one that puts a start token before every text."""

    bos_token_id = 7

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.own, self.eos_token_id = tokenizer, tokenizer.eos_token_id

    def __call__(self, text: Any, add_special_tokens: bool = True, **kwargs: Any) -> Any:
        encoded = self.own(text, **kwargs)
        if add_special_tokens:
            encoded["input_ids"] = [7, *encoded["input_ids"]]
        return encoded


def test_a_start_token_comes_once_per_record(tokenizer: GPT2Tokenizer) -> None:
    starting: Any = WithStart(tokenizer)
    (pair,) = records(Pairs("{mr}", "ref", "\n"), {"mr": ["the mill"], "ref": ["food"]}, starting, 60)
    assert pair.input_ids[0] == 7 and pair.input_ids.count(7) == 1 and pair.labels[0] == IGNORED
    (document,) = records(Documents("text"), {"text": ["the mill"]}, starting, 60)
    assert document.input_ids[0] == 7 and document.input_ids.count(7) == 1


# --- what one record is ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "columns",
    [
        {"mr": ["a", "the mill", ""], "ref": ["b c", "food " * 20, "x"]},
        {"text": ["a", "the mill " * 20, "x"]},
    ],
    ids=["pairs", "documents"],
)
def test_a_record_does_not_depend_on_other_rows(columns: dict[str, list[Any]], tokenizer: GPT2Tokenizer) -> None:
    kind = find_kind({"train": table(**columns)}, DataTrainingArguments())
    together = tokenize(table(**columns), kind, tokenizer, block_size=12).dataset
    for row in range(3):
        alone = tokenize(table(**{k: v[row : row + 1] for k, v in columns.items()}), kind, tokenizer, block_size=12)
        assert alone.dataset[0] == together[row]


def test_losses_of_tokens_are_said(tokenizer: GPT2Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    rows = table(mr=["name[The Mill], food[English]", "a"], ref=["At the mill.", "b"])
    split = tokenize(rows, Pairs("{mr}", "ref", "\n"), tokenizer, block_size=6)
    assert (len(split.dataset), split.num_cut, split.num_without_target) == (2, 1, 1)  # kept, contributing nothing
    with caplog.at_level(logging.INFO, logger="recipes"):
        report("train", split, 6, counts=True)
    assert "2 records; 1 were cut to 6 tokens, 1 have no token to learn and contribute nothing" in caplog.text
    assert caplog.records[-1].levelno == logging.WARNING and "Raise --block_size" in caplog.text
    caplog.clear()
    with caplog.at_level("INFO"):
        report("train", split, 6, counts=False)
    assert "a record is cut to 6 tokens" in caplog.text and "2 records" not in caplog.text


def test_block_size_stays_within_the_model(tokenizer: GPT2Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    class Model:
        class config:
            max_position_embeddings = 32

    assert choose_block_size(None, tokenizer, Model) == 32 and choose_block_size(9, tokenizer, Model) == 9
    assert choose_block_size(33, tokenizer, Model) == 32
    assert "block_size=33 is more than the model takes; using 32" in caplog.text


# --- which kind ------------------------------------------------------------------------------------------------------


def test_kinds_by_their_columns() -> None:
    def found(args: dict[str, Any], **columns: list[Any]) -> Any:
        return find_kind({"train": table(**columns)}, DataTrainingArguments(**args))

    assert found({"separator": "\n"}, mr=["a"], ref=["b"]) == Pairs("{mr}", "ref", "\n")
    assert found({"separator": "\n"}, prompt=["a"], completion=["b"], id=[1]) == Pairs("{prompt}", "completion", "\n")
    assert found({}, text=["a"], label=["b"]) == Documents("text")
    assert found({"text_column": "prompt"}, prompt=["a"], completion=["b"]) == Documents("prompt")
    assert found({"prompt_column": "q", "target_column": "a", "separator": "|"}, q=["x"], a=["y"]) == Pairs(
        "{q}", "a", "|"
    )
    assert found({"prompt_column": "q"}, mr=["x"], q=["z"], ref=["y"]).columns == ("q", "ref")


WRONG: dict[str, tuple[dict[str, Any], dict[str, list[Any]], str]] = {
    "nothing recognised": ({}, {"a": ["x"]}, "no kind of data .* the columns 'a'. Name what to use: a prompt"),
    "several kinds": ({}, {"text": ["x"], "mr": ["x"], "ref": ["y"]}, "several kinds .* Name what to use"),
    "missing prompt": ({"prompt_column": "q", "target_column": "a"}, {"a": ["x"]}, "no column 'q'. It has: 'a'"),
    "both missing": ({"prompt_column": "q", "target_column": "z"}, {"a": ["x"]}, "no column 'q' or 'z'. It has: 'a'"),
    "missing text": ({"text_column": "q"}, {"a": ["x"]}, "no column 'q'. It has: 'a'"),
    "no target": ({"prompt_column": "a"}, {"a": ["x"], "b": ["y"]}, "Add --target_column <one of: 'a', 'b'>"),
    "no prompt": ({"target_column": "a"}, {"a": ["x"], "b": ["y"]}, "Add --prompt_column <one of"),
    "two kinds named": ({"text_column": "a", "prompt_column": "a"}, {"a": ["x"]}, "are given. Keep one kind"),
    "empty template": ({"prompt_template": "hi"}, {"mr": ["x"], "ref": ["y"]}, "names no column.* in braces"),
    "template column": ({"prompt_template": "{nope}"}, {"mr": ["x"], "ref": ["y"]}, "no column 'nope'"),
    "number": ({}, {"mr": ["x", 3], "ref": ["y", "z"]}, "some.jsonl, row 2: column 'mr' holds int, not text. Correct"),
    "no text": ({}, {"text": ["x", None]}, "row 2: column 'text' holds NoneType, not text. Correct the row"),
    "conversations": ({}, {"messages": [[]]}, "no kind of data .* recipes/sft.py takes conversations"),
    "generate from text": ({"generate": True}, {"text": ["x"]}, "Name them with --prompt_column and --target_column"),
}


@pytest.mark.parametrize("case", WRONG)
def test_columns_that_do_not_fit(case: str) -> None:
    args, columns, mend = WRONG[case]
    with pytest.raises(DPConfigError, match=mend):
        find_kind({"train": table(**columns)}, DataTrainingArguments(**args))


def test_the_column_of_users_is_named_with_the_other_missing_ones() -> None:
    """It is looked for in the training table alone."""
    tables = {"train": table(question=["x"]), "validation": table(prompt=["x"], target=["y"])}
    args = DataTrainingArguments(prompt_column="prompt", target_column="target")
    missing = r"no column 'prompt' or 'target' or 'who' \(--user_id_column\)"
    with pytest.raises(DPConfigError, match=missing):
        find_kind(tables, args, "who")
    tables["train"] = table(prompt=["x"], target=["y"], who=["a"])
    assert find_kind(tables, args, "who").columns == ("prompt", "target")


def test_all_splits_are_checked() -> None:
    tables = {"train": table(text=["x"]), "validation": Table("dev.csv", {"txt": ["y"]})}
    with pytest.raises(DPConfigError, match="dev.csv has no column 'text'. It has: 'txt'"):
        find_kind(tables, DataTrainingArguments())


# --- files -----------------------------------------------------------------------------------------------------------


def test_text_files_and_parquet(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n \n\ntwo words\r\nthree")
    found = read_table(tmp_path / "a.txt", kinds=TEXT_EXTENSIONS)
    assert found.columns == {"text": ["one", "two words", "three"]} and found.where(1).endswith("line 4")
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    parquet.write_table(pyarrow.table({"text": ["one", "two"]}), tmp_path / "a.parquet")
    assert read_table(tmp_path / "a.parquet", kinds=TEXT_EXTENSIONS).columns["text"] == ["one", "two"]
    (tmp_path / "b.parquet").write_text("text\n")
    with pytest.raises(DPConfigError, match="b.parquet is not a parquet file"):
        read_table(tmp_path / "b.parquet", kinds=TEXT_EXTENSIONS)
    (tmp_path / "c.parquet.gz").write_text("text\n")
    with pytest.raises(DPConfigError, match="Unpack it with gunzip"):
        read_table(tmp_path / "c.parquet.gz", kinds=TEXT_EXTENSIONS)
    with pytest.raises(DPConfigError, match="nowhere.parquet does not exist"):
        read_table(tmp_path / "nowhere.parquet", kinds=TEXT_EXTENSIONS)
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(DPConfigError, match="empty.txt holds no rows"):
        read_table(tmp_path / "empty.txt", kinds=TEXT_EXTENSIONS)
    with pytest.raises(DPConfigError, match="Convert or rename it"):
        read_table(tmp_path / "a.txt")  # recipes with labels do not take it
