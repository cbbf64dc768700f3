"""The package's own log: the plan, the self-check and the budget are worth a line even where the Trainer is quiet."""

from __future__ import annotations

import logging

logger = logging.getLogger("hf_dpopt")


def show(is_main_process: bool) -> None:
    """Makes the log visible on the main process, unless the application has set up logging itself."""
    logger.setLevel(logging.INFO if is_main_process else logging.ERROR)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[hf_dpopt] %(message)s"))
        logger.addHandler(handler)
        logger.propagate = (
            False  # a library that gives the root a handler later (absl does) would print every line again
        )


# transformers imports peft, and that bitsandbytes, which warns on some processors of a kernel that it goes on without.
_NOT_OURS = ("bitsandbytes.backends.cpu.ops", "Failed to load CPU gemm_4bit_forward")


def hush_imports() -> None:
    """Leaves out what a library says of itself while it is imported; nothing else that it says."""
    logging.getLogger(_NOT_OURS[0]).addFilter(_is_ours)


def _is_ours(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_NOT_OURS[1])
