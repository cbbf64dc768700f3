"""Stages of a run before the clip, after the noise and after the optimizer's step; their state in checkpoints.

All of it is made of released and public values, so it lies beside the optimizer's state in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hf_dpopt.clipping import ClippingEngine
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.log import logger
from hf_dpopt.common.sharding import any_sharded, gathered, has_shards, is_sharded, scattered
from hf_dpopt.optim import NoiseAwareOptimizer
from hf_dpopt.postprocess import Postprocess
from hf_dpopt.postprocess.iterates import IterateAverage
from hf_dpopt.preclip import PublicSource
from hf_dpopt.run.run import PrivateRun

RELEASED_STATE = "released_state.pt"
OPTIMIZER_STATE = "optimizer.pt"


class Stages:
    """The stages around the private core of one run.

    Args:
        run: run of the plan.
        engine: clipping engine of the model.
        optimizer: torch's own; told the noise level if it is a `NoiseAwareOptimizer`.
        after_noise: maps of the released mean gradient; told the same. What multiplies every coordinate by one number
            says so in an attribute ``gain``.
        public: gradients of public records, where something needs them.
        average: average of the released weights to end with; None for the last weights.

    Attributes:
        engine: the one to clip with.

    Raises:
        DPConfigError: for a preconditioner that does not fit the model.
    """

    def __init__(
        self,
        run: PrivateRun,
        engine: ClippingEngine,
        optimizer: torch.optim.Optimizer,
        after_noise: Sequence[Postprocess] = (),
        *,
        public: PublicSource | None = None,
        average: IterateAverage | None = None,
    ):
        self.preclip = run.start_preclip(engine, public=public)
        self.engine = self.preclip.engine(engine)
        self.after_noise, self._average = tuple(after_noise), average
        self._kept: list[Postprocess | IterateAverage] = [*self.after_noise, *filter(None, [average])]
        self._optimizer, self._spec = optimizer, run.plan.preclip.parameters()
        self._metrics = run.metrics
        for place, stage in enumerate(self.after_noise):
            stage.set_noise(run.noise_level(self.preclip, *self.after_noise[:place]))
        if isinstance(optimizer, NoiseAwareOptimizer):
            optimizer.set_noise(run.noise_level(self.preclip, *self.after_noise))
        self._hook = None if average is None else average.attach(optimizer)

    def announce(self) -> None:
        """Say in the log what runs before the clip, after the noise and after the optimizer's step."""
        if self._spec is not None:
            given = ", ".join(f"{name}={value}" for name, value in self._spec.items() if name != "name")
            logger.debug(f"Preconditioner: {self._spec['name']} ({given}).")
        logger.debug(f"After the noise: {'; '.join(self.made_of)}.")

    def finish(self) -> None:
        """Give the model its averaged weights, where there is an average: after the last step."""
        if self._average is not None:
            self._average.finish()

    def close(self) -> None:
        """Take the hook off the optimizer."""
        if self._hook is not None:
            self._hook.remove()

    @property
    def _has_state(self) -> bool:
        kept = (self.preclip.state_dict(), self._kept, self._metrics.state_dict())
        return any(kept) or isinstance(self._optimizer, NoiseAwareOptimizer)

    def save(self, folder: str | Path, *, writes: bool = True) -> None:
        """Write the state of all; nothing if there is none. All ranks call it where weights lie in shards.

        Args:
            folder: folder of the checkpoint.
            writes: whether this rank writes it; the others take part.
        """
        if not self._has_state:
            return
        state = gathered(self._state(), keeps=writes)
        if writes:
            torch.save(state, Path(folder) / RELEASED_STATE)

    def load(self, folder: str | Path) -> None:
        """Continue from a checkpoint, bit for bit.

        Raises:
            DPConfigError: if the state of a stage is missing there, or belongs to another one.
        """
        path = Path(folder) / RELEASED_STATE
        needed = {OPTIMIZER_STATE: isinstance(self._optimizer, NoiseAwareOptimizer), RELEASED_STATE: self._has_state}
        if missing := [name for name, is_needed in needed.items() if is_needed and not (Path(folder) / name).exists()]:
            raise DPConfigError(
                f"{folder} has no {' and no '.join(missing)}, so what earlier steps taught preconditioner, filters or "
                "optimizer is lost. Resume from a whole checkpoint, or load the weights into a new run."
            )
        if not path.exists():
            return
        state = torch.load(path, map_location="cpu", weights_only=True)
        if any_sharded(self.engine.parameters.values()):
            like = next(filter(is_sharded, self.engine.parameters.values()))
            state = scattered(state, like)
        elif has_shards(state):
            raise DPConfigError(
                f"{path} was written by a run whose weights lay in shards (FSDP2), and these do not. Resume it the "
                "way it was started, with any number of processes."
            )
        kept, mine = state["made_of"], self.made_of
        if kept != mine:
            raise DPConfigError(
                f"{path} was written by a run with {', '.join(kept)} after the noise, and this one has "
                f"{', '.join(mine)}. Resume with the options that the run began with."
            )
        self.preclip.load_state_dict(state["preclip"])
        self._metrics.load_state_dict(state.get("private_metrics", {}))
        for stage, of_stage in zip(self._kept, state["stages"], strict=True):
            stage.load_state_dict(of_stage)

    def _state(self) -> dict[str, Any]:
        metrics = self._metrics.state_dict()
        return {
            "made_of": self.made_of,
            "preclip": self.preclip.state_dict(),
            "stages": [stage.state_dict() for stage in self._kept],
            **({"private_metrics": metrics} if metrics else {}),
        }

    @property
    def made_of(self) -> list[str]:
        """Maps of the gradients, of the weights, and the optimizer, with their public options."""
        inner = self._optimizer.filter if isinstance(self._optimizer, NoiseAwareOptimizer) else None
        filters, averages = filter(None, [inner]), filter(None, [self._average])
        maps: list[Postprocess | IterateAverage] = [*self.after_noise, *filters, *averages]
        described = [f"{type(stage).__name__} {stage.parameters() or ''}".strip() for stage in maps]
        return [*described, type(self._optimizer).__name__]
