"""Words and tags as ids, as the StackOverflow benchmark of TensorFlow Federated has them.

Shape legend: B = records, T = words of a record, K = tags.
"""

from __future__ import annotations

import collections
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import torch

from hf_dpopt import DPConfigError

WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?|[^\w\s]")
PAD, BEGIN, END, UNKNOWN = range(4)
SPECIAL = ("<pad>", "<begin>", "<end>", "<unknown>")
IGNORED = -100
TOKENS, TITLE = "tokens", "title"  # columns of the layouts; tokens are words separated by blanks
COUNT = re.compile(r"\s+\d+$")
BLANKS = ("\u0120", "\u2581")  # what byte-level and SentencePiece tokens write for a blank
Row = Mapping[str, Any]


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


def text_of(row: Row, column: str) -> str:
    """Text of a row in the benchmark's format: a column `tokens` is kept as it is, any other holds raw text."""
    return str(row[column]) if column == TOKENS else separate_words(str(row[column]))


@dataclass(frozen=True)
class NextWords:
    """Sentences, to predict the next word: see `Vocabulary.sentence`."""

    vocabulary: Vocabulary
    text_column: str
    max_words: int

    @property
    def columns(self) -> dict[str, str]:
        return {self.text_column: "text_column"}

    @property
    def num_ids(self) -> int:
        return len(self.vocabulary)

    def encode(self, rows: Sequence[Row]) -> dict[str, list[list[int]]]:
        return {
            "input_ids": [self.vocabulary.sentence(text_of(row, self.text_column), self.max_words) for row in rows]
        }

    def check(self, name: str, table: Any) -> None:
        check_words(self.vocabulary, name, table)


class Pieces:
    """Sentences in the tokens of a pretrained model, to predict the next word piece by piece.

    Args:
        tokenizer: marks the blank before a word in the first of its pieces, as GPT-2's and Llama's do.
        vocabulary: words that the accuracy counts, to compare with models of words; None for all.
        text_column: column of the texts.
        max_words: words of a text that are used.
        max_pieces: tokens of a text that are used.

    Raises:
        DPConfigError: for a tokenizer that does not mark blanks.
    """

    def __init__(
        self, tokenizer: Any, vocabulary: Vocabulary | None, text_column: str, max_words: int, max_pieces: int
    ):
        self.tokenizer, self._column, self._max_words, self._max_pieces = tokenizer, text_column, max_words, max_pieces
        names = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        self._end = tokenizer.eos_token_id
        self._begin = self._end if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        self._starts = [name is not None and name.startswith(BLANKS) for name in names]
        for first, *others in self._cut(["the", "reproducibly"]):
            if not self._starts[first] or any(self._starts[i] for i in others):
                raise DPConfigError(
                    f"model_name_or_path: {type(tokenizer).__name__} does not mark where a word begins, so that no "
                    "accuracy of words can be computed. Use a model with GPT-2's or Llama's tokens."
                )
        for special in tokenizer.all_special_ids:
            self._starts[special] = True
        self._known = None if vocabulary is None else {tuple(pieces) for pieces in self._cut(vocabulary.words)}

    def __repr__(self) -> str:
        digest = hashlib.sha256(repr(sorted(self.tokenizer.get_vocab().items())).encode()).hexdigest()
        return f"Pieces({digest}, {self._column!r}, {self._max_words}, {self._max_pieces})"

    @property
    def columns(self) -> dict[str, str]:
        return {self._column: "text_column"}

    @property
    def num_ids(self) -> int:
        return len(self.tokenizer)

    def encode(self, rows: Sequence[Row]) -> dict[str, list[list[int]]]:
        texts = [text_of(row, self._column).split(" ")[: self._max_words] for row in rows]
        distinct = list({word for words in texts for word in words})
        pieces = dict(zip(distinct, self._cut(distinct), strict=True))
        encoded = []
        for words in texts:
            ids = [i for word in words for i in pieces[word]][: self._max_pieces]
            encoded.append([self._begin, *ids, *([self._end] if len(words) < self._max_words else [])])
        return {"input_ids": encoded}

    def check(self, name: str, table: Any) -> None:
        pass  # a tokenizer has pieces for every text

    def judge(
        self, said_BT: torch.Tensor, targets_BT: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Judge words by their pieces: right if all are, and the piece predicted next begins another word.

        Args:
            said_BT: most likely tokens at each position, the one after the last target included, (B, T + 1).
            targets_BT: tokens that come next, `IGNORED` behind the text, (B, T).

        Returns:
            For each target token: whether it begins a word or is special, whether that word counts, and whether it
            counts and is right; booleans, (3, B, T).
        """
        starts_BT, counts_BT, right_BT = judged = torch.zeros(3, *targets_BT.shape, dtype=torch.bool)
        specials = set(self.tokenizer.all_special_ids)
        for b, (said, padded) in enumerate(zip(said_BT.tolist(), targets_BT.tolist(), strict=True)):
            targets = [i for i in padded if i != IGNORED]
            bounds = [t for t, i in enumerate(targets) if self._starts[i]] + [len(targets)]
            for first, end in itertools.pairwise(bounds):
                word = targets[first:end]
                starts_BT[b, first] = True
                if word[0] not in specials and (self._known is None or tuple(word) in self._known):
                    counts_BT[b, first] = True
                    right_BT[b, first] = said[first:end] == word and self._starts[said[end]]
        return judged

    def _cut(self, words: Sequence[str]) -> list[list[int]]:
        return self.tokenizer([f" {word}" for word in words], add_special_tokens=False)["input_ids"] if words else []


@dataclass(frozen=True)
class Tags:
    """All known words of text and title, repeated as they are, and the numbers of the known tags of a post."""

    vocabulary: Vocabulary
    text_column: str
    tags: tuple[str, ...]
    tags_column: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "_numbers", {tag: k for k, tag in enumerate(self.tags)})

    @property
    def columns(self) -> dict[str, str]:
        return {self.text_column: "text_column", self.tags_column: "tags_column"}

    @property
    def num_ids(self) -> int:
        return max(len(self.vocabulary), len(self.tags))

    def encode(self, rows: Sequence[Row]) -> dict[str, list[list[int]]]:
        numbers: dict[str, int] = self._numbers  # type: ignore[attr-defined]
        texts = (f"{text_of(row, self.text_column)} {row.get(TITLE, '')}" for row in rows)
        tags = (str(row[self.tags_column]).split("|") for row in rows)
        return {
            "input_ids": [[i for i in self.vocabulary.ids(text.split()) if i != UNKNOWN] for text in texts],
            "tags": [[numbers[name] for name in names if name in numbers] for names in tags],
        }

    def check(self, name: str, table: Any) -> None:
        check_words(self.vocabulary, name, table)
        if not any(len(chunk.flatten()) for chunk in table["tags"].chunks):
            raise DPConfigError(
                f"tags_file: {name} has none of its {len(self.tags)} tags, such as {self.tags[0]!r}. Give the tags of "
                "these posts, or the column that holds them, --tags_column."
            )


def check_words(vocabulary: Vocabulary, name: str, table: Any) -> None:
    """Refuse encoded texts without a known word."""
    if not any((pc.max(chunk.flatten()).as_py() or 0) > UNKNOWN for chunk in table["input_ids"].chunks):
        raise DPConfigError(
            f"vocabulary_file: {name} has none of its {len(vocabulary.words)} words, such as {vocabulary.words[0]!r}. "
            "Give a vocabulary of these texts, or their column, --text_column."
        )


# Makes ids of rows; its ``repr`` names all that the ids depend on. `columns` are those that it reads, with the options
# that name them; `check` refuses the encoded rows of a file in which it knows nothing.
Encoder = NextWords | Pieces | Tags


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
