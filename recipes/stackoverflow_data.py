"""Tables of who wrote what: the StackOverflow layouts of TensorFlow Federated, files, and words as ids.

Shape legend: N = records, T = words of a record, V = words of the vocabulary, K = tags.
"""

from __future__ import annotations

import collections
import itertools
import json
import lzma
import re
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from hf_dpopt import DPConfigError
from hf_dpopt.common.extras import import_extra
from recipes.tables import TEXT_EXTENSIONS, Table, read_table

WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?|[^\w\s]")
PAD, BEGIN, END, UNKNOWN = range(4)
SPECIAL = ("<pad>", "<begin>", "<end>", "<unknown>")
IGNORED = -100
TOKENS, TITLE = "tokens", "title"  # columns of the layouts; tokens are words separated by blanks
COUNT = re.compile(r"\s+\d+$")
LAYOUTS = (".h5", ".hdf5", ".sqlite", ".sqlite.lzma")


# --- tables ----------------------------------------------------------------------------------------------------------


def read_users(path: str | Path, split: str) -> Table:
    """A file with a column of user ids.

    * .h5: clients are groups below ``examples``, with one array for each of tokens, tags, title, type ...
    * .sqlite, .sqlite.lzma: the table ``examples`` of (split_name, client_id, serialized_example_proto).
    * csv, tsv, json(l) and parquet, as everywhere.

    Both layouts of TensorFlow Federated give the columns ``user`` and ``tokens``, and what else is there.

    Args:
        split: which rows of an sqlite file: train, heldout or test.

    Raises:
        DPConfigError: if it cannot be read.
    """
    name = Path(path).name.lower()
    if not Path(path).is_file():
        raise DPConfigError(f"{path} is not a file. Name one of: {', '.join((*LAYOUTS, *TEXT_EXTENSIONS))}.")
    if name.endswith((".h5", ".hdf5")):
        return _table(path, _h5_rows(Path(path)))
    if name.endswith(".sqlite"):
        return _table(path, _sqlite_rows(Path(path), split))
    if name.endswith(".sqlite.lzma"):
        with tempfile.TemporaryDirectory() as folder:
            plain = Path(folder, "unpacked.sqlite")
            with lzma.open(path) as packed, plain.open("wb") as file:
                while block := packed.read(2**24):
                    file.write(block)
            return _table(path, _sqlite_rows(plain, split))
    return read_table(path, kinds=TEXT_EXTENSIONS)


def _table(path: str | Path, rows: Iterable[dict[str, Any]]) -> Table:
    columns: dict[str, list[Any]] = collections.defaultdict(list)
    num_rows = 0
    for row in rows:
        for name, value in row.items():
            columns[name] += [""] * (num_rows - len(columns[name])) + [value]
        num_rows += 1
    if not num_rows:
        raise DPConfigError(f"{path} holds no examples. Check the file, and the split.")
    return Table(str(path), {name: values + [""] * (num_rows - len(values)) for name, values in columns.items()})


def _h5_rows(path: Path) -> Iterator[dict[str, Any]]:
    with import_extra("h5py", f"The HDF5 file {path}").File(path) as file:
        if "examples" not in file:
            raise DPConfigError(f"{path} has no group 'examples' of clients. Use the layout of TensorFlow Federated.")
        for user, client in file["examples"].items():
            arrays = {name: array[()] for name, array in client.items()}
            for values in zip(*arrays.values(), strict=True):
                yield {"user": user} | {n: _as_text(v) for n, v in zip(arrays, values, strict=True)}


def _sqlite_rows(path: Path, split: str) -> Iterator[dict[str, Any]]:
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as connection:
        try:
            query = "SELECT client_id, serialized_example_proto FROM examples WHERE split_name = ? ORDER BY client_id"
            for user, example in connection.execute(query, (split,)):
                yield {"user": user} | {name: _as_text(value) for name, value in parse_example(example).items()}
        except sqlite3.DatabaseError as error:
            raise DPConfigError(
                f"{path} is not the layout of TensorFlow Federated ({error}): a table 'examples' of split_name, "
                "client_id, serialized_example_proto."
            ) from None


def _as_text(value: Any) -> Any:
    return value.decode("utf-8", errors="replace") if isinstance(value, bytes) else value


def parse_example(data: bytes) -> dict[str, Any]:
    """First value of every feature of a serialized ``tf.train.Example``: bytes or an integer; floats are left out."""
    found: dict[str, Any] = {}
    for _, features in _fields(data):
        for _, entry in _fields(features):
            parts = dict(_fields(entry))
            for kind, values in _fields(parts.get(2, b"")):
                value = next((v for _, v in _fields(values)), None)
                if kind == 1 and value is not None:
                    found[parts[1].decode()] = value
                elif kind == 3 and value is not None:
                    found[parts[1].decode()] = value if isinstance(value, int) else _varint(value, 0)[0]
    return found


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of every field of a protocol buffer message; those of fixed width are skipped."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
        elif wire == 2:
            size, at = _varint(data, at)
            yield number, data[at : at + size]
            at += size
        elif wire in (1, 5):
            at += 8 if wire == 1 else 4
        else:
            raise DPConfigError("An example is not a serialized tf.train.Example. Check the file.")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


# --- words -----------------------------------------------------------------------------------------------------------


def separate_words(text: str) -> str:
    """Return raw text in the benchmark's format: lower case, words and punctuation marks separated by blanks."""
    return " ".join(WORD.findall(text.lower()))


@dataclass(frozen=True)
class Vocabulary:
    """Words that have an id of their own, after `SPECIAL`. Public: it is published with the model.

    Args:
        words: without repetition.
    """

    words: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ids", {word: len(SPECIAL) + i for i, word in enumerate(self.words)})

    def __len__(self) -> int:
        return len(SPECIAL) + len(self.words)

    def ids(self, words: Iterable[str]) -> list[int]:
        """Return one id per word; words outside the vocabulary share `UNKNOWN`."""
        return [self._ids.get(word, UNKNOWN) for word in words]  # type: ignore[attr-defined]

    def sentence(self, text: str, max_words: int) -> list[int]:
        """Return the begin id, the first `max_words` words, and the end id if there are fewer words than that.

        Args:
            text: words separated by single blanks, as the benchmark stores them.
        """
        words = self.ids(text.split(" ")[:max_words])
        return [BEGIN, *words, *([END] if len(words) < max_words else [])]

    @classmethod
    def read(cls, path: str | Path, size: int) -> Vocabulary:
        """Read the benchmark's ``stackoverflow.word_count``, or any list; see `read_names`."""
        return cls(read_names(path, "vocabulary_file", size))

    @classmethod
    def of(cls, texts: Iterable[str], size: int) -> Vocabulary:
        """Take the most frequent words of public texts; ties are broken alphabetically."""
        counts = collections.Counter(word for text in texts for word in text.split(" ") if word)
        return cls(tuple(sorted(counts, key=lambda word: (-counts[word], word))[:size]))


def read_names(path: str | Path, option: str, size: int) -> tuple[str, ...]:
    """Read a public list of words or tags, the most frequent first.

    Args:
        path: one name per line, optionally followed by a count, as in ``stackoverflow.word_count``; or a JSON object
            of name -> count, as in ``stackoverflow.tag_count``, or a JSON list of names.
        option: option that names the file, for messages.
        size: largest number of names.

    Raises:
        DPConfigError: if the file is missing or empty.
    """
    if not Path(path).is_file():
        raise DPConfigError(f"{option}={path} is not a file. Give a public list, one name per line, or JSON.")
    with Path(path).open(encoding="utf-8") as file:
        first = file.readline()
        file.seek(0)
        if first.lstrip().startswith(('{"', '["')):
            found = _read_json(file, f"{option}={path}")
        else:  # the benchmark's list has six million lines
            lines = (COUNT.sub("", line.strip()) for line in file if line.strip())
            found = list(itertools.islice(lines, size))
    if not found:
        raise DPConfigError(f"{option}={path} is empty. Give a public list, one name per line, or JSON.")
    return tuple(dict.fromkeys(found))[:size]


def _read_json(file: Any, name: str) -> list[str]:
    try:
        found = json.load(file)
    except json.JSONDecodeError as error:
        raise DPConfigError(f"{name}: line {error.lineno} is not valid JSON ({error.msg}). Write it again.") from None
    if isinstance(found, dict):
        found = sorted(found, key=found.__getitem__, reverse=True)  # stable: equal counts keep the file's order
    return [str(value) for value in found]


def sentences(table: Table, text: str, user: str, vocabulary: Vocabulary, max_words: int) -> Dataset:
    """For the next word: the ids of each text, and its user."""
    ids = [vocabulary.sentence(value, max_words) for value in texts_of(table, text)]
    return Dataset.from_dict({"input_ids": ids, user: list(table.columns[user])})


def texts_of(table: Table, text: str) -> list[str]:
    """Texts in the benchmark's format: the column `tokens` is kept as it is, a column of another name is raw text."""
    values = map(str, table.columns[text])
    return list(values if text == TOKENS else map(separate_words, values))


def tagged(table: Table, text: str, tags: str, user: str, vocabulary: Vocabulary, known: Sequence[str]) -> Dataset:
    """For tag prediction: all known words of text and title, and the numbers of the `known` tags."""
    titles = table.columns.get(TITLE, [""] * len(table))
    words = [
        [i for i in vocabulary.ids(f"{value} {title}".split()) if i != UNKNOWN]
        for value, title in zip(texts_of(table, text), titles, strict=True)
    ]
    numbers = {tag: k for k, tag in enumerate(known)}
    found = [[numbers[tag] for tag in str(value).split("|") if tag in numbers] for value in table.columns[tags]]
    return Dataset.from_dict({"input_ids": words, "tags": found, user: list(table.columns[user])})


@dataclass(frozen=True)
class Collator:
    """Pads on the right; the labels are the ids themselves, or the tags of each record, (B, K).

    Args:
        num_tags: K; 0 to predict the next word.
        ignored: ids that are not predicted, with the padding. Where unknown words or ends are frequent, a model that
            learns to predict them says little else.
    """

    num_tags: int = 0
    ignored: tuple[int, ...] = ()

    def __call__(self, records: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        rows = [torch.tensor(record["input_ids"] or [PAD]) for record in records]  # a post may have no known word
        ids_BT = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
        lengths_B1 = torch.tensor([[len(record["input_ids"])] for record in records])
        mask_BT = torch.arange(ids_BT.size(1)) < lengths_B1
        batch = {"input_ids": ids_BT, "attention_mask": mask_BT.long()}
        if not self.num_tags:
            is_ignored_BT = ~mask_BT | torch.isin(ids_BT, torch.tensor(self.ignored, dtype=torch.long))
            return batch | {"labels": ids_BT.masked_fill(is_ignored_BT, IGNORED)}
        labels_BK = torch.zeros(len(records), self.num_tags)
        for b, record in enumerate(records):
            labels_BK[b, record["tags"]] = 1.0
        return batch | {"labels": labels_BK}
