"""What a run has before the clip, after the noise and after the optimizer's step, and its state in checkpoints.

All of it is made of released and public values, so it lies beside the optimizer's state in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hf_dpopt.console import logger
from hf_dpopt.errors import DPConfigError
from hf_dpopt.grads import ClippingEngine
from hf_dpopt.mechanisms.level import MechanismLevel
from hf_dpopt.optim import NoiseAwareOptimizer
from hf_dpopt.postprocess import NoiseLevel, Postprocess
from hf_dpopt.postprocess.iterates import AfterStep
from hf_dpopt.preclip import PublicSource
from hf_dpopt.run import PrivateRun

RELEASED_STATE = "released_state.pt"
OPTIMIZER_STATE = "optimizer.pt"


class Stages:
    """What stands around the private core in one run.

    Args:
        run: of the plan.
        engine: of the model.
        optimizer: torch's own; told how loud the noise is if it asks for that.
        chain: maps of the released mean gradient; told the same. What multiplies every coordinate by one number says
            so in an attribute ``gain``.
        public: gradients of public records, where something needs them.
        after: maps of the released weights, called after every step of the optimizer.

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
        chain: Sequence[Postprocess] = (),
        *,
        public: PublicSource | None = None,
        after: Sequence[AfterStep] = (),
    ):
        self.preclip = run.start_preclip(engine, public=public)
        self.engine = self.preclip.engine(engine)
        self.chain, self.after = tuple(chain), tuple(after)
        self._optimizer, self._spec = optimizer, run.plan.preclip.parameters()
        tell_noise(run.noise_level(self.preclip), *self.chain)
        tell_noise(run.noise_level(self.preclip, self.chain), optimizer)
        for stage in self.after:
            stage.attach(optimizer)

    def announce(self) -> None:
        """Says in the log what runs before the clip, after the noise and after the optimizer's step."""
        if self._spec is not None:
            given = ", ".join(f"{name}={value}" for name, value in self._spec.items() if name != "name")
            logger.info(f"Preconditioner: {self._spec['name']} ({given}).")
        stages = [*self.chain, getattr(self._optimizer, "filter", None), *self.after]
        named = [f"{type(stage).__name__} {_described(stage)}" for stage in stages if stage is not None]
        if named:
            logger.info(f"After the noise: {'; '.join(named)}; optimizer {type(self._optimizer).__name__}.")

    def save(self, folder: str | Path) -> None:
        """Writes the state of both; nothing if there is none."""
        state = self._state()
        if any(state.values()):
            torch.save(state, Path(folder) / RELEASED_STATE)

    def load(self, folder: str | Path) -> None:
        """Continues from a checkpoint, bit for bit.

        Raises:
            DPConfigError: if the state of a stage is missing there, or belongs to another one.
        """
        missing = []
        if isinstance(self._optimizer, NoiseAwareOptimizer) and not (Path(folder) / OPTIMIZER_STATE).exists():
            missing.append(OPTIMIZER_STATE)
        path = Path(folder) / RELEASED_STATE
        if any(self._state().values()) and not path.exists():
            missing.append(RELEASED_STATE)
        if missing:
            raise DPConfigError(
                f"{folder} has no {' and no '.join(missing)}: what the preconditioner, the filters or the optimizer "
                "learned from earlier steps is lost, and the run would go on as another one. Resume from a whole "
                "checkpoint (save_only_model=False), or load the weights into a new run."
            )
        if not path.exists():
            return
        state = torch.load(path, map_location="cpu", weights_only=True)
        for place, mine in (("chain", self.chain), ("after", self.after)):
            if len(state[place]) != len(mine):
                raise DPConfigError(
                    f"{path} holds the state of {len(state[place])} stages after the noise, and the run has "
                    f"{len(mine)}. Resume with the options that the run began with."
                )
        self.preclip.load_state_dict(state["preclip"])
        for stage, kept in zip(self.chain + self.after, state["chain"] + state["after"], strict=True):
            stage.load_state_dict(kept)

    def _state(self) -> dict[str, Any]:
        return {
            "preclip": self.preclip.state_dict(),
            "chain": [stage.state_dict() for stage in self.chain],
            "after": [stage.state_dict() for stage in self.after],
        }


def _described(stage: Any) -> str:
    parameters = getattr(stage, "parameters", None)
    return str(parameters()) if callable(parameters) else ""


def tell_noise(level: NoiseLevel | MechanismLevel, *stages: Any) -> None:
    """Gives the noise level to what has a place for it, filters inside of optimizers included."""
    for stage in stages:
        if hasattr(stage, "noise"):
            stage.noise = level
        inner = getattr(stage, "filter", None)
        if inner is not None and hasattr(inner, "noise"):
            inner.noise = level
