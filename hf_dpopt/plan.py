"""The plan of a private run: sampler, sensitivity, noise and event, all built from one frozen config.

Nobody wires these by hand, so what runs and what is accounted for cannot disagree.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any

import dp_accounting

from hf_dpopt.accounting import accountants, events
from hf_dpopt.accounting.calibrate import calibrate_noise_multiplier
from hf_dpopt.clipping import Clipping, make_clipper
from hf_dpopt.config import PrivacyConfig, PrivacyWarning, check_count, check_noise_multiplier
from hf_dpopt.errors import DPConfigError
from hf_dpopt.mechanisms import MECHANISMS, NoiseMechanism
from hf_dpopt.sampling import DEFAULT_SAMPLER, SAMPLERS, Sampler
from hf_dpopt.sampling.base import Steps

LOG_RELATIVE_ERROR = 1e-2  # of the epsilon shown while the run is under way; always on the pessimistic side
MAX_STEPS = 10**6  # end of the search of `max_steps_within`; beyond 1e7 dp_accounting computes huge integers

# Entries of `public_dict` that a resumed run must share with the run it continues.
RESUME_KEYS = (
    "num_examples", "expected_batch_size", "sampler", "clipping", "clipping_norm", "adjacency", "privacy_unit",
    "delta", "noise_multiplier", "noise_mechanism", "is_private",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivacyPlan:
    """Everything public about a private run. Made by `make_plan`; holds no key and nothing that depends on records.

    Formal guarantee: ``num_steps`` steps that draw their batches from ``sampler`` under a secret key, clip with
    ``clipper``, sum, and add the noise of ``mechanism`` at ``clipper.sensitivity(adjacency)``, are together
    ``(epsilon(), delta)``-differentially private under ``adjacency``, whatever is computed from their outputs.

    Attributes:
        config: what was asked for.
        num_examples: records in the dataset; public.
        num_steps: planned optimizer steps; `epsilon` accepts other numbers.
        delta: in (0, 1).
        noise_multiplier: noise stddev / sensitivity (unitless).
        sampler, clipper, mechanism: the stages of the step.
    """

    config: PrivacyConfig
    num_examples: int
    num_steps: int
    delta: float
    noise_multiplier: float
    sampler: Sampler
    clipper: Clipping
    mechanism: NoiseMechanism

    @property
    def adjacency(self) -> str:
        """Which datasets count as neighbours."""
        return self.config.adjacency

    @property
    def unit(self) -> str:
        """What one record is."""
        return self.config.privacy_unit

    @property
    def is_private(self) -> bool:
        """False without noise or with a key that the user fixed; epsilon is then infinite."""
        return self.config.is_private and self.noise_multiplier > 0

    @property
    def event(self) -> dp_accounting.DpEvent:
        """What the planned run releases."""
        return self.event_after(self.num_steps)

    def event_after(self, num_steps: Steps) -> dp_accounting.DpEvent:
        """What that many steps release; a sequence gives the steps of each chain of a run that branched."""
        if not self.is_private and self.sampler.max_participations(num_steps) > 0:
            return dp_accounting.NonPrivateDpEvent()
        return self.sampler.event(events.noise_stddev_over_clip(self.noise_multiplier, self.adjacency), num_steps)

    def epsilon(self, num_steps: Steps | None = None) -> float:
        """Epsilon after that many steps; all planned steps by default.

        Formal guarantee: an upper bound, non-decreasing in the steps. The planned number of steps gets the fine value;
        any other number one that is cheap enough for every log line, and about 1% larger at most.

        Args:
            num_steps: optimizer steps, >= 0. If the run has several chains (it was resumed from an older checkpoint,
                or trained again), the steps of each: for ``fixed_order`` their sum does not tell what they cost.
        """
        planned = self._spent.epsilon
        if num_steps is None or num_steps == self.num_steps:
            return planned
        excess = self.sampler.max_participations(num_steps) - self.sampler.max_participations(self.num_steps)
        if excess == 0:
            return planned
        event = self.event_after(num_steps)
        rough = accountants.epsilon(event, self.delta, self.adjacency, relative_error=LOG_RELATIVE_ERROR).epsilon
        return max(rough, planned) if excess > 0 else min(rough, planned)

    def epsilon_replace_one(self) -> float | None:
        """Epsilon of the planned run, same noise, when one record is swapped for another; None without a proof."""
        if "replace_one" not in self.sampler.adjacencies:
            return None
        try:
            return accountants.epsilon(self.event, self.delta, "replace_one").epsilon
        except DPConfigError:  # a delta at which only RDP works, which is not valid here
            return None

    def max_steps_within(self, epsilon: float, *, after: Sequence[int] = ()) -> int:
        """Largest number t of further steps, in one chain, with ``self.epsilon((*after, t)) <= epsilon``.

        Args:
            epsilon: the budget.
            after: steps of the chains that are already charged.

        Returns:
            At most `MAX_STEPS`; 0 if not even one step more is within the budget.
        """
        low, high = 0, max(1, self.num_steps - sum(after))
        while self.epsilon((*after, high)) <= epsilon:
            low, high = high, 2 * high
            if low >= MAX_STEPS:
                return MAX_STEPS
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.epsilon((*after, middle)) <= epsilon else (low, middle)
        return low

    def public_dict(self) -> dict[str, Any]:
        """The plan as plain JSON values: the entries of `RESUME_KEYS`, and what the run is expected to spend."""
        return {
            "num_examples": self.num_examples,
            "expected_batch_size": self.sampler.expected_batch_size,
            "sampler": self.sampler.parameters(),
            "clipping": self.config.clipping,
            "clipping_norm": self.config.clipping_norm,
            "adjacency": self.adjacency,
            "privacy_unit": self.unit,
            "delta": self.delta,
            "noise_multiplier": self.noise_multiplier,
            "noise_mechanism": self.config.noise_mechanism,
            "is_private": self.is_private,
            "noise_rng": self.config.noise_rng,
            "num_steps": self.num_steps,
            "target_epsilon": self.config.target_epsilon,
            "epsilon": self.epsilon() if math.isfinite(self.epsilon()) else "inf",  # JSON has no infinity
            "accountant": self._spent.accountant,
            "dp_accounting": events.dp_accounting_version(),
        }

    @functools.cached_property
    def _spent(self) -> accountants.Spent:
        return accountants.epsilon(self.event, self.delta, self.adjacency)


def make_plan(
    config: PrivacyConfig, *, num_examples: int, num_steps: int, noise_multiplier: float | None = None
) -> PrivacyPlan:
    """Builds the plan of a run, calibrating the noise where a budget was given.

    Args:
        config: what was asked for.
        num_examples: records in the training set; >= 1. Treated as public.
        num_steps: optimizer steps of the whole run; >= 1.
        noise_multiplier: overrides the config, for a resumed run: the noise its first part had. ``target_epsilon``
            stays the budget, but `PrivacyPlan.epsilon` may then exceed it.

    Raises:
        DPConfigError: for a combination without a privacy proof, or values out of range.

    Warns:
        PrivacyWarning: if delta is larger than 1 / num_examples.
    """
    check_count("num_examples", num_examples)
    check_count("num_steps", num_steps)
    sampler = make_sampler(config, num_examples)
    sampler.check_adjacency(config.adjacency)
    delta = config.target_delta if config.target_delta is not None else default_delta(num_examples)
    if config.target_delta is not None and delta >= 1 / num_examples:
        warnings.warn(
            f"delta={delta} is >= 1/n = {1 / num_examples:.3g}: publishing one record outright would satisfy it. "
            f"Use target_delta <= {default_delta(num_examples)}.",
            PrivacyWarning,
            stacklevel=2,
        )
    if noise_multiplier is None:
        noise_multiplier = config.noise_multiplier
    if noise_multiplier is None:
        noise_multiplier = _calibrate(config, sampler, num_steps, delta)
    check_noise_multiplier(noise_multiplier)
    return PrivacyPlan(
        config=config,
        num_examples=int(num_examples),
        num_steps=int(num_steps),
        delta=delta,
        noise_multiplier=noise_multiplier,
        sampler=sampler,
        clipper=make_clipper(config),
        mechanism=MECHANISMS[config.noise_mechanism](noise_multiplier),
    )


def make_sampler(config: PrivacyConfig, num_examples: int) -> Sampler:
    """The sampler a config names."""
    name = DEFAULT_SAMPLER if config.sampling == "auto" else config.sampling
    return SAMPLERS[name](num_examples=int(num_examples), expected_batch_size=int(config.expected_batch_size))


def default_delta(num_examples: int) -> float:
    """Largest power of ten that is <= 1 / num_examples (0.1 at most): tells the reader the magnitude of n, not n."""
    return float(f"1e-{max(1, len(str(num_examples - 1)))}")


def _calibrate(config: PrivacyConfig, sampler: Sampler, num_steps: int, delta: float) -> float:
    def epsilon_at(noise_multiplier: float, relative_error: float) -> float:
        stddev = events.noise_stddev_over_clip(noise_multiplier, config.adjacency)
        event = sampler.event(stddev, num_steps)
        return accountants.epsilon(event, delta, config.adjacency, relative_error=relative_error).epsilon

    assert config.target_epsilon is not None
    return calibrate_noise_multiplier(epsilon_at, config.target_epsilon)
