"""An audit from end to end: canaries through the real trainer, tests of the noise, and a lower bound on epsilon."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy import special

from hf_dpopt.audit.bounds import lower_bounds
from hf_dpopt.audit.law import Finding, Whitened, test_all
from hf_dpopt.audit.observe import Observation, observe
from hf_dpopt.common.collectives import current_ranks
from hf_dpopt.common.errors import DPConfigError

FALSE_ALARM = 5e-7  # probability with which an exact implementation fails
QUOTED = "independent"  # the bound of the verdict, fixed beforehand: the larger of two would be wrong more often
CLAIM = "the bound is below the claim"
FEWEST, MOST = 20, 100_000  # canaries


@dataclasses.dataclass(frozen=True)
class Audit:
    """The findings of an audit.

    Attributes:
        claimed_epsilon: what the run says it spent.
        delta: failure probability of the claim, and of the bounds.
        bounds: lower bounds on epsilon, by method; see `hf_dpopt.audit.bounds`.
        findings: tests, in the order in which they were made.
        significance: probability with which each of the bounds may be too high.
        setting: what was audited, JSON-able.
        scores: log likelihood ratio of each canary, (M,).
        included: whether each took part, (M,).
    """

    claimed_epsilon: float
    delta: float
    bounds: Mapping[str, float]
    findings: tuple[Finding, ...]
    significance: float
    setting: Mapping[str, Any]
    scores: np.ndarray = dataclasses.field(repr=False)
    included: np.ndarray = dataclasses.field(repr=False)

    @property
    def has_passed(self) -> bool:
        """Whether no test failed."""
        return all(finding.has_passed for finding in self.findings)

    @property
    def verdict(self) -> str:
        """The outcome, in one line."""
        failed = ", ".join(finding.name for finding in self.findings if not finding.has_passed)
        if failed:
            return f"FAILED: {failed}. Do not trust the epsilon of this installation; report it with this output."
        bound = self.bounds[QUOTED]
        found = f"passed: epsilon is at least {bound:.2f} ({QUOTED}, confidence {1 - self.significance:.0%})"
        if bound > self.claimed_epsilon:
            found += f", where {self.claimed_epsilon:.4g} is claimed: chance, unless it happens again and again."
            return found
        return f"{found}, {self.claimed_epsilon:.4g} is claimed. What no test found is not shown to be absent."

    def public_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "verdict": self.verdict,
            "passed": self.has_passed,
            "claimed_epsilon": self.claimed_epsilon,
            "delta": self.delta,
            "lower_bounds": dict(self.bounds),
            "confidence": 1 - self.significance,
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
            "setting": dict(self.setting),
        }


def audit(
    settings: Mapping[str, Any] | None = None,
    *,
    num_canaries: int = 1000,
    num_steps: int = 32,
    num_quiet: int = 8000,
    significance: float = 0.05,
) -> Audit:
    """Train canaries with the real trainer on a CPU or the device at hand, and look at everything it releases.

    Args:
        settings: options of `DPTrainingArguments` that say what to audit: `target_epsilon`, `target_delta`,
            `noise_mechanism`, `noise_kwargs`, `sampling`, `expected_batch_size`, `privacy_unit`, `clipping_norm` ..
        num_canaries: M; each is one record (or user) with a coordinate of its own.
        num_steps: T.
        num_quiet: coordinates of a second tensor, which no record moves.
        significance: probability with which a lower bound may be too high.

    Returns:
        The findings. With several processes, on each of them, about the one run they made together.

    Raises:
        DPConfigError: for settings that the trainer refuses or that the audit cannot follow.
    """
    if not FEWEST <= num_canaries <= MOST:
        raise DPConfigError(f"num_canaries={num_canaries} makes no audit. Use {FEWEST} to {MOST}.")
    settings = {"target_epsilon": 4.0, "target_delta": 1e-5} | dict(settings or {})
    if settings.get("noise_multiplier") is not None:
        settings.pop("target_epsilon")
    settings.setdefault("expected_batch_size", max(1, num_canaries // 4))
    settings.setdefault("per_device_train_batch_size", min(256, settings["expected_batch_size"]))
    with tempfile.TemporaryDirectory(prefix="audit-") as folder:
        place = current_ranks().same(lambda: folder)
        found = observe(settings, Path(place), num_canaries=num_canaries, num_quiet=num_quiet, num_steps=num_steps)
        current_ranks().same(lambda: None)  # the folder is that of rank 0: nobody leaves before all are done
    return judge(found, settings | {"num_canaries": num_canaries, "num_steps": num_steps}, significance=significance)


def judge(observation: Observation, setting: Mapping[str, Any], *, significance: float = 0.05) -> Audit:
    """Test what was observed, and bound epsilon from below."""
    whitened, plan = Whitened(observation), observation.plan
    scores = log_likelihood_ratios(whitened)
    scored = (scores, observation.included)
    surely = lower_bounds(*scored, delta=plan.delta, significance=FALSE_ALARM / 2)["one_run"]
    is_below, words = surely <= observation.epsilon, f"{surely:.3g}, surely, of {observation.epsilon:.4g}"
    claim = Finding(CLAIM, is_below, words, 1.0 if is_below else FALSE_ALARM / 2)
    return Audit(
        claimed_epsilon=observation.epsilon,
        delta=plan.delta,
        bounds=lower_bounds(*scored, delta=plan.delta, significance=significance, threshold=0.0),
        findings=(*test_all(observation, FALSE_ALARM / 2), claim),
        significance=significance,
        setting=json.loads(json.dumps(dict(setting), default=str))
        | {"sampling": plan.sampler.name, "noise_mechanism": plan.config.noise_mechanism, "adjacency": plan.adjacency},
        scores=scores,
        included=observation.included,
    )


# --- scores of canaries: how much likelier what was released is with the canary than without it ---


def log_likelihood_ratios(whitened: Whitened) -> np.ndarray:
    """Log of P[released | canary in] / P[released | canary left out], (M,); independent from canary to canary.

    The order of the records is known where the proof does not rest on a secret (`fixed_order`); else the score
    averages the likelihood over what the sampler may have drawn, as the best attack does. Truncated Poisson sampling
    is scored as Poisson sampling: caps are seven standard deviations away.
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
