"""The package's own log: the plan, the self-check and the budget are worth a line even where the Trainer is quiet."""

from __future__ import annotations

import logging
import os
import sys

logger = logging.getLogger("hf_dpopt")

# What the stock Trainer computes from the batches it saw: un-noised data, in no log and in no file that is released.
# `train_samples_per_second` is not among them: the private trainer counts expected, public numbers of samples.
SECRET_LOG_KEYS = frozenset({"loss", "train_loss", "total_flos", "num_input_tokens_seen", "train_tokens_per_second"})
SECRET_LOG_PREFIX = "unprivatized_"


_told: set[str] = set()


def warn_once(about: str, message: str) -> None:
    """Log a warning that one process has not logged yet.

    Args:
        about: what tells it from others.
        message: the line.
    """
    if about not in _told:
        _told.add(about)
        logger.warning(message)


def is_secret_key(key: str) -> bool:
    """Whether a value under this key, in a log or a file of results, was computed from un-noised data."""
    return key in SECRET_LOG_KEYS or key.startswith(SECRET_LOG_PREFIX)


class _Console(logging.StreamHandler):
    """Handler that prints every line once, and leaves it to an application that sets up logging itself.

    Asked at every record, not once: an application may set up logging after the trainer was built. A call such as
    ``logging.info(..)`` in some library also gives the root logger a handler, in the default format; that one, if it
    came after ours, is left without our lines.
    """

    def __init__(self) -> None:
        super().__init__()
        self._before = list(logging.root.handlers)

    def filter(self, record: logging.LogRecord) -> bool:
        of_application = [
            handler for handler in logging.root.handlers if handler in self._before or not _is_default(handler)
        ]
        # read by the logger after its own handlers were asked
        logger.propagate = bool(of_application) or not logging.root.handlers
        others = [handler for handler in logger.handlers if handler is not self]
        return not others and not any(map(_prints, of_application)) and bool(super().filter(record))


def _prints(handler: logging.Handler) -> bool:
    return isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stderr, sys.stdout)


def _is_default(handler: logging.Handler) -> bool:
    """Whether this is what ``logging.basicConfig()`` adds when it is told nothing."""
    layout = handler.formatter._fmt if handler.formatter is not None else None
    return _prints(handler) and layout in (None, logging.BASIC_FORMAT)


def show(is_main_process: bool, *, is_debug: bool = False) -> None:
    """Make the log visible on the main process, unless the application sets up logging itself, now or later.

    Args:
        is_main_process: others log errors alone.
        is_debug: also show what a run was told anyway, or chose by itself.
    """
    logger.setLevel(logging.ERROR if not is_main_process else logging.DEBUG if is_debug else logging.INFO)
    if not any(isinstance(handler, _Console) for handler in logger.handlers):
        console = _Console()
        console.setFormatter(logging.Formatter("[hf_dpopt] %(message)s"))
        logger.addHandler(console)


# Logger -> begin of a line of it that is left out.
_LEFT_OUT = {
    # transformers imports peft, and that bitsandbytes, which warns on some processors of a kernel that it does without
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
    # names the exact length of the first text that is longer than the model, which may be a private record
    "transformers.tokenization_utils_base": "Token indices sequence length is longer",
}


def leave_out() -> None:
    """Leave out lines of other libraries that are of no use, or tell of a record; nothing else that they say."""
    for name in _LEFT_OUT:
        logging.getLogger(name).addFilter(_is_kept)


def _is_kept(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(_LEFT_OUT[record.name])


def hide_rows() -> None:
    """Show no bars of `datasets` and TRL from here on: they count rows, and how many the users have is private."""
    if (datasets := sys.modules.get("datasets")) is not None:
        datasets.disable_progress_bars()
    os.environ["TQDM_DISABLE"] = "1"


# TRL warns of a prompt that its chat template renders in two ways, and quotes it; the prompts are private.
_QUOTES_A_PROMPT = "The tokenized prompt is not a prefix"


def hide_prompts(module: str) -> None:
    """Take the prompt that it quotes out of a warning of this module of TRL."""
    logging.getLogger(module).addFilter(_without_prompt)


def _without_prompt(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    if _QUOTES_A_PROMPT in message:
        record.msg, record.args = (
            f"{_QUOTES_A_PROMPT} of the tokenized prompt and answer; what differs is left out of the training "
            "sequence, and not shown, because it is private. Use a chat template that renders the prompt alone as it "
            "does before the answer, or end the prompt on a token boundary.",
            (),
        )
    return True
