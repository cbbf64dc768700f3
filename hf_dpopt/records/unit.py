"""Recognition of rows that are not one record each: blocks of several documents, windows of one example.

Scripts that concatenate texts and cut them into blocks, or that cut one example into windows, make rows that are not
the records whose protection a reader of the statement expects. Where the rows show it, the user is asked for the unit.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.log import warn_once
from hf_dpopt.records.losses import base_model
from hf_dpopt.records.rows import is_stored, read_rows

NUM_RUNS, RUN_SIZE = 4, 1000  # runs of neighbouring rows, spread over the dataset
NUM_LAZY_ROWS = 64  # of a dataset that makes its rows when they are asked for
SHORTEST_BLOCK = 16  # tokens; fewer are no text that was cut
MOST_REMAINDERS = 0.02  # of the rows: what is left of each batch of documents after the last full block; one of ten
SAME_TEXT = 8  # tokens that two windows share at least
ANSWERS = ("labels", "label", "label_ids", "start_positions", "answer_start")
PROMPTED = ("completion_mask", "assistant_masks")  # TRL's: one row is one prompt with its answer
MAPPINGS = ("overflow_to_sample_mapping",)
EXAMPLES = ("example_id", "document_id", "doc_id", "sample_id")  # one number for each text that was cut
PEOPLE = re.compile(  # user, userId, author_name, Patient ID, customer_no ..
    r"(user|author|customer|patient|client|person|participant|student|employee|member|speaker|username|subject(?=.))s?"
    r"[ _-]?(id|ids|uuid|key|no|nr|num|number|name|hash)?",
    re.IGNORECASE,
)
PLAIN = (int, str, bytes)
NUMBERS = ("id", "idx", "guid")  # may start anew where datasets are joined, so only neighbours are compared


@dataclasses.dataclass(frozen=True)
class Unlike:
    """Rows that are not one record each.

    Args:
        kind: "blocks" or "windows".
        seen: the evidence, in public words without any value of a record.
    """

    kind: str
    seen: str


def check_unit(
    dataset: Any, unit: str, *, rows_are_records: bool, model: Any = None, padding_id: int | None = None
) -> None:
    """Refuse rows that are not records, unless the user asked for the unit that they are.

    Nothing that is found is kept: whether rows look like blocks may depend on one of them, and a statement is public.

    Args:
        dataset: the training set.
        unit: privacy_unit of the run.
        rows_are_records: whether the user declared that they are.
        model: the trained model; None while it is not known.
        padding_id: the tokenizer's padding token; None if it has none.

    Raises:
        DPConfigError: if rows are not records; it names the options that say what is meant.
    """
    first = dataset[0] if isinstance(dataset, list | tuple) and len(dataset) else {}
    warn_of_people(getattr(dataset, "column_names", None) or (first if isinstance(first, Mapping) else ()), unit)
    found = None if rows_are_records else recognise(dataset, model=model, padding_id=padding_id)
    if found is None or unit != "example":
        return
    words = _BLOCKS if found.kind == "blocks" else _WINDOWS
    raise DPConfigError(words.format(seen=found.seen))


def warn_of_people(columns: Iterable[str], unit: str) -> None:
    """Warn once of columns that seem to say whose a record is, where single records are protected.

    Args:
        columns: names of the columns; nothing in them is read.
        unit: privacy_unit of the run.
    """
    found = [name for name in columns if PEOPLE.fullmatch(str(name))]
    if found and unit != "user":
        names = ", ".join(map(repr, found))
        warn_once(
            f"people in {names}",
            f"The training set has the column {names}, and every record is protected on its own. If people have "
            f"several records, protect people: --privacy_unit user --user_id_column {shlex.quote(str(found[0]))}.",
        )


_MEANT = (
    "If every row is a whole record of its own all the same (documents that were all cut to max_length, templates "
    "of one length), say --rows_are_records (rows_are_records=True); the statement repeats it."
)
_BLOCKS = (
    "The rows of the training set look like blocks: {seen}. A block may hold text of several documents and a document "
    "may lie in several blocks, so what would be protected is not a document. To protect blocks, say so: "
    "--privacy_unit block. To protect documents, make one row of each (run_mlm.py and run_plm.py: --line_by_line; "
    "run_clm.py: no group_texts), or cut each document on its own and keep its number in a column: --privacy_unit "
    f"user --user_id_column document_id. {_MEANT}"
)
_WINDOWS = (
    "Several rows of the training set were cut from one example: {seen}. What would be protected is a window, not an "
    "example. To protect examples, keep their ids where they are tokenized, example_id = [examples['id'][i] for i in "
    "overflow_to_sample_mapping], and say --privacy_unit user --user_id_column example_id. To protect single windows: "
    f"--privacy_unit block. {_MEANT}"
)


def recognise(dataset: Any, *, model: Any = None, padding_id: int | None = None) -> Unlike | None:
    """Find blocks or windows among the rows; None if the rows look like records.

    Reads a few thousand rows, stored ones as they are stored. Raises no false alarm on rows that differ in length, are
    padded, begin alike, or whose labels are not their tokens.
    """
    runs = _sample(dataset)
    if seen := _seen_in_ids(runs) or _seen_in_overlaps(runs, padding_id):
        return Unlike("windows", seen)
    if any(len(row) > 1 for row in _chain(_column(runs, "seq_lengths"))):
        return Unlike("blocks", "their column seq_lengths counts several texts in a row")
    seen = _seen_in_lengths(runs, model, padding_id)
    return Unlike("blocks", seen) if seen else None


# --- a sample of the rows as they are stored -------------------------------------------------------------------------

Run = list[Mapping[str, Any]]  # neighbouring rows


def _sample(dataset: Any) -> list[Run]:
    """Runs of neighbouring rows, or the first rows of a dataset without columns; none if rows are not mappings."""
    num = len(dataset) if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__") else 0
    starts = [0] if num <= NUM_RUNS * RUN_SIZE else np.linspace(0, num - RUN_SIZE, NUM_RUNS).astype(int).tolist()
    slices = [slice(start, start + RUN_SIZE if len(starts) > 1 else num) for start in starts]
    if is_stored(dataset):
        schema, heavy = dataset.data.schema, ("struct", "binary", "large_binary")  # pictures and sounds
        names = [name for name in dataset.column_names if not str(schema.field(name).type).startswith(heavy)]
        stored = dataset.with_format("arrow", columns=names)
        runs = [stored[each].to_pylist() for each in slices] if num else []
    elif isinstance(dataset, (list, tuple)):
        runs = [list(dataset[each]) for each in slices]
    else:
        runs = [[row for rows in read_rows(dataset, range(min(NUM_LAZY_ROWS, num))) for row in rows]]
    return runs if all(isinstance(row, Mapping) for row in _chain(runs)) else []


def _plain(value: Any) -> Any:
    """Lists and tensors of whole numbers as arrays, single ones as numbers; None for what is something else."""
    if isinstance(value, (str, bytes, int)) or value is None:
        return value
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):
        return None
    if array.dtype.kind not in "iub" or array.ndim > 1:
        return None
    return array if array.ndim else array.item()


def _has(runs: list[Run], name: str) -> bool:
    return all(name in row for row in _chain(runs))


def _column(runs: list[Run], name: str, kinds: type | tuple[type, ...] = np.ndarray) -> list[list[Any]]:
    """The values in a column, run by run; nothing if one is missing or of another kind."""
    values = ((_plain(row.get(name)) for row in run) for run in runs)
    columns = [list(itertools.takewhile(lambda value: isinstance(value, kinds), run)) for run in values]
    return columns if list(map(len, columns)) == list(map(len, runs)) else []


_chain = itertools.chain.from_iterable


# --- windows ---------------------------------------------------------------------------------------------------------


def _seen_in_ids(runs: list[Run]) -> str | None:
    for name in (*MAPPINGS, *NUMBERS):
        if any(a == b for values in _column(runs, name, PLAIN) for a, b in itertools.pairwise(values)):
            return f"neighbouring rows have the same {name}"
    for name in EXAMPLES:
        values = list(_chain(_column(runs, name, PLAIN)))
        if len(set(values)) < len(values):
            return f"rows share an {name}"
    return None


def _seen_in_overlaps(runs: list[Run], padding_id: int | None) -> str | None:
    """Pairs of a row that is cut at the full length and the row behind it, both without padding."""
    all_ids, masks = _column(runs, "input_ids"), _column(runs, "attention_mask")
    texts = [_cut_padding(ids, masks[i] if masks else None, padding_id) for i, ids in enumerate(all_ids)]
    longest = max(map(len, _chain(texts)), default=0)
    pairs = (pair for run in texts for pair in itertools.pairwise(run) if len(pair[0]) == longest)
    found = sum(_overlaps(a, b) for a, b in pairs) if longest > SHORTEST_BLOCK else 0
    enough = 1 if _has(runs, "start_positions") else 2  # a chance of words is no window
    return "neighbouring rows share a long piece of text, as windows with a stride do" if found >= enough else None


def _cut_padding(rows: list[np.ndarray], masks: list[np.ndarray] | None, padding_id: int | None) -> list[np.ndarray]:
    if masks is not None:
        return [ids[mask != 0] if len(ids) == len(mask) else ids for ids, mask in zip(rows, masks, strict=True)]
    if padding_id is None:
        return rows
    return [ids[: len(ids) - int(np.argmax(np.append(ids[::-1] != padding_id, True)))] for ids in rows]


def _overlaps(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether `b` goes on in the middle of `a`, behind what both begin with: a question and a separator, or [CLS]."""
    short = min(len(a), len(b))
    differs = a[:short] != b[:short]
    shared = int(differs.argmax()) if differs.any() else short
    if shared == short:
        return False  # the same text twice
    behind_separator = [i + 1 for i in np.flatnonzero(a[:shared] == a[-1])[-1:]]
    return any(_continues(a, b, start) for start in {0, min(1, shared), *map(int, behind_separator)})


def _continues(a: np.ndarray, b: np.ndarray, start: int) -> bool:
    head = b[start : start + SAME_TEXT]
    if len(head) < SAME_TEXT or len(a) < start + 1 + SAME_TEXT:
        return False
    places = np.lib.stride_tricks.sliding_window_view(a[start + 1 :], SAME_TEXT)
    for at in np.flatnonzero((places == head).all(axis=1)) + start + 1:
        for end in (len(a), len(a) - 1):  # the last token may be a separator
            piece = a[at:end]
            if len(piece) >= SAME_TEXT and np.array_equal(piece, b[start : start + len(piece)]):
                return True
    return False


# --- blocks ----------------------------------------------------------------------------------------------------------


def _seen_in_lengths(runs: list[Run], model: Any, padding_id: int | None) -> str | None:
    rows = list(_chain(_column(runs, "input_ids")))
    longest = max(map(len, rows), default=0)
    if len(rows) < 2 or longest < SHORTEST_BLOCK or not _learns_every_token(runs, rows, model):
        return None
    full = [ids for ids in rows if len(ids) == longest]
    most = max(MOST_REMAINDERS * len(rows), int(len(rows) >= 10))
    masks = list(_chain(_column(runs, "attention_mask")))
    if len(rows) - len(full) > most or _is_padded(masks, full, padding_id) or _begin_alike(full):
        return None
    learned = "their labels are their tokens" if _has(runs, "labels") else "every token may be learned"
    return f"they have {longest} tokens each, none is padded, and {learned}"


def _learns_every_token(runs: list[Run], rows: list[np.ndarray], model: Any) -> bool:
    if any(_has(runs, name) for name in PROMPTED):
        return False
    if _has(runs, "labels"):
        labels = list(_chain(_column(runs, "labels")))
        return len(labels) == len(rows) and all(map(np.array_equal, rows, labels))
    if any(_has(runs, name) for name in ANSWERS):
        return False
    return _has(runs, "special_tokens_mask") or _is_language_model(model)


def _is_language_model(model: Any) -> bool:
    if model is None or isinstance(model, str):
        return False
    base = base_model(model)
    is_decoder_only = not getattr(getattr(base, "config", None), "is_encoder_decoder", False)
    return is_decoder_only and type(base).__name__.endswith(("ForCausalLM", "ForMaskedLM", "LMHeadModel"))


def _is_padded(masks: list[np.ndarray], rows: list[np.ndarray], padding_id: int | None) -> bool:
    if masks:
        return any((mask == 0).any() for mask in masks)
    if padding_id is None:
        return False
    ends = [bool((ids[-2:] == padding_id).all() or (ids[:2] == padding_id).all()) for ids in rows]
    return float(np.mean(ends)) > MOST_REMAINDERS


def _begin_alike(rows: list[np.ndarray]) -> bool:
    """Whether each row begins with the token that begins a record, which blocks hold anywhere."""
    first = rows[0][0]
    if any(ids[0] != first for ids in rows):
        return False
    return float(np.mean([(ids[1:] == first).any() for ids in rows])) < 0.5
