"""The share of a budget that each of a random number of runs has by itself."""

from __future__ import annotations

import functools

from dp_accounting import GaussianDpEvent

from hf_dpopt.accounting import accountants
from hf_dpopt.accounting.best_of_runs import RunCount
from hf_dpopt.accounting.calibrate import calibrate_noise_multiplier


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
