"""The plan of a private run: what it releases, and the stages that release it, all built from one frozen config.

Nobody wires these by hand, so what runs and what is accounted for cannot disagree.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import dp_accounting

from hf_dpopt.accounting import accountants, events
from hf_dpopt.accounting.certificates import Certificate
from hf_dpopt.clipping.thresholds import Clipping
from hf_dpopt.common.adjacency import SENSITIVITY_FACTOR
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise import NoiseMechanism, NoiseStrategy, StreamCost
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.plan.private_metrics import PrivateMetrics
from hf_dpopt.plan.record import PlanRecord
from hf_dpopt.plan.release import EarlierRun, Release
from hf_dpopt.preclip import Identity, Preclip
from hf_dpopt.randomness.chacha import ChaCha20Gaussian
from hf_dpopt.sampling import Sampler
from hf_dpopt.sampling.sampler import Steps, as_chains

LOG_RELATIVE_ERROR = 1e-2  # of the epsilon shown while the run is under way; always on the pessimistic side


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivacyPlan:
    """Everything public about a private run. Made by `hf_dpopt.plan.choose`; holds no key and no data.

    Formal guarantee: ``num_steps`` steps that draw their batches from ``sampler`` under a secret key, divide by the
    scales of ``preclip``, clip with ``clipper``, sum, and add the noise of ``mechanism`` at ``sensitivity``, are
    together ``(epsilon(), delta)``-differentially private under ``adjacency``, whatever is made of their outputs.

    Attributes:
        config: what was asked for, without "auto".
        release: everything that reaches the adversary.
        num_steps: planned optimizer steps; `epsilon` accepts other numbers. Other than `noise_steps` only for a run
            that was continued beyond its first plan.
        delta: delta of the guarantee, in (0, 1); see `hf_dpopt.accounting.delta`.
        noise_multiplier: noise stddev / sensitivity (unitless); of correlated noise, that of `noise_steps` steps.
        clipper, preclip: stages of the step, beside the sampler and the noise of `release`.
        certificate: proof by samples of an epsilon below the computed one, made before the first step; None without.
        advised: options that were chosen for the user, from public numbers; empty otherwise.
    """

    config: PrivacyConfig
    release: Release
    num_steps: int
    delta: float
    noise_multiplier: float
    clipper: Clipping
    preclip: Preclip = Identity()
    certificate: Certificate | None = dataclasses.field(default=None, compare=False)
    advised: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)

    # --- the stages --------------------------------------------------------------------------------------------------

    @property
    def sampler(self) -> Sampler:
        """Law of the batches."""
        return self.release.sampler

    @property
    def strategy(self) -> NoiseStrategy:
        """Strategy that correlates the noise of the steps."""
        return self.release.strategy

    @property
    def noise_steps(self) -> int:
        """Steps that the noise was made and its multiplier stated for."""
        return self.release.steps

    @property
    def earlier(self) -> tuple[EarlierRun, ...]:
        """Runs on the same records that were charged before, whose cost `epsilon` includes."""
        return self.release.earlier

    @property
    def adjacency(self) -> str:
        """Adjacency: which datasets count as neighbours."""
        return self.release.adjacency

    @property
    def num_examples(self) -> int:
        """Records in the dataset, or users if they are what is sampled; public."""
        return self.sampler.num_examples

    @functools.cached_property
    def mechanism(self) -> NoiseMechanism:
        """Noise of the steps."""
        return NoiseMechanism(
            noise_multiplier=self.noise_multiplier,
            strategy=self.strategy,
            strategy_sensitivity=self.release.sensitivity,
            num_steps=self.noise_steps,
            backend=self.config.noise_backend,
        )

    @property
    def sensitivity(self) -> float:
        """Largest L2 change of what one step sums, between adjacent datasets: all its queries and counts together.

        In the coordinates of the clip, those of g / D where records are divided by D; gradient units without D.
        """
        return self.sensitivity_ratio * self.clipper.sensitivity(self.adjacency)

    @property
    def sensitivity_ratio(self) -> float:
        """Sensitivity of all that a step sums / that of one clipped sum; unitless, >= 1."""
        per_clip = self.draw_stddev * SENSITIVITY_FACTOR[self.adjacency]
        ratio = self.preclip.sensitivity_ratio(per_clip, self.sampler.expected_batch_size)
        if self.private_metrics is None:
            return ratio
        return self.private_metrics.sensitivity_ratio(ratio, self.preclip.num_queries)

    @property
    def private_metrics(self) -> PrivateMetrics | None:
        """Noisy numbers that are released with the gradients of a step; None for none."""
        return self.config.private_metrics

    @property
    def draw_stddev(self) -> float:
        """Stddev of the draws that are correlated / sensitivity of one step's sum; unitless, sigma_z in the papers."""
        return self.noise_multiplier * self.release.sensitivity

    @property
    def cost(self) -> StreamCost:
        """Cost of the noise of a step, per trained coordinate."""
        return self.strategy.cost(self.noise_steps, backend=self.config.noise_backend)

    # --- what is protected -------------------------------------------------------------------------------------------

    @property
    def unit(self) -> str:
        """Unit of privacy: what one record is."""
        return self.config.privacy_unit

    def describe_sampling(self) -> str:
        """One sentence about the batches."""
        return self.sampler.describe("record" if self.unit == "example" else self.unit)

    @property
    def users(self) -> dict[str, Any] | None:
        """Contribution of a user to a step; None if the unit is the record."""
        if self.unit != "user":
            return None
        given: dict[str, Any] = {
            "column": self.config.user_id_column,
            "records_per_user": self.config.records_per_user,
            "sampled": "users" if self.sums_users else "records",
        }
        if self.config.local_training is not None:
            given["local_training"] = dict(self.config.local_training)
        elif self.sums_users:
            given["weighting"] = self.config.user_weighting
        return given

    @property
    def num_users(self) -> int | None:
        """Users in the training set; None where records are protected one by one."""
        if self.unit != "user":
            return None
        return self.config.num_units(self.num_examples)

    @property
    def sums_users(self) -> bool:
        """Whether the clip is that of whole users; else it is that of records."""
        return self.unit == "user" and not self.sampler.samples_records_of_users

    @property
    def is_private(self) -> bool:
        """False without noise or with a key that the user fixed; epsilon is then infinite."""
        return self.config.is_private and self.noise_multiplier > 0

    # --- what it costs -----------------------------------------------------------------------------------------------

    @property
    def secret_noise_multiplier(self) -> float:
        """Noise multiplier of what the adversary does not know of the noise: 0 with a key that the user fixed."""
        return self.noise_multiplier if self.is_private else 0.0

    @property
    def event(self) -> dp_accounting.DpEvent:
        """Event of the planned run: what it releases."""
        return self.event_after(self.num_steps)

    def event_after(self, num_steps: Steps) -> dp_accounting.DpEvent:
        """Event of what that many steps release, and of the earlier runs.

        A sequence gives the steps of each chain of a run that branched.
        """
        return self.release.event(self.secret_noise_multiplier, num_steps)

    @functools.cached_property
    def run_epsilon(self) -> float:
        """Epsilon of the planned run by itself, where it is one of several; its own epsilon else."""
        if self.release.tuned is None:
            return self.epsilon()
        return dataclasses.replace(self, release=dataclasses.replace(self.release, tuned=None)).epsilon()

    def epsilon(self, num_steps: Steps | None = None, *, is_for_log: bool = False) -> float:
        """Epsilon after that many steps and the earlier runs; all planned steps by default.

        Formal guarantee: an upper bound, non-decreasing in the steps. The planned number of steps gets the fine value;
        any other number one that is cheap enough for every log line: about 1% larger at most or, for balls in bins,
        that of the whole epoch.

        Args:
            num_steps: optimizer steps, >= 0. If the run has several chains (it was resumed from an older checkpoint,
                or trained again), the steps of each: for ``fixed_order`` their sum does not tell what they cost.
            is_for_log: whether other numbers of steps will be asked for next: a bound of the same quality from what is
                kept of a single step, in milliseconds. It differs from the other one within its 1%.
        """
        planned = self.spent.epsilon
        if num_steps is None or num_steps == self.num_steps:
            return planned
        horizon = self.release.horizon
        if horizon is not None and max(as_chains(num_steps), default=0) > horizon:
            return math.inf  # no noise was made for such a step
        excess = self.release.excess(num_steps, self.num_steps)
        if excess == 0:
            return planned
        rough = self._computed(
            self._cheap(num_steps), relative_error=LOG_RELATIVE_ERROR, reuses_steps=is_for_log
        ).epsilon
        if excess is None:
            return rough
        return max(rough, planned) if excess > 0 else min(rough, planned)

    def _cheap(self, num_steps: Steps) -> Steps:
        """Return so many steps or a few more, whose epsilon is known sooner.

        For the log of a run on its way alone; what a run of several chains, or beyond its plan, costs is exact.
        """
        chains = as_chains(num_steps)
        return self.sampler.steps_for_log(chains[0], self.num_steps) if len(chains) == 1 else num_steps

    def epsilon_replace_one(self, num_steps: Steps | None = None) -> float | None:
        """Epsilon, same noise, when one record is swapped for another; None without a proof.

        Args:
            num_steps: steps, or steps of each chain; None for the planned ones.
        """
        if not self.release.has_proof_under("replace_one"):
            return None
        try:
            return self._computed(self.num_steps if num_steps is None else num_steps, adjacency="replace_one").epsilon
        except DPConfigError:  # a delta at which only RDP works, which is not valid here
            return None

    def _computed(self, num_steps: Steps, **how: Any) -> accountants.Spent:
        """Epsilon of so many steps, without proofs by samples; see `Release.epsilon`."""
        return self.release.epsilon(self.secret_noise_multiplier, self.delta, num_steps, **how)

    @functools.cached_property
    def spent(self) -> accountants.Spent:
        """Epsilon of the planned steps and the earlier runs, and the accountant that gave it."""
        computed, proof, noise = self._computed(self.num_steps), self.certificate, self.secret_noise_multiplier
        if proof is None or not self.release.is_proven_by(proof, noise, self.num_steps, self.delta):
            return computed
        if proof.epsilon >= computed.epsilon:
            return computed
        return accountants.Spent(
            proof.epsilon,
            f"balls in bins (verified by {proof.num_samples} samples in each direction before the first step, which "
            f"fails to find an error with probability at most {proof.failure:g})",
        )

    @functools.cached_property
    def record(self) -> PlanRecord:
        """The plan as it is written to ledgers and reports: what it runs, and what it is expected to spend."""
        config, release, goes_on = self.config, self.release, self.config.noise_at_changes not in ("auto", "restart")
        made = PlanRecord(
            num_examples=self.num_examples,
            expected_batch_size=self.sampler.expected_batch_size,
            sampler=self.sampler.parameters(),
            clipping=config.clipping,
            clipping_norm=config.clipping_norm,
            adjacency=self.adjacency,
            privacy_unit=self.unit,
            users=self.users,
            delta=self.delta,
            allow_large_delta=config.allow_large_delta,
            noise_multiplier=self.noise_multiplier,
            draw_stddev=self.draw_stddev,
            noise_mechanism=config.noise_mechanism,
            noise_kwargs=config.noise_kwargs,
            noise_restart_every=config.noise_restart_every,
            noise_at_changes=config.noise_at_changes if goes_on else None,
            noise_strategy=self.strategy.parameters(),
            noise_steps=self.noise_steps,
            preclip=self.preclip.parameters(),
            num_queries=self.preclip.num_queries,
            opening_noise=release.opening,
            private_metrics=None if self.private_metrics is None else self.private_metrics.parameters(),
            is_private=self.is_private,
            noise_rng=ChaCha20Gaussian.stream,
            num_steps=self.num_steps,
            target_epsilon=config.target_epsilon,
            epsilon=self.epsilon(),
            accountant=self.spent.accountant,
            dp_accounting=events.dp_accounting_version(),
            certificate=None if self.certificate is None else self.certificate.parameters(),
            advised=self.advised or None,
            tuned=None if release.tuned is None else release.tuned.public_dict(),
            run_epsilon=None if release.tuned is None else self.run_epsilon,
            earlier_runs=self.earlier,
        )
        return PlanRecord.from_json(made.to_json())
