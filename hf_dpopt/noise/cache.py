"""Tuned strategies are kept on disk: a run that is resumed, or started again, need not tune again.

Entries lie in ``$HF_DPOPT_CACHE_DIR``, else ``$XDG_CACHE_HOME/hf_dpopt``, else ``~/.cache/hf_dpopt``. Nothing in them
is secret: a strategy depends on the length of a run, not on data. No privacy rests on them either: the sensitivity is
computed from the strategy that was read, so that another one would cost utility alone.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import io
import json
import os
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np

from hf_dpopt.common.durable import write_durably
from hf_dpopt.noise.strategy import NoiseStrategy, from_parameters, is_whole

VERSION = 1  # of entries and tunings; raise it when a tuning gives another result for the same inputs

Inputs = ParamSpec("Inputs")
Strategy = TypeVar("Strategy", bound=NoiseStrategy)


def cache_dir() -> Path:
    """Folder of the entries. To keep none, set HF_DPOPT_CACHE_DIR to what cannot be a folder, like ``/dev/null``."""
    if chosen := os.environ.get("HF_DPOPT_CACHE_DIR"):
        return Path(chosen)
    caches = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(caches) if os.path.isabs(caches) else Path(os.path.expanduser("~"), ".cache")) / "hf_dpopt"


def cached(tune: Callable[Inputs, Strategy]) -> Callable[Inputs, Strategy]:
    """`tune`, which finds what it found before for equal inputs.

    An entry that is missing, cut short or edited is computed again, and a folder that cannot be written is no error.
    """
    signature, name = inspect.signature(tune), tune.__name__

    @functools.wraps(tune)
    def find(*args: Inputs.args, **kwargs: Inputs.kwargs) -> Strategy:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        try:
            inputs = json.dumps([VERSION, name, bound.arguments], default=_plain, sort_keys=True)
        except (TypeError, ValueError):  # not of the kinds that tunings take: they say so
            return tune(*args, **kwargs)
        key = hashlib.sha256(inputs.encode()).hexdigest()
        found = _read(name, key)
        if isinstance(found, typing.get_type_hints(tune)["return"]):
            return typing.cast(Strategy, found)
        strategy = tune(*args, **kwargs)
        _write(name, key, strategy)
        return strategy

    return find


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(type(value))


def _path(name: str, key: str, suffix: str) -> Path:
    return cache_dir() / f"{name}-{key[:32]}.{suffix}"


def _read(name: str, key: str) -> NoiseStrategy | None:
    try:
        entry = json.loads(_path(name, key, "json").read_text())
        if entry["key"] != key:
            return None
        whole = is_whole(entry["parameters"])
        arrays = None if whole else dict(np.load(_path(name, key, "npz"), allow_pickle=False))
        strategy = from_parameters(entry["parameters"], arrays)
        return strategy if strategy.digest() == entry["digest"] else None
    except Exception:  # whatever a file of unknown content can do to its readers; the tuning runs then
        return None


def _write(name: str, key: str, strategy: NoiseStrategy) -> None:
    entry = {"key": key, "parameters": strategy.parameters(), "digest": strategy.digest()}
    try:
        cache_dir().mkdir(parents=True, exist_ok=True)
        if arrays := strategy.arrays():
            write_durably(_path(name, key, "npz"), _packed(arrays), mode=0o644)
        write_durably(_path(name, key, "json"), json.dumps(entry).encode(), mode=0o644)
    except OSError:  # no cache, then
        return


def _packed(arrays: dict[str, np.ndarray]) -> bytes:
    content = io.BytesIO()
    np.savez(content, allow_pickle=False, **arrays)
    return content.getvalue()
