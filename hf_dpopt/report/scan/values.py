"""Un-noised values in results, logs, events and pickles: numbers under a name that only exact data can have."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from hf_dpopt.common.log import SECRET_LOG_KEYS, SECRET_LOG_PREFIX, is_secret_key
from hf_dpopt.report.model_card import strip_training_losses
from hf_dpopt.report.scan.pickles import Opaque

# What a step sees of single records, or of all of a batch, before the noise; by whatever script it was written.
STEP_KEYS = frozenset(
    """num_clipped num_dropped num_records_in_batch num_records clip_fraction clipped_fraction fraction_clipped
    loss_sum record_losses record_loss per_example_loss per_example_losses per_sample_loss per_sample_losses
    record_norms record_norm per_example_grad_norm per_example_grad_norms per_sample_grad_norm per_sample_grad_norms
    logical_batch_size logical_batch_sizes true_batch_size true_batch_sizes actual_batch_size actual_batch_sizes
    sampled_indices batch_indices clipped_sum clipped_sums unnoised_sum unnoised_sums unnoised_gradient
    unnoised_gradients noise_buffer noise_buffers noise_state noise_key sampling_key dropout_key root_key""".split()
)
# Where the stock Trainer writes SECRET_LOG_KEYS; a file of such a name that is no JSON was not checked.
RESULT_FILES = re.compile(r"trainer_state\.json|.*_results\.json")
LOG_SUFFIXES = (".log", ".txt", ".out", ".err", ".yaml", ".yml", ".jsonl", ".ndjson", ".json", ".ini", ".toml")
TABLE_SUFFIXES = (".csv", ".tsv")
MAX_JSON = 64 * 2**20
_NUMBER = rb"-?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[Nn]a[Nn]|-?[Ii]nf(?:inity)?"
_NAMES = "|".join(sorted(STEP_KEYS | SECRET_LOG_KEYS, key=lambda name: (-len(name), name))).encode()
_NAMED = rb"(" + _NAMES + rb"|" + SECRET_LOG_PREFIX.encode() + rb"\w+)"
# In quotes, as the Trainer prints its numbers since version 5, or without.
_LOGGED = re.compile(
    rb"(?<![\w./-])(?:train/)?" + _NAMED + rb"[\"']?\s*[:=]\s*\[?\s*([\"']?)(" + _NUMBER + rb")(?![\w.])"
)
_EVENT = re.compile(rb"\x0a([\x01-\x7f])((?:[\w .-]+/)*" + _NAMED + rb")(?=[\x00-\x1f\x4a])(\x15(.{4}))?", re.DOTALL)
_HELD_OUT = ("eval", "test", "valid", "dev", "predict")
# A value of other data than the training set says so in the words before its name: "validation loss", "Baseline
# (public) loss". One word may stand between ("test set loss"); a number or a comma ends what is looked at.
_OTHER_DATA = r"eval|evaluation|val|valid|validation|held[ _-]?out|predict|prediction|predictions"
_OF_OTHER_DATA = re.compile(
    rf"(?:^|[^a-z])(?:{_OTHER_DATA}|test|dev|public)(?:[^a-z0-9,;\n]+(?:set|split|data|mean|average|avg|final|best))?"
    r"[^a-z0-9,;\n]*$".encode(),
    re.IGNORECASE,
)
# Of a file, "test" and "dev" in its name may as well stand for a trial run.
_OTHER_DATA_FILE = re.compile(rf"(?:^|[^a-z])(?:{_OTHER_DATA})(?:[^a-z]|$)", re.IGNORECASE)
_OF_TRAINING = re.compile(rb"(?<![a-z])train(?:ing)?[^a-z0-9,;\n]*$", re.IGNORECASE)
# Words that anybody uses (`loss: 1.0` is a weight in a configuration, `num_records` the public size of a data set): in
# text and tables they tell of a step only beside what the Trainer logs with them.
_COMMON_WORDS = frozenset({"loss", "num_records"})
_STEP_COLUMNS = frozenset({"step", "global_step", "epoch", "learning_rate", "grad_norm", "iteration"})
_STEP = re.compile(
    rb"(?<![a-z_.])(?:" + b"|".join(sorted(n.encode() for n in _STEP_COLUMNS)) + rb")(?![a-z_])", re.IGNORECASE
)
_BESIDE = 400  # bytes on each side of a value, on its line

Place = tuple[str, float]  # where a value stands, and the value


def is_secret_name(key: str) -> bool:
    """Whether a number under this key is an exact value of training data."""
    return is_secret_key(key) or key in STEP_KEYS


def in_json(content: bytes) -> Iterator[Place]:
    """Un-noised numbers in a JSON document. 0 and None are the placeholders of what was not released.

    A single `num_records` counts only beside a step: alone it is the size of a data set, which is public.

    Raises:
        ValueError: if it is no JSON.
    """
    yield from _in_value(json.loads(content), "", depth=0)


def _in_value(value: Any, where: str, depth: int) -> Iterator[Place]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            place = f"{where}.{key}" if where else key
            if (
                is_secret_name(key.removeprefix("train/"))
                and (number := _first_number(item))
                and not _is_word(key, item)
            ):
                if key != "num_records" or isinstance(item, list) or _STEP_COLUMNS & value.keys():
                    yield place, number
            yield from _in_value(item, place, depth + 1)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            if isinstance(item, (Mapping, list)):
                yield from _in_value(item, f"{where}[{index}]", depth + 1)


def _is_word(key: str, value: Any) -> bool:
    """Whether a key is rather a word: in a vocabulary, or among labels, it stands with a whole number."""
    return key == "loss" and isinstance(value, int)


def _first_number(value: Any) -> float | None:
    """The number, or the first number but 0 of a list."""
    items = value if isinstance(value, (list, tuple)) else [value]
    numbers = (item for item in items if isinstance(item, (int, float)) and not isinstance(item, bool) and item)
    return float(first) if (first := next(numbers, None)) is not None else None


def in_log(content: bytes, file_name: str = "") -> Iterator[Place]:
    """Un-noised numbers after their name, as in a log, in YAML, or in lines of JSON.

    Args:
        content: text.
        file_name: name of the file; one for evaluation tells that its losses are of other data.
    """
    is_of_other_data = is_of_evaluation(file_name)
    for match in _LOGGED.finditer(content):
        name, quote, number = match.group(1).decode(), match.group(2), float(match.group(3))
        if not number or (name == "loss" and not quote and match.group(3).lstrip(b"-").isdigit()):
            continue  # a placeholder; a whole number is a setting: a loss is logged with its decimals
        if name in _COMMON_WORDS and (is_of_other_data or not _is_of_a_step(content, match)):
            continue
        if name != "train_loss" and "loss" in name and _OF_OTHER_DATA.search(_before(content, match)):
            continue
        yield name, number


def is_of_evaluation(file_name: str) -> bool:
    """Whether the name of a file says that it holds values of data held out."""
    return _OTHER_DATA_FILE.search(file_name) is not None


def _before(content: bytes, match: re.Match[bytes]) -> bytes:
    """Return the text before a value on its line."""
    text = content[max(0, match.start() - _BESIDE) : match.start()]
    return text[text.rfind(b"\n") + 1 :]


def _is_of_a_step(content: bytes, match: re.Match[bytes]) -> bool:
    """Whether a value stands on a line of a log: `train` before it, or a step, a rate or a norm beside it."""
    if match.group().startswith(b"train/") or _OF_TRAINING.search(before := _before(content, match)):
        return True
    return bool(_STEP.search(before) or _STEP.search(content[match.end() :][:_BESIDE].partition(b"\n")[0]))


def in_table(content: bytes, file_name: str = "") -> Iterator[Place]:
    """Columns of a table, in commas or tabs, that hold un-noised numbers.

    Args:
        content: text, its first line the names of the columns.
        file_name: name of the file, see `in_log`.
    """
    head, _, rest = content.partition(b"\n")
    separator = "\t" if b"\t" in head else ","
    names = [name.strip(" \"'\r") for name in head.decode("utf-8", "replace").split(separator)]
    is_log = not is_of_evaluation(file_name) and any(name.removeprefix("train/") in _STEP_COLUMNS for name in names)
    for column, name in enumerate(names):
        if not is_secret_name(name.removeprefix("train/")) or (name in _COMMON_WORDS and not is_log):
            continue
        for line in rest.decode("utf-8", "replace").splitlines():
            cell = line.split(separator)[column : column + 1]
            number = _number(cell[0]) if cell else None
            if number:
                yield name, number
                break


def _number(text: str) -> float | None:
    try:
        return float(text.strip(" \"'"))
    except ValueError:
        return None


def in_events(content: bytes) -> Iterator[str]:
    """Tags of TensorBoard events with un-noised scalars: field 1 of a value is the tag, field 2 the float."""
    for match in _EVENT.finditer(content):
        tag = match.group(2).decode()
        if match.group(1)[0] != len(tag) or tag.startswith(_HELD_OUT):
            continue
        if match.group(5) is None or struct.unpack("<f", match.group(5))[0] != 0:
            yield tag


def is_unnoised(key: str, value: Any) -> bool:
    """Whether a pickled mapping holds un-noised numbers or tensors under a key."""
    if not is_secret_name(key) or (key == "num_records" and isinstance(value, int)):  # the size of a data set
        return False
    is_tensor = isinstance(value, Opaque) or (isinstance(value, dict) and bool(value))
    return (
        (is_tensor and key in STEP_KEYS)
        or (isinstance(value, Opaque) and bool(value.content))
        or bool(_first_number(value))
    )


def in_card(text: str) -> bool:
    """Whether a model card holds values that the Trainer computed from un-noised batches."""
    return strip_training_losses(text) != text


def is_step_key(name: str) -> bool:
    """Whether a tensor of this name, or of a module of this name, is one that a step has before the noise."""
    return any(part in STEP_KEYS for part in re.split(r"[./]", name))
