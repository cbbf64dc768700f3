"""State that a killed run of a head goes on from: in the private folder, as private as the data."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from hf_dpopt.common.durable import write_durably
from hf_dpopt.common.errors import DPBudgetExceeded
from hf_dpopt.common.log import logger
from hf_dpopt.run.keys import Chain, read_state, write_state


class HeadState:
    """Iterates of one chain of steps, and whether its final weights have left.

    A step's noise comes from the key and its number alone, so a run that begins anew under its key repeats what it
    did: that reveals nothing while none of it has been seen. Once weights were returned, other features under the same
    noise would let two results be subtracted. So a note says when they are, and a run that has it begins no more.

    Args:
        directory: private folder of the run.
        chain: its chain of steps.
    """

    def __init__(self, directory: Path, chain: Chain):
        self.path = directory / f"head-{chain.chain_id}.pt"
        self._note = directory / f"head-{chain.chain_id}.pt.returned"

    def save(self, step: int, state: dict[str, Any]) -> None:
        """Keep the iterates after a step, in place of earlier ones.

        Args:
            step: steps taken.
            state: state of the descent, what its `state_dict` returns.
        """
        write_state(self.path, {"step": step, **state})

    def load(self, num_steps: int) -> dict[str, Any] | None:
        """State that was saved last, its step under "step"; None if the run begins.

        Args:
            num_steps: steps of the whole run.

        Raises:
            DPBudgetExceeded: if there is none, and the weights of the run were returned before.
        """
        kept = read_state(self.path) if self.path.exists() else None
        if kept is not None and 0 <= kept["step"] <= num_steps and math.isfinite(float(kept["weights"].norm())):
            return kept
        if self._note.exists():
            raise DPBudgetExceeded(
                f"{self.path} is missing or damaged, and the final weights of its run were returned before: other "
                "features under its noise could be subtracted from them. Put the file back if there is a copy; else "
                "use another output_dir, whose epsilon comes on top."
            )
        if self.path.exists():
            logger.warning(
                f"{self.path} is damaged: the run begins at its first step again, under its key. That takes time, and "
                "costs nothing: none of it has been seen."
            )
        return None

    def note_return(self) -> None:
        """Note that the final weights leave now; durable before it returns."""
        if not self._note.exists():
            write_durably(self._note, b"", mode=0o600)
