"""A run as `PrivateRun` opens it, step by step and without a model; and one in one's own loop, without records."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_dpopt import PrivacyConfig, PrivateRun, make_plan
from hf_dpopt.clipping import make_engine
from hf_dpopt.common.types import ClippedSums
from hf_dpopt.plan.plan import PrivacyPlan
from hf_dpopt.run.checkpoint import Manifest, clean
from hf_dpopt.run.keys import Chain, new_chain, private_dir
from hf_dpopt.run.resume import Resume, decide
from hf_dpopt.run.run_log import RunLog

PLAN: dict[str, Any] = {"noise_multiplier": 0.7, "sizes": (1, 2), "num_steps": 198, "target_epsilon": 8.0}


@dataclasses.dataclass
class Run:
    """One call to `train`.

    Args:
        resume_step: step of the checkpoint; None begins anew.
        chain_id: chain that the checkpoint was made under; None if the caller answers for its origin.
    """

    out: Path
    private: Path
    resume_step: int | None = None
    chain_id: str | None = None
    plan: dict[str, Any] = dataclasses.field(default_factory=PLAN.copy)

    def __post_init__(self) -> None:
        self.out.mkdir(exist_ok=True)
        self.log = RunLog.open(self.out, private_dir(self.private, self.out))
        try:
            step, name = self.resume_step, self.chain_id
            manifest = None if name is None or step is None else Manifest(self.log.state.run, name, step, {})
            self.resume: Resume = decide(self.log.state, self.log.keys, self.out, step=step, manifest=manifest)
            clean(self.out, self.log.state)
            self.log.record_plan(self.plan, must_match=("noise_multiplier", "sizes"))
            self.chain = self._chain()
        except BaseException:
            self.close()
            raise
        self.step = self.resume.reached

    def _chain(self) -> Chain:
        if self.resume.chain is not None:
            kept = self.log.keys.load(self.resume.chain.chain_id)
            assert kept is not None
            return kept
        chain = new_chain()
        self.log.start_chain(chain, self.resume.reached, self.resume.note)
        return chain

    def steps(self, num: int) -> list[tuple[bytes, int]]:
        """Charge that many steps; return what was used then."""
        used = []
        for _ in range(num):
            self.step += 1
            self.log.charge(self.chain.chain_id, self.step)
            used.append((self.chain.noise_key, self.step))
        return used

    @property
    def charged(self) -> tuple[int, ...]:
        return self.log.state.charged

    def close(self) -> None:
        self.log.close()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def settle(out: Path, private: Path) -> None:
    """Do what the next run does first: remove what killed runs left, and finish whole saves."""
    with RunLog.open(out, private_dir(private, out)) as log:
        clean(out, log.state)


# --- in one's own loop ---

NUM_STEPS, EXPECTED, SIZE = 6, 4, 20


def plan_of(**options: Any) -> PrivacyPlan:
    values = dict(noise_multiplier=1.0, target_delta=1e-3, expected_batch_size=EXPECTED)
    return make_plan(PrivacyConfig(**values | options), num_examples=40, num_steps=NUM_STEPS)


def begin(plan: PrivacyPlan, folder: Path, **options: Any) -> PrivateRun:
    return PrivateRun(plan, output_dir=folder / "out", private_state_dir=folder / "keys", **options)


def release(run: PrivateRun, step: int) -> torch.Tensor:
    """The noise of a step, as it is released: that of a sum without records."""
    run.begin(step, make_engine(nn.Linear(1, 1), run.plan.clipper))
    return run.release(ClippedSums({"weight": torch.zeros(SIZE)}), step)["weight"]
