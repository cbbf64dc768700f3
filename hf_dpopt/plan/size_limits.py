"""Bounds on what is computed for a plan; beyond them numbers are not exact, or planning takes hours or all memory.

They are far above what runs have. A run that needs more can be planned in parts, as each message says.
"""

from __future__ import annotations

import math
import warnings

from hf_dpopt.accounting.profile import no_protection
from hf_dpopt.common.checks import check_at_most, check_count, check_real
from hf_dpopt.common.errors import DPConfigError, PrivacyWarning

MAX_STEPS = 10**7  # beyond, dp_accounting computes with whole numbers of as many digits
MAX_UNITS = 10**10  # records or users; the draws of a step are of this many
SMALLEST_EPSILON, LARGEST_EPSILON = 1e-4, 1e6


def check_sizes(num_examples: int, num_steps: int) -> None:
    """Refuse sizes of a run that are no counts, or that no plan can be computed for."""
    check_count("num_examples", num_examples)
    check_count("num_steps", num_steps)
    check_at_most("num_examples", num_examples, MAX_UNITS, "a step's batch is drawn from all of them. Take a sample.")
    check_at_most(
        "num_steps", num_steps, MAX_STEPS,
        "epsilon of so many cannot be computed. Use fewer steps or epochs, or larger batches.",
    )  # fmt: skip


def steps_of(epochs: float, num_examples: int, batch_size: int) -> int:
    """Optimizer steps of so many epochs, as the Trainer counts them.

    Args:
        epochs: passes over the data; finite, > 0.
        num_examples, batch_size: the dataset, and the records of a step on average.

    Raises:
        DPConfigError: for more than `MAX_STEPS`.
    """
    check_count("expected_batch_size", batch_size)
    per_epoch = -(-num_examples // batch_size)
    if not epochs * float(per_epoch) <= MAX_STEPS:
        raise DPConfigError(
            f"{epochs:g} epochs of {per_epoch:,} steps are more than {MAX_STEPS:,} steps, and epsilon of so many "
            "cannot be computed. Use fewer epochs, or larger batches."
        )
    return math.ceil(epochs * per_epoch)


def check_budget(epsilon: float | None, delta: float | None = None) -> None:
    """Refuse budgets that no noise can be calibrated to, and warn of those that do not protect.

    The bound on delta is in `accounting.delta`.
    """
    if epsilon is not None:
        check_real("target_epsilon", epsilon, "a finite number > 0; 1 to 8 is usual for finetuning")
        if not SMALLEST_EPSILON <= epsilon <= LARGEST_EPSILON:
            raise DPConfigError(
                f"target_epsilon={epsilon:g} is outside {SMALLEST_EPSILON:g} to {LARGEST_EPSILON:g}, for which noise "
                "can be calibrated. Use a finite number > 0; 1 to 8 is usual. noise_multiplier sets the noise itself."
            )
        if said := no_protection(epsilon):
            warnings.warn(said, PrivacyWarning, stacklevel=2)
    check_delta(delta)


def check_delta(delta: float | None) -> None:
    """Refuse what is no delta; None stands for the default."""
    if delta is not None:
        check_real("target_delta", delta, "a number in (0, 1), at most 1 / number of records")
        if not 0 < delta < 1:
            raise DPConfigError(
                f"target_delta={delta} is outside (0, 1). Use at most 1 / number of records, or leave it out to get a "
                "tenth of that, rounded down to one digit."
            )
