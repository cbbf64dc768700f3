"""One private run through `DPTrainer`, its learning rate, and the file that keeps what was run.

Keys are fresh in every run: a seed fixes the first weights alone, so runs of one seed are not pairs.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from transformers import TrainerCallback

from hf_dpopt import DPTrainer, DPTrainingArguments, make_plan
from hf_dpopt.huggingface.inputs import TrainerInputs
from hf_dpopt.huggingface.workload import workload_of
from hf_dpopt.plan.compare import predicted_errors, ranked
from recipes.paper.federated.task import COLLATE, USER, Task, evaluate
from recipes.paper.runs import KeptRuns, best_of, climb, is_point, labelled

TUNING_SEED = 1000
CURVE_RECORDS = 2000
MOMENTUM, COOLDOWN = 0.95, 0.25
MECHANISMS: dict[str, dict[str, Any]] = {
    "DP-SGD": {"noise_mechanism": "gaussian", "sampling": "poisson"},
    "Honaker": {"noise_mechanism": "honaker"},
    "nu-DP-FTRL": {"noise_mechanism": "nu_dpftrl"},
    "BLT": {"noise_mechanism": "blt"},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """All that a result depends on, data and model aside.

    Args:
        mechanism: a key of `MECHANISMS`.
        epsilon: None for no noise at all.
        rate: of the server.
        users: in a round.
    """

    mechanism: str
    epsilon: float | None
    rate: float
    seed: int
    num_rounds: int = 320
    users: int = 64
    clipping_norm: float = 1.0
    local_rate: float = 0.5
    local_batch: int = 4
    records_per_user: int = 16
    delta: float = 1e-5

    def arguments(self, folder: Path) -> DPTrainingArguments:
        budget = {"target_epsilon": self.epsilon} if self.epsilon else {"noise_multiplier": 0.0}
        return DPTrainingArguments(
            output_dir=str(folder / "out"),
            private_state_dir=str(folder / "private"),
            privacy_unit="user",
            user_id_column=USER,
            records_per_user=self.records_per_user,
            expected_batch_size=self.users,
            clipping_norm=self.clipping_norm,
            target_delta=self.delta,
            local_training={"learning_rate": self.local_rate, "batch_size": self.local_batch},
            optim="sgd",
            optim_args=f"momentum={MOMENTUM}",
            learning_rate=self.rate,
            lr_scheduler_type="warmup_stable_decay",
            lr_scheduler_kwargs={
                "num_decay_steps": round(COOLDOWN * self.num_rounds), "decay_type": "linear", "min_lr_ratio": 0.05,
            },
            max_steps=self.num_rounds,
            seed=self.seed,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            remove_unused_columns=False,
            eval_data_privacy="public",
            **MECHANISMS[self.mechanism],
            **budget,
        )  # fmt: skip


class _Curve(TrainerCallback):
    """Validation accuracy along the way."""

    def __init__(self, run: Run, task: Task):
        self._run, self._task, self.points = run, task, list[tuple[int, float]]()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if is_point(step := state.global_step, self._run.num_rounds):
            self.points.append((step, evaluate(model, self._task.validation, CURVE_RECORDS)["accuracy"]))


def train(run: Run, task: Task) -> dict[str, Any]:
    """Trains once.

    Returns:
        Metrics of `word_metrics` before and after on the test users, after on the validation users, the curve of
        (round, validation accuracy), what the plan says of the noise, seconds.
    """
    began = time.perf_counter()
    model = task.model(run.seed)
    before = evaluate(model, task.test)
    curve = _Curve(run, task)
    with TemporaryDirectory() as folder:
        trainer = DPTrainer(
            model=model,
            args=run.arguments(Path(folder)),
            train_dataset=task.train,
            data_collator=COLLATE,
            callbacks=[curve],
        )
        trainer.train()
        plan, spent = trainer.plan, trainer.privacy_spent().epsilon if run.epsilon else None
    assert plan is not None
    return {
        "before": before,
        "test": evaluate(model, task.test),
        "validation": evaluate(model, task.validation),
        "curve": curve.points,
        "epsilon_spent": spent,
        "adjacency": plan.adjacency,
        "noise_multiplier": plan.noise_multiplier,
        "sampler": plan.sampler.parameters(),
        "participation": str(plan.sampler.participation(run.num_rounds)) if run.mechanism != "DP-SGD" else None,
        "strategy": plan.strategy.parameters(),
        "seconds": round(time.perf_counter() - began, 1),
    }


def predicted(run: Run, num_users: int) -> dict[str, float] | None:
    """What is known before training: the noise of a step, and the errors of the iterates for optimizer and schedule.

    Returns:
        In clipping norms, errors times the learning rate: of all iterates, and of the last; None without noise.
    """
    if run.epsilon is None:
        return None
    with TemporaryDirectory() as folder:
        args = run.arguments(Path(folder))
    workload = workload_of(TrainerInputs(args=args), run.num_rounds)
    plan = make_plan(
        args.privacy_config(run.users), num_examples=num_users, num_steps=run.num_rounds, workload=workload
    )
    (row,) = ranked([plan], workload)
    last = float(predicted_errors(plan, workload)[-1])
    return {"step_stddev": row.step_stddev, "rmse": row.rmse, "last": last}


class Runs(KeptRuns):
    """Runs on one task."""

    def __init__(self, path: Path, task: Task):
        super().__init__(path, lambda run: train(run, task))
        self._num_users = task.num_users

    def cell(self, run: Run, num_seeds: int) -> dict[str, Any]:
        """The rate with the best validation accuracy on `TUNING_SEED`, then metrics of the test users at that rate.

        Args:
            run: its rate is where the search begins, its seed is not used.
        """

        def score(rate: float) -> float:
            return self.result(dataclasses.replace(run, rate=rate, seed=TUNING_SEED))["validation"]["accuracy"]

        tried = climb(score, run.rate)
        best = best_of(tried)
        results = self.of_seeds(dataclasses.replace(run, rate=best), range(num_seeds))
        kept = ("epsilon_spent", "adjacency", "noise_multiplier", "sampler", "participation", "strategy")
        return {
            "mechanism": run.mechanism,
            "epsilon": run.epsilon,
            **{name: results[0][name] for name in kept},
            "predicted": predicted(run, self._num_users),
            "rate": best,
            "tried": labelled(tried),
            **{name: [result["test"][name] for result in results] for name in results[0]["test"]},
            "curves": [result["curve"] for result in results],
            "seconds_per_run": float(np.mean([result["seconds"] for result in results])),
        }
