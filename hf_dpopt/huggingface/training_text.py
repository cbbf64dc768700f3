"""Training records as text and token ids, in a secret random order, for the release scan."""

from __future__ import annotations

import contextlib
import random
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from hf_dpopt.records.arrow import is_arrow
from hf_dpopt.records.rows import is_environment, read_rows
from hf_dpopt.report.scan.training_text import IDS, Block, TrainingRecords

ROWS_STORED, ROWS_SERVED = 512, 32  # neighbouring rows that are read at once
FIRST_ROWS = 32  # of them that are read first; then more while they are fast, fewer while they are slow
QUICK = 0.1  # seconds that a reading should take, so that the budget is looked at often enough
MAX_USERS = 10_000  # ids that are looked for
DEPTH = 4  # of lists and mappings in a row (turns of a conversation)


def training_records(dataset: Any, tokenizer: Any = None, user_column: str | None = None) -> TrainingRecords | None:
    """The records of a training set for `scan_for_secrets`; None if it has no length and rows.

    Which of them are compared is drawn anew each time by the system's generator, so that no release tells it.

    Args:
        dataset: the training set.
        tokenizer: turns token ids back into text, where the rows hold no text; None for ids alone.
        user_column: column of the ids of users, where users are the unit of privacy.
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__") or not len(dataset):
        return None
    decode = getattr(tokenizer, "batch_decode", None)
    return TrainingRecords(
        lambda: _blocks(dataset, decode if callable(decode) else None, user_column),
        users=_users(dataset, user_column),
    )


def _blocks(dataset: Any, decode: Any, user_column: str | None) -> Iterator[Block]:
    generator = np.random.default_rng(secrets.randbits(128))
    size, pace = ROWS_STORED if is_arrow(dataset) else ROWS_SERVED, FIRST_ROWS
    for number in generator.permutation(-(-len(dataset) // size)).tolist():
        # Any row may come first: where the budget ends inside a block, no place in it is read more often than others.
        rows = (number * size + generator.permutation(min(size, len(dataset) - number * size))).tolist()
        while rows:
            now, rows = sorted(rows[:pace]), rows[pace:]
            began = time.monotonic()
            with _undisturbed_randomness():
                read = [row for some in read_rows(dataset, now) for row in some]
            block = _block(read, decode, user_column)
            pace = _next_pace(len(now), time.monotonic() - began, size)
            yield block


def _next_pace(num_rows: int, seconds: float, at_most: int) -> int:
    """Rows of the next reading: twice as many after a quick one, else as many as take `QUICK` seconds."""
    return min(2 * num_rows if seconds < QUICK / 2 else max(1, round(num_rows * QUICK / seconds)), at_most)


def _block(rows: list[Any], decode: Any, user_column: str | None) -> Block:
    """Texts and token ids of some rows."""
    texts, ids = [], []
    for row in rows:
        content = {k: v for k, v in row.items() if k != user_column} if isinstance(row, Mapping) else row
        own_texts, own_ids = list(_texts(content, DEPTH)), list(_id_lists(content, DEPTH))
        texts += own_texts
        ids += own_ids
        if not own_texts and decode is not None:
            texts += _decoded(decode, own_ids[:1])
    return Block(texts, ids)


def _texts(value: Any, depth: int) -> Iterator[str]:
    """The texts in a row."""
    if isinstance(value, str):
        yield value
    elif depth and isinstance(value, (Mapping, list, tuple)) and not _is_number_list(value):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item, depth - 1)


def _id_lists(value: Any, depth: int) -> Iterator[np.ndarray]:
    """The lists of whole numbers in a row that are long enough to be compared."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.numpy() if not value.is_floating_point() else value.tolist()
    if isinstance(value, np.ndarray):
        if value.dtype.kind in "iu" and value.size >= IDS:
            yield value.ravel().astype(np.int64)
    elif _is_number_list(value):
        if len(value) >= IDS:
            yield np.array(value, dtype=np.int64)
    elif depth and isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _id_lists(item, depth - 1)


def _is_number_list(value: Any) -> bool:
    """Whether this is a list of whole numbers of 64 bits; its first and last items say so for all."""
    if not isinstance(value, (list, tuple)) or not value:
        return False
    ends = (value[0], value[-1])
    if not all(isinstance(item, (int, np.integer)) and not isinstance(item, bool) for item in ends):
        return False
    return all(isinstance(item, (int, np.integer)) and -(2**63) <= item < 2**63 for item in value)


def _decoded(decode: Any, ids: list[np.ndarray]) -> list[str]:
    try:
        return decode([one[one >= 0].tolist() for one in ids], skip_special_tokens=True)
    except BaseException as error:  # ids that are no tokens; panics of tokenizers are no Exception
        if is_environment(error):
            raise
        return []


def _users(dataset: Any, column: str | None) -> list[str]:
    """Ids of users, of some at random if they are many."""
    if column is None or not is_arrow(dataset) or column not in dataset.column_names:
        return []
    named = sorted({str(user) for user in dataset.unique(column)})
    return named if len(named) <= MAX_USERS else secrets.SystemRandom().sample(named, MAX_USERS)


@contextlib.contextmanager
def _undisturbed_randomness() -> Iterator[None]:
    """Leave the generators as they are that a dataset may draw from when it is read (augmentation)."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
