"""Ways to train on users, compared for given compute and budget: whole users, their records, or local training.

At the same number of record gradients in a step, and with records of clipping norm C:

* user-level sampling: M = B / G users, noise ``sigma C_u / M`` in the mean. The gradient of a user is a mean over G
  records; its norm lies between C (their gradients are alike) and C / sqrt(G) (they point anywhere), and so does the
  clipping norm C_u that fits;
* example-level sampling: B records, noise ``sigma' C / B``, where sigma' has to cover several records of one user.

So there is a norm ``C_u`` up to which users are better, and the planner says it. Local training has the noise of
user-level sampling relative to what it clips, and moves as many times as far as it has steps in a round.

Charles et al. (2024), arXiv:2407.07737, Section 4 (the comparison at equal compute).
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any

from hf_dpopt.common.checks import check_count
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.plan.choose import make_plan
from hf_dpopt.plan.config import PrivacyConfig, PrivacyWarning
from hf_dpopt.plan.plan import PrivacyPlan


@dataclasses.dataclass(frozen=True)
class UserPlans:
    """Both plans at the same budget, steps and record gradients.

    Attributes:
        by_users: users are sampled.
        by_records: records are sampled.
        records_per_user: G.
    """

    by_users: PrivacyPlan
    by_records: PrivacyPlan
    records_per_user: int

    @property
    def noise_by_users(self) -> float:
        """Stddev of the noise in the mean gradient / the clipping norm of a user."""
        return _noise(self.by_users)

    @property
    def noise_by_records(self) -> float:
        """Stddev of the noise in the mean gradient / the clipping norm of a record."""
        return _noise(self.by_records)

    @property
    def break_even(self) -> float:
        """Clipping norm of a user / that of a record at which both have the same noise."""
        return self.noise_by_records / self.noise_by_users

    def advice(self) -> str:
        """One line: which way is predicted better."""
        alike, apart = 1.0, 1 / math.sqrt(self.records_per_user)
        if self.break_even >= alike:
            which = "user-level sampling, however alike a user's records are"
        elif self.break_even <= apart:
            which = "example-level sampling (--sampling capped_poisson), however different a user's records are"
        else:
            which = (
                f"user-level sampling if the mean gradient of a user's {self.records_per_user} records is shorter "
                f"than {self.break_even:.2f} times that of a record (it is {apart:.2f} if they have nothing in "
                "common, 1 if they are alike), else example-level sampling (--sampling capped_poisson)"
            )
        return (
            f"Predicted better: {which}. Local training (--local_training) has the relative noise of user-level "
            "sampling and moves further in a round: for few rounds and cheap local steps."
        )


def plan_for_users(
    config: PrivacyConfig, *, num_users: int, records_per_user: int, records_per_step: int, num_steps: int
) -> UserPlans:
    """Plans for users at equal compute.

    Args:
        config: a budget, and what both have in common; batch size, unit and sampling are replaced.
        num_users: users in the training set.
        records_per_user: G, that take part; users are taken to have so many.
        records_per_step: B, gradients of records in a step.
        num_steps: length of the run.

    Raises:
        DPConfigError: without a budget, or for more users or records in a step than there are.
    """
    check_count("num_users", num_users)
    check_count("records_per_user", records_per_user)
    check_count("records_per_step", records_per_step)
    if config.target_epsilon is None:
        raise DPConfigError(
            "Ways to train are compared at the same budget: give target_epsilon, not noise_multiplier."
        )
    common: dict[str, Any] = dict(privacy_unit="user", records_per_user=records_per_user)
    by_users = dataclasses.replace(
        config, sampling="auto", expected_batch_size=max(1, round(records_per_step / records_per_user)), **common
    )
    by_records = dataclasses.replace(
        config, sampling="capped_poisson", noise_mechanism="gaussian", noise_kwargs={}, noise_restart_every=None,
        expected_batch_size=records_per_step, **common,
    )  # fmt: skip
    users = make_plan(by_users, num_examples=num_users, num_steps=num_steps)
    by_records = dataclasses.replace(by_records, target_delta=users.delta)  # of users, not of records
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrivacyWarning)  # said above, of the same users
        records = make_plan(by_records, num_examples=num_users * records_per_user, num_steps=num_steps)
    return UserPlans(users, records, records_per_user)


def _noise(plan: PrivacyPlan) -> float:
    per_clip = plan.sensitivity / plan.clipper.clipping_norm
    return plan.draw_stddev * per_clip / plan.config.expected_batch_size
