"""Canaries of random tokens that look like the rows of a training file, and files in which some of them stand.

A canary's texts are drawn from the tokenizer's vocabulary; columns that no recipe reads are left empty. Whether a
canary takes part is a draw of the system's generator with probability 1/2, and so is its place among the rows.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_dpopt import DPConfigError
from recipes.clm_data import Chat, Kind, Pairs
from recipes.glue_data import Columns
from recipes.tables import Table

Row = dict[str, Any]
DRAWS = secrets.SystemRandom()
MARK = "<|canary {}|>"  # the new token of a canary


def words_of(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Texts of the tokens that canaries are made of: printable ones with a letter or digit.

    Raises:
        DPConfigError: if there are hardly any.
    """
    special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    ids = [i for i in sorted(tokenizer.get_vocab().values()) if i not in special]
    texts = [tokenizer.decode([i]).strip() for i in ids]
    words = sorted({text for text in texts if text.isprintable() and any(map(str.isalnum, text)) and "�" not in text})
    if len(words) < 20:
        raise DPConfigError(
            f"The tokenizer has {len(words)} tokens of letters or digits, too few for texts that are in no other "
            "record. Use that of the model that is trained."
        )
    return words


def random_text(words: Sequence[str], num_tokens: int) -> str:
    """So many tokens, each drawn from all of them."""
    return " ".join(DRAWS.choices(words, k=num_tokens))


def language_rows(table: Table, kind: Kind, texts: Callable[[], str], num: int, *, marked: bool) -> list[Row]:
    """Canaries for `clm.py`.

    Args:
        table: training records, which say what columns there are.
        kind: which of them are read.
        texts: draws a text.
        num: of canaries.
        marked: whether what is learned of a canary ends with a new token of its own.
    """
    rows = []
    for number in range(num):
        row = _empty(table)
        ending = " " + MARK.format(number) if marked else ""
        for column in kind.columns:
            is_learned = not isinstance(kind, Pairs) or column == kind.target
            text = texts() + (ending if is_learned else "")
            row[column] = _conversation(texts(), text) if isinstance(kind, Chat) else text
        rows.append(row)
    return rows


def labelled_rows(table: Table, columns: Columns, texts: Callable[[], str], num: int) -> list[Row]:
    """Canaries for `glue.py`, each with a label that was drawn from those in the file."""
    assert columns.label is not None
    labels = sorted(set(table.columns[columns.label]), key=str)
    named = [name for name in (columns.text, columns.pair) if name is not None]
    return [
        _empty(table) | {name: texts() for name in named} | {columns.label: DRAWS.choice(labels)} for _ in range(num)
    ]


def _conversation(asked: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def _empty(table: Table) -> Row:
    """A row with nothing in it, of the same types as the first one."""
    return {name: type(values[0])() if values[0] is not None else None for name, values in table.columns.items()}


def draw(num: int) -> list[bool]:
    """Whether each of the canaries takes part."""
    return [bool(secrets.randbits(1)) for _ in range(num)]


def mix(table: Table, rows: Sequence[Row]) -> list[Row]:
    """The rows of a table in their order, and others between them at places that were drawn."""
    names, num = list(table.columns), len(table) + len(rows)
    theirs = set(DRAWS.sample(range(num), len(rows)))
    own = iter(zip(*table.columns.values(), strict=True))
    others = iter(rows)
    return [next(others) if place in theirs else dict(zip(names, next(own), strict=True)) for place in range(num)]


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write a file that `read_table` reads, in the format that its name says.

    Raises:
        DPConfigError: for a format that is not written, and for a file that is there.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    is_zipped = suffixes[-1:] == [".gz"]
    kind = (suffixes[:-1] if is_zipped else suffixes)[-1:]
    if not kind or kind[0] not in WRITERS:
        raise DPConfigError(f"output_file={path} is of a format that is not written. Use {', '.join(WRITERS)}.")
    content = WRITERS[kind[0]](rows).encode("utf-8")
    try:
        with path.open("xb") as file:
            file.write(gzip.compress(content) if is_zipped else content)
    except FileExistsError:
        raise DPConfigError(f"output_file={path} is there, and may hold other canaries. Name a new file.") from None


def _csv(rows: Sequence[Row]) -> str:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(rows[0])
    writer.writerows(row.values() for row in rows)
    return text.getvalue()


def _tsv(rows: Sequence[Row]) -> str:
    return "".join("\t".join(map(str, line)) + "\n" for line in (list(rows[0]), *(row.values() for row in rows)))


def _json_lines(rows: Sequence[Row]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _lines(rows: Sequence[Row]) -> str:
    return "".join(f"{row['text']}\n" for row in rows)


WRITERS: dict[str, Callable[[Sequence[Row]], str]] = {
    ".csv": _csv, ".tsv": _tsv, ".json": _json_lines, ".jsonl": _json_lines, ".txt": _lines,
}  # fmt: skip
