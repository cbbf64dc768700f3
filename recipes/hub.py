"""Is the Hugging Face hub there? The libraries take half a minute of retries to tell; one request takes 3 seconds."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import datasets
import huggingface_hub.constants
import requests

from hf_dpopt import DPConfigError

PROBE_SECONDS = 3
NO_SERVICE = (403, 407)  # a proxy that does not let us through
T = TypeVar("T")


@functools.cache
def is_reachable() -> bool:
    """Whether the hub answers. False under HF_HUB_OFFLINE=1; then the libraries look in their caches only."""
    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return False
    try:
        status = requests.head(huggingface_hub.constants.ENDPOINT, timeout=PROBE_SECONDS).status_code
    except requests.RequestException:
        reachable = False
    else:
        reachable = status < 500 and status not in NO_SERVICE
    if not reachable:  # what HF_HUB_OFFLINE=1 does when the libraries are imported, done now
        huggingface_hub.constants.HF_HUB_OFFLINE = True
        datasets.config.HF_HUB_OFFLINE = True
    return reachable


def load(what: str, loader: Callable[..., T], *args: Any, fix: str, **kwargs: Any) -> T:
    """Calls a loader of `transformers` or `datasets`; a failure becomes one sentence with the way out.

    The hub is asked for only if the first argument is not a local folder.

    Raises:
        DPConfigError: if it cannot be loaded, saying whether the hub was there.
    """
    reachable = Path(str(args[0])).is_dir() or is_reachable()
    try:
        return loader(*args, **kwargs)
    except Exception as error:
        # OSError, ValueError: names, files, connections; safetensors has a class of its own for broken weights
        if not isinstance(error, (OSError, ValueError)) and "Safetensor" not in type(error).__name__:
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        state = "" if reachable else " The hub cannot be reached (or HF_HUB_OFFLINE=1 is set), nor is it in the cache."
        raise DPConfigError(f"{what} cannot be loaded: {reason}.{state} {fix}") from error
