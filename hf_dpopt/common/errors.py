"""Errors a user can meet. Each says what was wrong, what is allowed, and how to fix it."""

from __future__ import annotations


class DPConfigError(ValueError):
    """A setting, a file or a combination of both under which the privacy statement would be false or undefined."""


class UnsupportedModuleError(DPConfigError):
    """A trainable parameter whose per-record gradient cannot be bounded; the message names it."""


class DPBudgetExceeded(RuntimeError):
    """The next step (or the requested run) would spend more than `target_epsilon`; raised before the step runs."""


class PrivacyWarning(UserWarning):
    """A privacy setting that is allowed but weaker than it looks."""
