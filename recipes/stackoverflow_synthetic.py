"""A synthetic split in the files of the StackOverflow benchmark: the embedded job, and measurements of its cost.

`write` makes ``stackoverflow.sqlite`` with the splits train and heldout, ``stackoverflow.word_count`` and
``stackoverflow.tag_count``. Like the real split it has 397 rows per user on average and a power law of at least 25 %
of that (Pareto, exponent 1.337), a Zipf law of words and tags, and words outside the vocabulary. A word often follows
its predecessor, sentences end in a full stop, and posts hold words of their tags, so that both tasks can be learned.
Nobody wrote any of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import numpy as np

SQLITE, WORD_COUNT, TAG_COUNT = "stackoverflow.sqlite", "stackoverflow.word_count", "stackoverflow.tag_count"
ROWS_PER_USER = 397  # 135,818,730 rows of 342,477 users
EXPONENT = 1.337  # a Pareto law whose mean is four times its minimum
MEAN_WORDS, MOST_WORDS = 13, 60
SHARE_FOLLOWING, SHARE_OF_TAG = 0.4, 0.1  # of the words: follow from the one before, are of the post's first tag
MARKS = (".", ",", "the", "i", "to", "a", "<URL>", "(", ")", "don't", "c#", "?", "it's", "front-end", "#include", '"')
SYLLABLES = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
USERS_AT_ONCE = 256


def word(number: int) -> str:
    """Return the word of a rank: a few real ones first, then syllables, some with a hyphen or an apostrophe."""
    if number < len(MARKS):
        return MARKS[number]
    name, rest = "", number
    while rest:
        rest, place = divmod(rest, len(SYLLABLES))
        name += SYLLABLES[place]
    return name + ("'s" if number % 23 == 0 else "-like" if number % 17 == 0 else "")


def zipf(size: int) -> np.ndarray:
    """Return the cumulative probabilities of ranks, (size,)."""
    shares = 1 / np.arange(1, size + 1)
    return np.cumsum(shares / shares.sum())


def write(
    folder: Path,
    *,
    num_users: int,
    rows_per_user: float = ROWS_PER_USER,
    num_words: int = 20_000,
    num_tags: int = 1000,
    seed: int = 0,
) -> Path:
    """Write the three files, unless they are there, and return the folder.

    Args:
        num_users: of train; heldout has a ninth as many more, as in the benchmark.
        rows_per_user: their mean.
        num_words: different words; those beyond the vocabulary of a run are unknown to it.
    """
    database = folder / SQLITE
    if database.is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    words, tags = [word(i) for i in range(num_words)], [f"tag-{i}" for i in range(num_tags)]
    counts = np.diff(zipf(num_words), prepend=0) * num_users
    (folder / WORD_COUNT).write_text("".join(f"{w} {c:.0f}\n" for w, c in zip(words, counts, strict=True)), "utf-8")
    (folder / TAG_COUNT).write_text(json.dumps({tag: num_tags - i for i, tag in enumerate(tags)}), "utf-8")
    part = database.with_suffix(f".{os.getpid()}.part")
    with contextlib.closing(sqlite3.connect(part)) as connection, connection:
        connection.execute("PRAGMA journal_mode = OFF")  # a file that is not finished is thrown away
        connection.execute("CREATE TABLE examples (split_name TEXT, client_id TEXT, serialized_example_proto BLOB)")
        connection.execute("CREATE TABLE client_metadata (client_id TEXT, split_name TEXT, num_examples INTEGER)")
        rng = np.random.default_rng(seed)
        first = 0
        for split, number in (("train", num_users), ("heldout", max(1, num_users // 9))):
            for begin in range(0, number, USERS_AT_ONCE):
                users = [f"{first + u:08}" for u in range(begin, min(begin + USERS_AT_ONCE, number))]
                sizes = rows_per_user * (1 - 1 / EXPONENT) * (1 + rng.pareto(EXPONENT, len(users)))
                sizes = np.clip(sizes.round(), 1, 500 * rows_per_user).astype(int)
                connection.executemany(
                    "INSERT INTO client_metadata VALUES (?, ?, ?)",
                    [(user, split, int(size)) for user, size in zip(users, sizes, strict=True)],
                )
                authors = [user for user, size in zip(users, sizes, strict=True) for _ in range(size)]
                examples = _examples(rng, len(authors), words, tags)
                connection.executemany(
                    "INSERT INTO examples VALUES (?, ?, ?)",
                    ((split, user, example) for user, example in zip(authors, examples, strict=True)),
                )
            first += number
    part.replace(database)
    return folder


def _examples(rng: np.random.Generator, num_rows: int, words: list[str], tags: list[str]) -> Iterator[bytes]:
    """Draw rows; each as a serialized ``tf.train.Example`` with the benchmark's features."""
    words_of_rank, tags_of_rank = zipf(len(words)), zipf(len(tags))
    lengths = np.minimum(rng.geometric(1 / MEAN_WORDS, num_rows), MOST_WORDS)
    tags_NK = np.searchsorted(tags_of_rank, rng.random((num_rows, 3)))
    drawn_NT = np.searchsorted(words_of_rank, rng.random((num_rows, MOST_WORDS)))
    kinds_NT = rng.random((num_rows, MOST_WORDS))
    topic_N = 100 + 7 * tags_NK[:, 0] % (len(words) // 2)  # a word that is not among the most frequent
    for t in range(1, MOST_WORDS):
        follows_N = (drawn_NT[:, t - 1] * 31 + 7) % 500
        drawn_NT[:, t] = np.where(kinds_NT[:, t] < SHARE_FOLLOWING, follows_N, drawn_NT[:, t])
        drawn_NT[:, t] = np.where(kinds_NT[:, t] > 1 - SHARE_OF_TAG, topic_N, drawn_NT[:, t])
    for length, numbers, own, topic in zip(
        lengths.tolist(), drawn_NT.tolist(), tags_NK.tolist(), topic_N, strict=True
    ):
        yield example({
            "creation_date": "2015-01-01 00:00:00.0 UTC",
            "score": length,
            "tags": "|".join(dict.fromkeys(tags[k] for k in own)),
            "title": f"{words[topic]} {words[numbers[0]]} ?",
            # or an end would be the likeliest word of all, and a model that knows frequencies alone never right
            "tokens": " ".join([*(words[i] for i in numbers[: length - 1]), words[0]]),
            "type": "question",
        })  # fmt: skip


def example(features: dict[str, str | int]) -> bytes:
    """Serialize a ``tf.train.Example``."""
    entries = b""
    for name, value in features.items():
        if isinstance(value, int):
            kind = _field(3, _field(1, _varint(value)))  # packed
        else:
            kind = _field(1, _field(1, value.encode()))
        entries += _field(1, _field(1, name.encode()) + _field(2, kind))
    return _field(1, entries)


def _field(number: int, data: bytes) -> bytes:
    return bytes([number << 3 | 2]) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])
