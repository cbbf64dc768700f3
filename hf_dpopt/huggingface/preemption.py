"""Requests between two steps: a checkpoint where the journal is full, and an end where a signal asks for it.

A process that was asked to stop ends with the exit code for "try again". Ctrl-C is Python's own: it ends a run in the
middle of a step, as a kill does, and a resume goes on from the journal.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from transformers import TrainingArguments

from hf_dpopt.common.log import logger
from hf_dpopt.run.run import PrivateRun

STOP, SAVE, GO_ON = 2, 1, 0  # what the ranks agree on; the largest request wins
TRY_AGAIN = os.EX_TEMPFAIL  # 75
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preempted(SystemExit):
    """End of a process whose run was asked to stop; the exit code is 75."""


class Preemption:
    """Signals that this process has received, and what the ranks agree on.

    Attributes:
        received: name of the first signal that asked to stop; None so far.
        is_stopping: whether all processes have agreed to stop.
        wants_save: whether this step has to end with a checkpoint.
        is_extra: whether that checkpoint is there for the journal alone.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self.is_stopping = False
        self.wants_save, self.is_extra = False, False
        self._process = os.getpid()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Record SIGTERM and SIGUSR1 inside the context, and restore their handlers after it.

        Outside of the main thread no handler is installed. A handler that the script has installed stays; the default
        ones would end the process in mid-step. A signal that came too late to stop the training is sent once more when
        the handlers are back.
        """
        self.received, self.is_stopping, self._process = None, False, os.getpid()
        is_main = threading.current_thread() is threading.main_thread()
        free = [number for number in SIGNALS if is_main and signal.getsignal(number) == signal.SIG_DFL]
        for number in free:
            signal.signal(number, self._receive)
        try:
            yield
        finally:
            for number in free:
                signal.signal(number, signal.SIG_DFL)
        self._pass_on()

    @contextlib.contextmanager
    def saving(self, args: TrainingArguments) -> Iterator[None]:
        """Save more than the model inside the context, where the run has to go on from there."""
        only_model = args.save_only_model
        args.save_only_model = only_model and not self.is_stopping
        try:
            yield
        finally:
            args.save_only_model = only_model

    def _pass_on(self) -> None:
        if self.received is not None and not self.is_stopping:
            signal.raise_signal(signal.Signals[self.received])

    def between_steps(self, run: PrivateRun, state: Any, control: Any) -> None:
        """Agree with all processes on whether to save, and to stop, before the next step.

        Args:
            run: the run in progress.
            state: the Trainer's.
            control: the Trainer's; what is agreed on is set there.
        """
        self.wants_save = self.is_extra = False
        if self.is_stopping:
            return
        wish = STOP if self.received is not None else SAVE if run.wants_checkpoint else GO_ON
        agreed = run.ranks.largest(wish)
        if agreed == GO_ON or (agreed == SAVE and state.global_step >= state.max_steps):
            return
        self.is_extra = agreed == SAVE and not control.should_save
        control.should_save = self.wants_save = True
        if agreed == STOP:
            self.is_stopping = control.should_training_stop = True

    def stop(self, state: Any) -> None:
        """End the process if that was agreed on.

        Raises:
            Preempted: in place of the end of the training.
        """
        if self.is_stopping:
            logger.warning(
                f"Stopped after step {state.global_step} of {state.max_steps}, as a signal asked "
                f"({self.received or 'another process received it'}). The checkpoint is saved: start again with "
                "resume_from_checkpoint=True."
            )
            raise Preempted(TRY_AGAIN)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a child that was forked inside of the context
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            return
        # launchers pass a signal on that the processes have got already, so a second one changes nothing
        self.received = self.received or signal.Signals(number).name
