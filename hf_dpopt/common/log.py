"""The package's own log: the plan, the self-check and the budget are worth a line even where the Trainer is quiet."""

from __future__ import annotations

import logging

logger = logging.getLogger("hf_dpopt")


class _Console(logging.StreamHandler):
    """Prints where nobody else handles a record.

    Asked at every record, not once: an application may set up logging after the trainer was built, and libraries give
    the root logger a handler when they are imported (absl does). Either way a line is handled once.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        others = [handler for handler in (*logger.handlers, *logging.root.handlers) if handler is not self]
        return not others and bool(super().filter(record))


def show(is_main_process: bool) -> None:
    """Makes the log visible on the main process, unless the application sets up logging itself, now or later."""
    logger.setLevel(logging.INFO if is_main_process else logging.ERROR)
    if not any(isinstance(handler, _Console) for handler in logger.handlers):
        console = _Console()
        console.setFormatter(logging.Formatter("[hf_dpopt] %(message)s"))
        logger.addHandler(console)
