"""Plans of tuning: what each of a random number of runs gets of a budget, and what that leaves of its steps.

The number of runs is paid for in noise, whatever it turns out to be. So whether tuning pays is a question that can be
asked beforehand: the best of so many runs with more noise, or one run with the advised options and less.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from dp_accounting import GaussianDpEvent

from hf_dpopt.accounting import accountants
from hf_dpopt.accounting.calibrate import calibrate_noise_multiplier
from hf_dpopt.accounting.selection import RunCount
from hf_dpopt.plan.choose import make_plan
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.plan.outlook import Kind, Outlook, outlook_of
from hf_dpopt.plan.plan import PrivacyPlan

MEANS = (2.0, 5.0, 10.0, 30.0, 100.0)
SHAPES = (0.0, 1.0, math.inf)


@dataclasses.dataclass(frozen=True)
class TuningPlan:
    """Plan of the best of a random number of runs, beside that of one run at the same budget.

    Attributes:
        count: law of the number of runs.
        run: plan of each of them; its `epsilon` is that of the tuning, its `run_epsilon` its own.
        single: plan of one run that spends the whole budget.
        kind: what is trained, see `hf_dpopt.plan.outlook`.
    """

    count: RunCount
    run: PrivacyPlan
    single: PrivacyPlan
    kind: Kind

    @property
    def noise_ratio(self) -> float:
        """Noise of a run / noise of a single run at the budget."""
        return self.run.noise_multiplier / self.single.noise_multiplier

    @property
    def outlooks(self) -> tuple[Outlook, Outlook]:
        """Outlook of a run, and of the single one."""
        return outlook_of(self.run, self.kind), outlook_of(self.single, self.kind)

    @property
    def steps_kept(self) -> float:
        """Share of the single run's steps' worth without noise that is left to each run."""
        run, single = self.outlooks
        return run.useful_steps / single.useful_steps

    def public_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        run, single = self.outlooks
        return {
            **self.count.public_dict(),
            "probability_of_one_run": self.count.probability(1),
            "epsilon": self.run.epsilon(),
            "delta": self.run.delta,
            "accountant": self.run.spent.accountant,
            "run_epsilon": self.run.run_epsilon,
            "noise_multiplier": self.run.noise_multiplier,
            "noise_ratio": self.noise_ratio,
            "useful_steps": run.useful_steps,
            "useful_steps_of_one_run": single.useful_steps,
        }


def plan_tunings(
    config: PrivacyConfig,
    *,
    num_examples: int,
    num_steps: int,
    means: Sequence[float] = MEANS,
    shapes: Sequence[float] = SHAPES,
    kind: Kind = "lora",
) -> Iterator[TuningPlan]:
    """Plan tunings of one run at one budget, for every mean and every shape of the number of runs.

    Args:
        config: a run with a `target_epsilon`, which is that of the whole tuning.
        num_examples, num_steps: see `make_plan`.
        means, shapes: laws of the number of runs, see `RunCount`.
        kind: what is trained.
    """
    laws = [RunCount(mean=mean, shape=shape) for shape in shapes for mean in means]
    single = make_plan(
        dataclasses.replace(config, tuned_runs=None, tuned_shape=1.0), **_sizes(num_examples, num_steps)
    )
    for law in laws:
        asked = dataclasses.replace(config, tuned_runs=law.mean, tuned_shape=law.shape)
        yield TuningPlan(law, make_plan(asked, **_sizes(num_examples, num_steps)), single, kind)


def _sizes(num_examples: int, num_steps: int) -> dict[str, Any]:
    return {"num_examples": num_examples, "num_steps": num_steps}


@functools.lru_cache(maxsize=64)
def share_of_a_run(count: RunCount, target_epsilon: float, delta: float) -> float:
    """Estimate the epsilon of each run by itself where the best of them may spend `target_epsilon`.

    That of a Gaussian mechanism; a sampled one differs by some percent. For advice, never for a claim.
    """

    def tuned(noise: float, relative_error: float) -> float:
        event = count.event(GaussianDpEvent(noise))
        return accountants.epsilon(event, delta, "add_or_remove_one", relative_error=relative_error).epsilon

    noise = calibrate_noise_multiplier(tuned, target_epsilon)
    return accountants.epsilon(GaussianDpEvent(noise), delta, "add_or_remove_one").epsilon
