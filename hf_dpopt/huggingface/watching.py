"""Call a function after every step of a trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback


class AfterStep(TrainerCallback):
    """Callback that calls a function with the number of each step once it is done.

    Args:
        call: takes the step, which counts from 1.
    """

    def __init__(self, call: Callable[[int], None]):
        self.call = call

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Pass on the step."""
        self.call(state.global_step)
