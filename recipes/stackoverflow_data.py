"""Tables of who wrote what: the StackOverflow layouts of TensorFlow Federated, files, and words as ids.

Shape legend: N = records, T = words of a record, V = words of the vocabulary, K = tags.
"""

from __future__ import annotations

import collections
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
TAG_SEPARATOR = re.compile(r"[|,\s]+")
LAYOUTS = (".h5", ".hdf5", ".sqlite", ".sqlite.lzma")


# --- tables ----------------------------------------------------------------------------------------------------------


def read_users(path: str | Path, split: str) -> Table:
    """A file with a column of user ids.

    * .h5: clients are groups below ``examples``, with one array for each of tokens, tags, title, type ...
    * .sqlite, .sqlite.lzma: the table ``examples`` of (split_name, client_id, serialized_example_proto).
    * csv, tsv, json(l) and parquet, as everywhere.

    Both layouts of TensorFlow Federated give the columns ``user`` and ``text`` (its tokens), and what else is there.

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
        row["text"] = row.pop("tokens", row.get("text", ""))
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


def words_of(text: str) -> list[str]:
    """Lower case; words, and punctuation marks one by one."""
    return WORD.findall(text.lower())


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

    def ids(self, text: str) -> list[int]:
        """Of all words."""
        return [self._ids.get(word, UNKNOWN) for word in words_of(text)]  # type: ignore[attr-defined]

    def sentence(self, text: str, max_words: int) -> list[int]:
        """Begin, at most `max_words` words, and an end if the text is over."""
        words = self.ids(text)
        return [BEGIN, *words[:max_words], *([END] if len(words) <= max_words else [])]

    @classmethod
    def read(cls, path: str | Path, size: int) -> Vocabulary:
        """One word per line, the most frequent first; what follows a tab or blank (a count) is not read.

        Raises:
            DPConfigError: if there is no such file, or it is empty.
        """
        if not Path(path).is_file():
            raise DPConfigError(f"vocabulary_file={path} is not a file. Give a public list of words, one per line.")
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        words = dict.fromkeys(line.split()[0].lower() for line in lines if line.strip())
        if not words:
            raise DPConfigError(f"{path} holds no words. Give a public list of words, one per line.")
        return cls(tuple(words)[:size])

    @classmethod
    def of(cls, texts: Iterable[str], size: int) -> Vocabulary:
        """The most frequent words of public texts; of equals, the one that comes first in the alphabet."""
        counts = collections.Counter(word for text in texts for word in words_of(text))
        return cls(tuple(sorted(counts, key=lambda word: (-counts[word], word))[:size]))


def sentences(table: Table, text: str, user: str, vocabulary: Vocabulary, max_words: int) -> Dataset:
    """For the next word: the ids of each text, and its user."""
    ids = [vocabulary.sentence(str(value), max_words) for value in table.columns[text]]
    return Dataset.from_dict({"input_ids": ids, user: list(table.columns[user])})


def tagged(
    table: Table, text: str, tags: str, user: str, vocabulary: Vocabulary, known: Sequence[str], max_words: int
) -> Dataset:
    """For tag prediction: the distinct words of a post that are known, and which of the `known` tags it has."""
    places = {tag: k for k, tag in enumerate(known)}
    words, labels = [], []
    for value, names in zip(table.columns[text], table.columns[tags], strict=True):
        distinct = dict.fromkeys(i for i in vocabulary.ids(str(value)) if i != UNKNOWN)
        words.append([BEGIN, *list(distinct)[:max_words]])  # never empty
        row = [0.0] * len(known)
        for name in TAG_SEPARATOR.split(str(names)):
            if name in places:
                row[places[name]] = 1.0
        labels.append(row)
    return Dataset.from_dict({"input_ids": words, "labels": labels, user: list(table.columns[user])})


@dataclass(frozen=True)
class Collator:
    """Pads on the right. For next-word prediction the labels are the ids themselves.

    Args:
        predicts_words: whether the labels are words; else they are those of the records.
        ignored: ids that are nothing to predict. In the benchmark that is the padding; where unknown words or ends are
            frequent, a model that learns to predict them says little else.
    """

    predicts_words: bool
    ignored: tuple[int, ...] = (PAD,)

    def __call__(self, records: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        width = max(len(record["input_ids"]) for record in records)
        ids_BT = torch.full((len(records), width), PAD)
        for b, record in enumerate(records):
            ids_BT[b, : len(record["input_ids"])] = torch.tensor(record["input_ids"])
        batch = {"input_ids": ids_BT, "attention_mask": (ids_BT != PAD).long()}
        if self.predicts_words:
            return batch | {"labels": ids_BT.masked_fill(torch.isin(ids_BT, torch.tensor(self.ignored)), IGNORED)}
        return batch | {"labels": torch.tensor([record["labels"] for record in records])}
