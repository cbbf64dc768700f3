"""Scores of canaries: how much likelier what was released is with the canary than without it.

The order of the records is known where the proof does not rest on a secret (`fixed_order`); else the score averages
the likelihood over what the sampler may have drawn, as the best attack does.
"""

from __future__ import annotations

import numpy as np
from scipy import special

from hf_dpopt.audit.law import Whitened


def log_likelihood_ratios(whitened: Whitened) -> np.ndarray:
    """Log of P[released | canary in] / P[released | canary left out], (M,); independent from canary to canary.

    Truncated Poisson sampling is scored as Poisson sampling: caps are seven standard deviations away.
    """
    sampler, seen_TM = whitened.plan.sampler, whitened.canaries_TM
    num_steps = len(seen_TM)
    if sampler.name == "fixed_order":
        return _log_ratio(seen_TM, whitened.moved_TM)
    if sampler.name == "balls_in_bins":
        num_bins = sampler.steps_per_epoch
        steps = np.arange(1, num_steps + 1) % num_bins
        moved = [whitened.columns[:, steps == b].sum(axis=1)[:, None] for b in range(num_bins)]
        return _log_mean([_log_ratio(seen_TM, m) for m in moved])
    rate = float(getattr(sampler, "group_rate", sampler.sample_rate))
    num_groups = int(getattr(sampler, "num_groups", 1))
    # columns of steps of one group are orthogonal: what such a canary adds factors over the steps
    each = [_log_mixed(_log_ratio(seen_TM, whitened.columns[:, [t]]), rate) for t in range(num_steps)]
    steps = np.arange(1, num_steps + 1) % num_groups
    return _log_mean([np.sum([each[t] for t in np.flatnonzero(steps == g)], axis=0) for g in range(num_groups)])


def _log_ratio(seen_TM: np.ndarray, moved_TM: np.ndarray) -> np.ndarray:
    ratio: np.ndarray = (seen_TM * moved_TM).sum(axis=0) - np.square(moved_TM).sum(axis=0) / 2
    return ratio


def _log_mixed(log_ratio_M: np.ndarray, rate: float) -> np.ndarray:
    """Log of ``1 - rate + rate e^x``."""
    if rate >= 1:
        return log_ratio_M
    found: np.ndarray = np.logaddexp(np.log1p(-rate), np.log(rate) + log_ratio_M)
    return found


def _log_mean(ratios: list[np.ndarray]) -> np.ndarray:
    found: np.ndarray = special.logsumexp(np.stack(ratios), axis=0) - np.log(len(ratios))
    return found
