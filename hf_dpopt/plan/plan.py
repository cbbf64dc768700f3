"""The plan of a private run: sampler, sensitivity, noise and event, all built from one frozen config.

Nobody wires these by hand, so what runs and what is accounted for cannot disagree.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import dp_accounting

from hf_dpopt.accounting import accountants, events
from hf_dpopt.accounting.balls_in_bins_sampled import Certificate
from hf_dpopt.accounting.calibrate import MARGIN, calibrate_gaussian, calibrate_noise_multiplier
from hf_dpopt.accounting.delta import resolve_delta
from hf_dpopt.accounting.selection import RunCount
from hf_dpopt.clipping.thresholds import Clipping, make_clipper
from hf_dpopt.common.adjacency import SENSITIVITY_FACTOR
from hf_dpopt.common.checks import check_noise_multiplier, check_positive
from hf_dpopt.common.errors import DPBudgetExceeded, DPConfigError
from hf_dpopt.noise import NoiseMechanism, NoiseStrategy, StreamCost, Workload
from hf_dpopt.plan.bounds import check_sizes
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.plan.crossing import choose_noise_across
from hf_dpopt.plan.earlier import EarlierRun, check_earlier, composed, event_of_run
from hf_dpopt.plan.private_metrics import PrivateMetrics
from hf_dpopt.plan.resolve import stream_options
from hf_dpopt.preclip import Identity, Preclip, make_preclip
from hf_dpopt.randomness.cipher import source_of
from hf_dpopt.sampling import Sampler
from hf_dpopt.sampling.base import Steps, as_chains, charged_steps

LOG_RELATIVE_ERROR = 1e-2  # of the epsilon shown while the run is under way; always on the pessimistic side
MAX_STEPS = 10**6  # end of the search of `max_steps_within`; beyond 1e7 dp_accounting computes huge integers

# Entries of `public_dict` that a resumed run must share with the run it continues.
RESUME_KEYS = (
    "num_examples", "expected_batch_size", "sampler", "clipping", "clipping_norm", "adjacency", "privacy_unit",
    "delta", "noise_multiplier", "draw_stddev", "noise_mechanism", "noise_kwargs", "noise_restart_every",
    "noise_at_changes", "noise_strategy", "noise_rng", "is_private", "preclip", "users", "earlier_runs",
    "opening_noise", "tuned", "private_metrics",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivacyPlan:
    """Everything public about a private run. Made by `hf_dpopt.plan.make`; holds no key and no data.

    Formal guarantee: ``num_steps`` steps that draw their batches from ``sampler`` under a secret key, divide by the
    scales of ``preclip``, clip with ``clipper``, sum, and add the noise of ``mechanism`` at ``sensitivity``, are
    together ``(epsilon(), delta)``-differentially private under ``adjacency``, whatever is made of their outputs.

    Attributes:
        config: what was asked for.
        num_examples: records in the dataset, or users if they are what is sampled; public.
        num_steps: planned optimizer steps; `epsilon` accepts other numbers.
        delta: delta of the guarantee, in (0, 1); see `hf_dpopt.accounting.delta`.
        noise_multiplier: noise stddev / sensitivity (unitless); of correlated noise, that of `noise_steps` steps.
        noise_steps: steps the noise was made and its multiplier stated for; another number than `num_steps` only for
            a run that was continued beyond its first plan.
        sampler, preclip, clipper, mechanism: the stages of the step.
        compared: what ``noise_mechanism="auto"`` was decided from; empty otherwise.
        certificate: proof by samples of an epsilon below the computed one, made before the first step; None without.
        recipe: options that were chosen for the user, from public numbers; empty otherwise.
        earlier: runs on the same records that were charged before, whose cost `epsilon` includes.
    """

    config: PrivacyConfig
    num_examples: int
    num_steps: int
    delta: float
    noise_multiplier: float
    noise_steps: int
    sampler: Sampler
    clipper: Clipping
    mechanism: NoiseMechanism
    preclip: Preclip = Identity()
    compared: tuple[Any, ...] = dataclasses.field(default=(), repr=False, compare=False)
    certificate: Certificate | None = dataclasses.field(default=None, compare=False)
    recipe: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False, compare=False)
    earlier: tuple[EarlierRun, ...] = ()

    @property
    def noise_stream(self) -> str:
        """Name and version of the random stream that the noise is drawn from."""
        return source_of(self.config.noise_rng).stream

    @property
    def adjacency(self) -> str:
        """Adjacency: which datasets count as neighbours."""
        return self.config.adjacency

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
    def strategy(self) -> NoiseStrategy:
        """Strategy that correlates the noise of the steps."""
        return self.mechanism.strategy

    @property
    def draw_stddev(self) -> float:
        """Stddev of the draws that are correlated / sensitivity of one step's sum; unitless, sigma_z in the papers."""
        return self.noise_multiplier * self.mechanism.sensitivity()

    @property
    def carries_noise_on(self) -> bool:
        """Whether correlated noise goes on where the scales of `preclip` change, in one stream or in several."""
        return self.config.noise_at_changes in ("carry_on", "by_phase")

    @property
    def cost(self) -> StreamCost:
        """Cost of the noise of a step, per trained coordinate."""
        options = stream_options(self.config)
        return self.strategy.cost(self.noise_steps, backend=options["backend"], block=options["block"])

    @property
    def horizon(self) -> int | None:
        """Steps after which there is no noise for another one; None if any number may follow."""
        return None if self.strategy.anytime else self.noise_steps

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

    @property
    def event(self) -> dp_accounting.DpEvent:
        """Event of the planned run: what it releases."""
        return self.event_after(self.num_steps)

    def event_after(self, num_steps: Steps) -> dp_accounting.DpEvent:
        """Event of what that many steps release, and of the earlier runs.

        A sequence gives the steps of each chain of a run that branched.
        """
        own = self.own_event_after(num_steps)
        return own if isinstance(own, dp_accounting.NonPrivateDpEvent) else composed(self.earlier, own)

    def own_event_after(self, num_steps: Steps) -> dp_accounting.DpEvent:
        """Event of what that many steps of this run release, without the earlier runs; see `event_after`."""
        if not self.is_private and self.sampler.max_participations(num_steps) > 0:
            return dp_accounting.NonPrivateDpEvent()
        stddev = events.noise_stddev_over_clip(self.draw_stddev, self.adjacency)
        return event_of_run(
            self.sampler.release(self.strategy, stddev, num_steps, planned_steps=self.noise_steps),
            num_chains=sum(steps > 0 for steps in as_chains(num_steps)),
            adjacency=self.adjacency,
            opening_noise=opening_noise(self.preclip),
            tuned=self.config.tuned,
        )

    @functools.cached_property
    def run_epsilon(self) -> float:
        """Epsilon of the planned run by itself, where it is one of several; its own epsilon else."""
        if self.config.tuned is None:
            return self.epsilon()
        alone = dataclasses.replace(self, config=dataclasses.replace(self.config, tuned_runs=None, tuned_shape=1.0))
        return alone.epsilon()

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
        planned = self._spent.epsilon
        if num_steps is None or num_steps == self.num_steps:
            return planned
        if self.horizon is not None and max(as_chains(num_steps), default=0) > self.horizon:
            return math.inf  # no noise was made for such a step
        excess = self.excess(num_steps)
        if excess == 0:
            return planned
        event = self.event_after(self._cheap(num_steps))
        rough = accountants.epsilon(
            event, self.delta, self.adjacency, relative_error=LOG_RELATIVE_ERROR, reuses_steps=is_for_log
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

    def excess(self, num_steps: Steps) -> int | None:
        """Sign of what those steps cost above the plan: 0 for the same, None if that is not known without epsilon."""
        charged = [charged_steps(self.strategy, t, self.noise_steps) for t in as_chains(num_steps) if t > 0]
        if self.preclip.opening is not None and len(charged) != 1:
            return None  # every chain asked the opening query
        planned = self.num_steps if self.strategy.anytime else self.noise_steps
        return self.sampler.excess(self.strategy, charged, planned)

    def epsilon_replace_one(self, num_steps: Steps | None = None) -> float | None:
        """Epsilon, same noise, when one record is swapped for another; None without a proof.

        Args:
            num_steps: steps, or steps of each chain; None for the planned ones.
        """
        samplers = [self.sampler, *(run.sampler for run in self.earlier)]
        if not all("replace_one" in sampler.adjacencies for sampler in samplers):
            return None
        try:
            event = self.event if num_steps is None else self.event_after(num_steps)
            return accountants.epsilon(event, self.delta, "replace_one").epsilon
        except DPConfigError:  # a delta at which only RDP works, which is not valid here
            return None

    def noise_generators(self) -> tuple[str, ...]:
        """Random streams of the noise of this run and of the earlier ones, as ledgers name them."""
        return (self.noise_stream, *(run.mechanism["noise_rng"] for run in self.earlier))

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
            "users": self.users,
            "delta": self.delta,
            "allow_large_delta": self.config.allow_large_delta,
            "noise_multiplier": self.noise_multiplier,
            "draw_stddev": self.draw_stddev,
            "noise_mechanism": self.config.noise_mechanism,
            "noise_kwargs": dict(self.config.noise_kwargs),
            "noise_restart_every": self.config.noise_restart_every,
            **({"noise_at_changes": self.config.noise_at_changes} if self.carries_noise_on else {}),
            "noise_strategy": self.strategy.parameters(),
            "noise_steps": self.noise_steps,
            "preclip": self.preclip.parameters(),
            "num_queries": self.preclip.num_queries,
            **({} if self.preclip.opening is None else {"opening_noise": opening_noise(self.preclip)}),
            **({} if self.private_metrics is None else {"private_metrics": self.private_metrics.parameters()}),
            "is_private": self.is_private,
            "noise_rng": self.noise_stream,
            "num_steps": self.num_steps,
            "target_epsilon": self.config.target_epsilon,
            "epsilon": self.epsilon() if math.isfinite(self.epsilon()) else "inf",  # JSON has no infinity
            "accountant": self._spent.accountant,
            "dp_accounting": events.dp_accounting_version(),
            **({} if self.certificate is None else {"certificate": self.certificate.parameters()}),
            **({"recipe": dict(self.recipe)} if self.recipe else {}),
            **({} if self.config.tuned is None else self._tuned_dict(self.config.tuned)),
            **({"earlier_runs": [run.public_dict() for run in self.earlier]} if self.earlier else {}),
        }

    def _tuned_dict(self, tuned: RunCount) -> dict[str, Any]:
        alone = self.run_epsilon
        return {"tuned": tuned.public_dict(), "run_epsilon": alone if math.isfinite(alone) else "inf"}

    @functools.cached_property
    def _spent(self) -> accountants.Spent:
        computed = accountants.epsilon(self.event, self.delta, self.adjacency)
        proof = self.certificate
        if not self.is_private or proof is None or proof.epsilon >= computed.epsilon:
            return computed
        parts = events.flatten(self.event)
        if not all(proof.covers(leaf, self.delta) for leaf, _ in parts) or sum(count for _, count in parts) > 1:
            return computed
        return accountants.Spent(
            proof.epsilon,
            f"balls in bins (verified by {proof.num_samples} samples in each direction before the first step, which "
            f"fails to find an error with probability at most {proof.failure:g})",
        )


def opening_noise(preclip: Preclip) -> float | None:
    """Noise multiplier of the query that a preconditioner asks before the first step; None if it asks none."""
    if preclip.opening is None:
        return None
    check_positive(noise_multiplier_of_the_opening_query=preclip.opening.noise_multiplier)
    return preclip.opening.noise_multiplier


def build_plan(
    config: PrivacyConfig,
    *,
    num_examples: int,
    num_steps: int,
    noise_multiplier: float | None = None,
    workload: Workload | None = None,
    recorded: Mapping[str, Any] | None = None,
    preclip: Preclip | None = None,
    compared: tuple[Any, ...] = (),
    recipe: Mapping[str, Any] | None = None,
    earlier: Sequence[EarlierRun] = (),
) -> PrivacyPlan:
    """Build the plan of a run whose mechanism has a name; arguments as for `hf_dpopt.plan.make.make_plan`.

    Args:
        config: what was asked for; a `noise_mechanism` of "auto" only with `recorded`.
        compared: what the mechanism was chosen from; empty where it was named.
        recipe: options that were chosen for the user, which the plan notes down.
        earlier: runs on the same records that the budget includes.
    """
    check_sizes(num_examples, num_steps)
    delta = resolve_delta(
        config.target_delta,
        config.num_units(num_examples),
        allow_large=config.allow_large_delta,
        recorded=None if recorded is None else recorded["delta"],
        unit="record" if config.privacy_unit == "example" else config.privacy_unit,
    )
    preclip = preclip or make_preclip(config.preconditioner, config.preconditioner_kwargs)
    preclip.check_steps(num_steps)
    changes = preclip.changes(config.clipping_norm)
    chosen = choose_noise_across(
        config, changes, num_examples=num_examples, num_steps=num_steps, delta=delta, workload=workload,
        recorded=recorded,
    )  # fmt: skip
    config, sampler, strategy, noise_steps = chosen
    check_sizes(num_examples, noise_steps)  # which a recorded plan names
    preclip.check_config(config)
    if preclip.opening is not None and sampler.samples_records_of_users:
        raise DPConfigError(
            f"preconditioner={preclip.name!r} asks a query over all records, of which sampling={sampler.name!r} lets "
            "a user have several, each clipped for itself: its noise was not calibrated to that. Sample users "
            "(sampling='poisson')."
        )
    _check_noise(config, strategy, sampler, num_steps, noise_steps)
    check_earlier(earlier, config, sampler)
    _check_tuned(config, sampler, earlier)
    if recorded is not None and config.target_epsilon is not None and noise_multiplier is None:
        noise_multiplier = recorded["noise_multiplier"]
    if noise_multiplier is None:
        noise_multiplier = config.noise_multiplier
    certificate = None
    if noise_multiplier is None:
        noise_multiplier, certificate = _calibrate(
            config, strategy, sampler, noise_steps, delta, earlier, opening_noise(preclip)
        )
    check_noise_multiplier(noise_multiplier)
    if recorded is not None:
        certificate = _kept_certificate(recorded, strategy)
    elif certificate is None and config.is_private and noise_multiplier > 0 and _is_alone(config, earlier, preclip):
        stddev = _stddev(config, strategy, sampler, noise_multiplier, noise_steps)
        certificate = sampler.certify(strategy, stddev, noise_steps, delta, num_samples=config.amplification_samples)
    mechanism = _make_mechanism(config, strategy, sampler, noise_multiplier, noise_steps)
    per_clip = noise_multiplier * mechanism.sensitivity() * SENSITIVITY_FACTOR[config.adjacency]
    # refuses a count that costs more than the budget
    ratio = preclip.sensitivity_ratio(per_clip, sampler.expected_batch_size)
    if config.private_metrics is not None:
        config.private_metrics.sensitivity_ratio(ratio, preclip.num_queries)
    return PrivacyPlan(
        config=config,
        num_examples=int(num_examples),
        num_steps=int(num_steps),
        delta=delta,
        noise_multiplier=noise_multiplier,
        noise_steps=noise_steps,
        sampler=sampler,
        clipper=make_clipper(config),
        mechanism=mechanism,
        preclip=preclip,
        compared=compared,
        certificate=_covering(certificate, config, strategy, sampler, noise_multiplier, num_steps, delta),
        recipe=dict(recipe or {}),
        earlier=tuple(earlier),
    )


def _is_alone(config: PrivacyConfig, earlier: Sequence[EarlierRun], preclip: Preclip) -> bool:
    """Whether the steps are all that is accounted for: samples prove a bound of one mechanism alone."""
    return not earlier and preclip.opening is None and config.tuned is None


def _check_tuned(config: PrivacyConfig, sampler: Sampler, earlier: Sequence[EarlierRun]) -> None:
    """Refuse the best of several runs where what a run releases is not all in its own event, or has no analysis."""
    if config.tuned is None:
        return
    if earlier:
        raise DPConfigError(
            f"tuned_runs={config.tuned_runs:g} with earlier_runs: whether all runs of the tuning share the earlier "
            "ones, or each has its own, decides what they cost, and is not known here. Leave earlier_runs out, and "
            "add up epsilon and delta."
        )
    if sampler.name == "balls_in_bins":
        raise DPConfigError(
            f"tuned_runs={config.tuned_runs:g} has no analysis for the batches of sampling='balls_in_bins'. Use "
            "sampling='poisson', 'cyclic_poisson' or 'fixed_order'."
        )


def _check_noise(
    config: PrivacyConfig, strategy: NoiseStrategy, sampler: Sampler, num_steps: int, noise_steps: int
) -> None:
    """Refuse noise that has no proof with these batches, or not for so many steps."""
    sampler.check_adjacency(config.adjacency)
    sampler.check_strategy(strategy)
    if not 0 < sampler.sensitivity_of(strategy, noise_steps) < math.inf:
        raise DPConfigError(
            f"The sensitivity of the {config.noise_mechanism} noise is no finite number > 0: its coefficients are out "
            "of the range of floating-point numbers. Use coefficients near 1."
        )
    sampler.release(strategy, 1.0, noise_steps, planned_steps=noise_steps)
    if not strategy.anytime and num_steps > noise_steps:
        raise DPBudgetExceeded(
            f"The {config.noise_mechanism} noise of this run was made for {noise_steps} steps, and {num_steps} were "
            f"asked for. Stop at {noise_steps}, or start over in another output_dir (what was spent stays spent)."
        )


def _make_mechanism(
    config: PrivacyConfig, strategy: NoiseStrategy, sampler: Sampler, noise_multiplier: float, noise_steps: int
) -> NoiseMechanism:
    return NoiseMechanism(
        noise_multiplier=noise_multiplier,
        strategy=strategy,
        strategy_sensitivity=sampler.sensitivity_of(strategy, noise_steps),
        num_steps=noise_steps,
        **stream_options(config),
    )


def _stddev(
    config: PrivacyConfig, strategy: NoiseStrategy, sampler: Sampler, noise_multiplier: float, num_steps: int
) -> float:
    """Stddev of the draws / bound on one record."""
    return events.noise_stddev_over_clip(
        noise_multiplier * sampler.sensitivity_of(strategy, num_steps), config.adjacency
    )


def _calibrate(
    config: PrivacyConfig,
    strategy: NoiseStrategy,
    sampler: Sampler,
    num_steps: int,
    delta: float,
    earlier: Sequence[EarlierRun],
    opening: float | None,
) -> tuple[float, Certificate | None]:
    """Noise multiplier for the budget, and the proof of it if it was found by samples."""
    assert config.target_epsilon is not None
    computed = _calibrate_computed(config, strategy, sampler, num_steps, delta, earlier, opening)
    if earlier or opening is not None or config.tuned is not None:
        return computed, None  # samples prove a bound of one mechanism alone
    made = sampler.calibrate(
        strategy, num_steps, epsilon=config.target_epsilon, delta=delta, num_samples=config.amplification_samples
    )
    if made is None:
        return computed, None
    multiplier = made.event.noise_multiplier / _stddev(config, strategy, sampler, 1.0, num_steps)
    while _stddev(config, strategy, sampler, multiplier, num_steps) < made.event.noise_multiplier:
        multiplier = math.nextafter(multiplier, math.inf)  # the proof is for this much noise, not for an ulp less
    return (multiplier, made) if multiplier < computed else (computed, None)


def _kept_certificate(recorded: Mapping[str, Any], strategy: NoiseStrategy) -> Certificate | None:
    """The proof that the run began with: samples taken after its first step would prove less."""
    same_noise = json.loads(json.dumps(strategy.parameters())) == recorded["noise_strategy"]
    if "certificate" not in recorded or not same_noise:  # other noise is refused by the ledger
        return None
    return Certificate.read(recorded["certificate"], strategy)


def _covering(
    certificate: Certificate | None,
    config: PrivacyConfig,
    strategy: NoiseStrategy,
    sampler: Sampler,
    noise_multiplier: float,
    num_steps: int,
    delta: float,
) -> Certificate | None:
    """The certificate if it is one for this plan; a run that was made longer has none."""
    if certificate is None:
        return None
    stddev = _stddev(config, strategy, sampler, noise_multiplier, certificate.event.num_steps)
    event = dataclasses.replace(certificate.event, noise_multiplier=stddev, num_steps=num_steps)
    is_same = event.num_bins == sampler.steps_per_epoch and event.strategy == strategy
    return certificate if is_same and certificate.covers(event, delta) else None


def _calibrate_computed(
    config: PrivacyConfig,
    strategy: NoiseStrategy,
    sampler: Sampler,
    num_steps: int,
    delta: float,
    earlier: Sequence[EarlierRun],
    opening: float | None,
) -> float:
    sensitivity = sampler.sensitivity_of(strategy, num_steps)

    def with_all_else(event: dp_accounting.DpEvent) -> dp_accounting.DpEvent:
        own = event_of_run(event, num_chains=1, adjacency=config.adjacency, opening_noise=opening, tuned=config.tuned)
        return composed(earlier, own)

    assert config.target_epsilon is not None
    if earlier or opening is not None:
        beside = with_all_else(dp_accounting.NoOpDpEvent())
        spent = accountants.epsilon(beside, delta, config.adjacency).epsilon
        if spent >= config.target_epsilon * (1 - MARGIN) and not earlier:
            raise DPConfigError(
                f"The query before the first step alone costs epsilon {spent:.4g} at delta {delta:g}, and "
                f"target_epsilon={config.target_epsilon:g} is for it and the steps. Use more query_noise."
            )
        if spent >= config.target_epsilon * (1 - MARGIN):
            raise DPConfigError(
                f"The earlier runs spent epsilon {spent:.4g} at delta {delta:g}, and target_epsilon="
                f"{config.target_epsilon:g} is for them and this run together. Raise target_epsilon."
            )

    def epsilon_at(noise_multiplier: float, relative_error: float) -> float:
        stddev = events.noise_stddev_over_clip(noise_multiplier * sensitivity, config.adjacency)
        event = with_all_else(sampler.release(strategy, stddev, num_steps, planned_steps=num_steps))
        return accountants.epsilon(event, delta, config.adjacency, relative_error=relative_error).epsilon

    unit = events.noise_stddev_over_clip(sensitivity, config.adjacency)
    event = sampler.release(strategy, unit, num_steps, planned_steps=num_steps)
    is_alone = not earlier and opening is None and config.tuned is None
    precision = events.gaussian_precision(events.flatten(event)) if is_alone else None
    if precision is not None:
        return calibrate_gaussian(epsilon_at, config.target_epsilon, delta, precision, config.adjacency)
    return calibrate_noise_multiplier(epsilon_at, config.target_epsilon)
