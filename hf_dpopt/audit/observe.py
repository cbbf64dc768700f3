"""Train the canaries with the real trainer, and read from the weights what it released.

Shape legend: T = steps, M = canaries, Q = coordinates that no record moves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hf_dpopt.audit.canaries import QUIET, ROWS, Canaries, collate, losses, records
from hf_dpopt.common.collectives import current_ranks
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.log import logger
from hf_dpopt.huggingface.arguments import DPTrainingArguments
from hf_dpopt.huggingface.trainer import DPTrainer
from hf_dpopt.noise.registry import is_independent
from hf_dpopt.plan.plan import PrivacyPlan

OWN = {
    "learning_rate": 1.0,
    "lr_scheduler_type": "constant",
    "optim": "sgd",
    "weight_decay": 0.0,
    "save_strategy": "no",
    "logging_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "remove_unused_columns": False,
    "advisor": "none",
    "log_level": "error",
}


@dataclasses.dataclass(frozen=True)
class Observation:
    """The view of an auditor with every released value, and the order of records where the proof allows it.

    Attributes:
        plan: plan of the run.
        epsilon: what the run says it spent, at ``plan.delta``.
        included: whether a canary took part, (M,), bool.
        drawn_TM: whether the sampler drew it in a step, left out or not.
        canaries_TM: released values at its coordinate, in clips: the mean gradient times the expected batch size.
        quiet_TQ: released values where no record has a gradient, by tensor.
    """

    plan: PrivacyPlan
    epsilon: float
    included: np.ndarray
    drawn_TM: np.ndarray
    canaries_TM: np.ndarray
    quiet_TQ: Mapping[str, np.ndarray]


class _AuditedTrainer(DPTrainer):
    """The trainer, which keeps a copy of the weights between its steps, and what its sampler drew."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.weights = [_weights(self.model)]
        self.drawn: list[np.ndarray] = []
        self.gains: list[float | None] = []

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        step, run = self.state.global_step, self._training.run
        if len(self.weights) == step:  # the end of an epoch comes here a second time
            self.weights.append(_weights(self.model))
            self.drawn.append(run.plan.sampler.draw(run.chain.sampling_key, step))
            self.gains.append(run.preclip.gain)
        super()._maybe_log_save_evaluate(*args, **kwargs)


def _weights(model: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: p.detach().cpu().double().numpy().copy() for name, p in model.named_parameters()}


def observe(
    settings: Mapping[str, Any], folder: Path, *, num_canaries: int, num_quiet: int, num_steps: int
) -> Observation:
    """Train canaries, each of which takes part with probability 1/2, and look at what comes out.

    Args:
        settings: options of `DPTrainingArguments`: noise, sampling, batch, budget, unit.
        folder: empty; the run writes here.
        num_canaries: M.
        num_quiet: coordinates of the layer that no record moves.
        num_steps: T.

    Raises:
        DPConfigError: for settings that the trainer refuses, or under which the weights do not tell what was released.
    """
    taken = sorted(set(settings) & (set(OWN) | {"max_steps", "num_train_epochs"}))
    if taken:
        raise DPConfigError(f"{', '.join(taken)}: the audit sets this itself. Leave it out.")
    if settings.get("preconditioner", "none") != "none" and not is_independent(
        settings.get("noise_mechanism", "gaussian")
    ):
        raise DPConfigError(
            "Correlated noise under a preconditioner may begin anew or go on where the scale changes, and the audit "
            "does not follow it. Audit one of the two at a time."
        )
    if settings.get("sampling") == "capped_poisson":
        raise DPConfigError(
            "sampling=capped_poisson draws the records of a user one by one, and the audit follows whole users. Audit "
            "with --sampling poisson, or records."
        )
    is_users = settings.get("privacy_unit") == "user"
    options: dict[str, Any] = OWN | dict(settings) | {"max_steps": num_steps, "output_dir": str(folder / "run")}
    options.setdefault("private_state_dir", str(folder / "keys"))
    if is_users:
        options |= {"user_id_column": "user"}
        options.setdefault("records_per_user", 2)
    with _quiet():
        args = DPTrainingArguments(**options)
        included = current_ranks().same(lambda: np.frombuffer(os.urandom(num_canaries), np.uint8) % 2 == 1)
        trainer = _AuditedTrainer(
            model=Canaries(len(included), num_quiet),
            args=args,
            train_dataset=records(included.tolist(), per_user=options["records_per_user"] if is_users else None),
            data_collator=collate,
            per_example_loss_func=losses,
        )
        trainer.train()
    return _observation(trainer, included)


def _observation(trainer: _AuditedTrainer, included: np.ndarray) -> Observation:
    plan, weights = trainer.plan, trainer.weights
    assert plan is not None
    # a step subtracts the mean, which is the noisy sum over the expected batch size
    to_clips = plan.sampler.expected_batch_size / plan.clipper.clipping_norm
    if None in trainer.gains or 0.0 in trainer.gains:
        raise DPConfigError(
            "This preconditioner divides what was released, coordinate by coordinate, and the weights do not tell by "
            "how much. The audit follows those that keep the coordinates of the clip, as dp2_rmsprop does by default."
        )
    steps = zip(itertools.pairwise(weights), trainer.gains, strict=True)
    each = [{name: (old[name] - new[name]) / gain for name in old} for (old, new), gain in steps if gain]
    released = {name: to_clips * np.stack([step[name] for step in each]) for name in weights[0]}
    rows_TMD, quiet = released[ROWS], released[QUIET]
    drawn_TM = np.zeros(rows_TMD.shape[:2], dtype=bool)
    for t, units in enumerate(trainer.drawn):
        drawn_TM[t, units] = True
    others = {ROWS: rows_TMD[:, :, 1:], QUIET: quiet}
    return Observation(
        plan=plan,
        epsilon=trainer.privacy_spent().epsilon,
        included=included,
        drawn_TM=drawn_TM,
        canaries_TM=rows_TMD[:, :, 0],
        quiet_TQ={name: values.reshape(len(values), -1) for name, values in others.items()},
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what a run of canaries says: advice for real models, and a line of speeds."""
    before, logger.disabled = logger.disabled, True
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.disabled = before
