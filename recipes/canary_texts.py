"""Canaries of random tokens that look like the rows of a training file, and files in which some of them stand.

A canary's texts are drawn from the tokenizer's vocabulary; columns that no recipe reads are left empty. Whether a
canary takes part is a draw of the system's generator with probability 1/2, and so is its place among the rows.
"""

from __future__ import annotations

import gzip
import json
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_dpopt import DPConfigError
from recipes.clm_data import Kind
from recipes.glue_data import Columns
from recipes.tables import Table

Row = dict[str, Any]
DRAWS = secrets.SystemRandom()


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


def language_rows(table: Table, kind: Kind, texts: Callable[[], str], num: int) -> list[Row]:
    """Canaries for `clm.py`.

    Args:
        table: training records, which say what columns there are.
        kind: which of them are read.
        texts: draws a text.
        num: of canaries.
    """
    return [_empty(table) | {column: texts() for column in kind.columns} for _ in range(num)]


def labelled_rows(table: Table, columns: Columns, texts: Callable[[], str], num: int) -> list[Row]:
    """Canaries for `glue.py`, each with a label that was drawn from those in the file."""
    assert columns.label is not None
    labels = sorted(set(table.columns[columns.label]), key=str)
    named = [name for name in (columns.text, columns.pair) if name is not None]
    return [
        _empty(table) | {name: texts() for name in named} | {columns.label: DRAWS.choice(labels)} for _ in range(num)
    ]


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
    """Write JSON lines.

    Raises:
        DPConfigError: for a file of another name, and for one that is there.
    """
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        raise DPConfigError(f"output_file={path}: must end in .jsonl or .jsonl.gz. Give another name.")
    content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode("utf-8")
    try:
        with path.open("xb") as file:
            file.write(gzip.compress(content) if path.suffix == ".gz" else content)
    except FileExistsError:
        raise DPConfigError(f"output_file={path} is there, and may hold other canaries. Name a new file.") from None
