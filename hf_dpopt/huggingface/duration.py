"""Estimate of how long training takes, from the clock of its first steps."""

from __future__ import annotations

import time

from hf_dpopt.common.log import logger

LEAST_STEPS, LEAST_SECONDS = 3, 10.0  # that are measured, after the first step, which also warms up


class Duration:
    """Estimate of the time that training takes.

    Reads the clock alone. The time of a step depends on how many records it drew; the Trainer's progress bar shows it
    for every step, the line of the log a mean of several in two digits. Time is not covered (docs/guarantee.md).

    Args:
        num_steps: optimizer steps of the whole run.
    """

    def __init__(self, num_steps: int):
        self._num_steps, self._began, self._is_said = num_steps, (0, 0.0), False

    def step_taken(self, step: int) -> None:
        """Note a step that was not taken from the journal, and log the estimate once there is one."""
        (first, since), now = self._began, time.monotonic()
        if not first:
            self._began = step, now
        elif not self._is_said and step - first >= LEAST_STEPS and now - since >= LEAST_SECONDS:
            self._is_said = True
            seconds = (now - since) / (step - first)
            logger.info(
                f"Duration: about {_in_words(seconds * self._num_steps)} for all {self._num_steps} steps, "
                f"{_in_words(seconds * (self._num_steps - step))} from now."
            )


def _in_words(seconds: float) -> str:
    size, unit = next(((size, unit) for size, unit in ((1, "s"), (60, "min")) if seconds / size < 100), (3600, "h"))
    return f"{float(f'{seconds / size:.2g}'):g} {unit}"
