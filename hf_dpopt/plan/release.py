"""Everything of a run that reaches the adversary, as one object: its event, its epsilon, and the noise for a budget.

Whoever adds up costs asks it (the plan, the log, the ledger of a dataset, tuning, later runs), so that nothing that a
run releases can be forgotten in one of these places.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import dp_accounting

from hf_dpopt.accounting import accountants, events
from hf_dpopt.accounting.best_of_runs import RunCount
from hf_dpopt.accounting.calibrate import MARGIN, calibrate_gaussian, calibrate_noise_multiplier
from hf_dpopt.accounting.certificates import Certificate
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise import NoiseStrategy, from_parameters
from hf_dpopt.sampling import SAMPLERS, Sampler
from hf_dpopt.sampling.sampler import Steps, as_chains, charged_steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Release:
    """Everything that reaches the adversary: the noisy sums of a run, what is released with them, and earlier runs.

    Formal guarantee: what a run of these shows, with noise of `noise_multiplier` times the sensitivity of a step's sum
    and under fresh keys, is an output of the mechanism that `event` describes.

    Args:
        sampler: law of the batches.
        strategy: C, which correlates the noise of the steps; the sampler has a proof for it.
        steps: steps that the strategy was made for.
        adjacency: which datasets are neighbours; the sampler has a proof for it.
        opening: noise multiplier of the query over all units that every key begins with; None without one.
        tuned: law of the number of runs of which the best is released; None for a run by itself.
        earlier: runs on the same records that were charged before, on whose results this one builds.

    Raises:
        DPConfigError: for a combination without a privacy proof.
    """

    sampler: Sampler
    strategy: NoiseStrategy
    steps: int
    adjacency: str
    opening: float | None = None
    tuned: RunCount | None = None
    earlier: tuple[EarlierRun, ...] = ()

    def __post_init__(self) -> None:
        self.sampler.check_adjacency(self.adjacency)
        self.sampler.check_strategy(self.strategy)
        if not 0 < self.sensitivity < math.inf:
            raise DPConfigError(
                f"The sensitivity of the {self.strategy.name} noise is no finite number > 0: its coefficients are out "
                "of the range of floating-point numbers. Use coefficients near 1."
            )
        self.sampler.release(self.strategy, 1.0, self.steps, planned_steps=self.steps)
        names = {self.sampler.name, *(run.release.sampler.name for run in self.earlier)} if self.earlier else set()
        if "balls_in_bins" in names and names - {"balls_in_bins", "fixed_order"}:
            raise DPConfigError(
                f"Batches of {' and '.join(sorted(names))} have no common analysis: balls_in_bins goes with itself "
                "and fixed_order. Use another --sampling, or leave earlier_runs out and add up epsilon and delta."
            )
        if self.opening is not None and self.sampler.samples_records_of_users:
            raise DPConfigError(
                f"A query over all records has no proof with sampling={self.sampler.name!r}, which lets a user have "
                "several of them. Sample users (sampling='poisson'), or use another preconditioner."
            )
        if self.tuned is not None:
            self._check_tuned(self.tuned)

    def _check_tuned(self, tuned: RunCount) -> None:
        """Refuse the best of several runs where a run releases more than its own event says, or has no analysis."""
        if self.earlier:
            raise DPConfigError(
                f"tuned_runs={tuned.mean:g} with earlier_runs: what they cost depends on whether all runs of the "
                "tuning share the earlier ones. Leave earlier_runs out, and add up epsilon and delta."
            )
        if self.sampler.name == "balls_in_bins":
            raise DPConfigError(
                f"tuned_runs={tuned.mean:g} has no analysis for the batches of sampling='balls_in_bins'. Use "
                "sampling='poisson', 'cyclic_poisson' or 'fixed_order'."
            )

    @functools.cached_property
    def sensitivity(self) -> float:
        """Sensitivity of C over the participations that the sampler allows; unitless, 1 for independent noise."""
        return self.sampler.sensitivity_of(self.strategy, self.steps)

    @property
    def is_single_mechanism(self) -> bool:
        """Whether the steps are all that is accounted for: samples prove a bound of one mechanism alone."""
        return not self.earlier and self.opening is None and self.tuned is None

    @property
    def horizon(self) -> int | None:
        """Steps after which there is no noise for another one; None if any number may follow."""
        return None if self.strategy.anytime else self.steps

    @property
    def alone(self) -> Release:
        """The same without the earlier runs, for those who charge each run for itself."""
        return dataclasses.replace(self, earlier=()) if self.earlier else self

    # --- what it costs -----------------------------------------------------------------------------------------------

    def event(self, noise_multiplier: float, steps: Steps | None = None) -> dp_accounting.DpEvent:
        """Event of everything that is released.

        Args:
            noise_multiplier: noise stddev / sensitivity of `steps` steps; 0 for noise that is absent, or known.
            steps: optimizer steps, or those of each chain; None for all that the noise was made for.
        """
        return self.event_of_draws(noise_multiplier * self.sensitivity, steps)

    def event_of_draws(self, draw_stddev: float, steps: Steps | None = None) -> dp_accounting.DpEvent:
        """Event of everything; `draw_stddev` is that of the draws / sensitivity of one step's sum, else as `event`."""
        steps = self.steps if steps is None else steps
        if draw_stddev == 0 and self.sampler.max_participations(steps) > 0:
            return dp_accounting.NonPrivateDpEvent()
        stddev = events.noise_stddev_over_clip(draw_stddev, self.adjacency)
        own = self.sampler.release(self.strategy, stddev, steps, planned_steps=self.steps)
        return self._with_all_else(own, sum(charged > 0 for charged in as_chains(steps)))

    def _with_all_else(self, own: dp_accounting.DpEvent, num_chains: int) -> dp_accounting.DpEvent:
        """Event of the steps of so many chains, and of what is released with them."""
        if num_chains and self.opening is not None:
            query = dp_accounting.GaussianDpEvent(events.noise_stddev_over_clip(self.opening, self.adjacency))
            own = dp_accounting.ComposedDpEvent([dp_accounting.SelfComposedDpEvent(query, num_chains), own])
        if num_chains and self.tuned is not None:
            own = self.tuned.event(own)
        return dp_accounting.ComposedDpEvent([*(run.event for run in self.earlier), own]) if self.earlier else own

    def epsilon(
        self, noise_multiplier: float, delta: float, steps: Steps | None = None, *, adjacency: str | None = None,
        relative_error: float = accountants.FINE, reuses_steps: bool = False,
    ) -> accountants.Spent:  # fmt: skip
        """Smallest proven epsilon at delta, and the accountant that gave it; arguments as for `event`.

        Args:
            adjacency: that of the release, or another one that it has a proof for.
            relative_error, reuses_steps: see `accountants.epsilon`.
        """
        return accountants.epsilon(
            self.event(noise_multiplier, steps), delta, adjacency or self.adjacency,
            relative_error=relative_error, reuses_steps=reuses_steps,
        )  # fmt: skip

    def has_proof_under(self, adjacency: str) -> bool:
        """Whether all samplers, those of the earlier runs included, have a proof for another adjacency."""
        samplers = [self.sampler, *(run.release.sampler for run in self.earlier)]
        return all(adjacency in sampler.adjacencies for sampler in samplers)

    def excess(self, steps: Steps, planned: int) -> int | None:
        """Sign of what steps cost above the planned ones: 0 for the same, None if only epsilon can tell.

        Args:
            steps: steps, or those of each chain.
            planned: steps of one chain.
        """
        charged = [charged_steps(self.strategy, t, self.steps) for t in as_chains(steps) if t > 0]
        if self.opening is not None and len(charged) != 1:
            return None  # every chain asked the opening query
        return self.sampler.excess(self.strategy, charged, planned if self.strategy.anytime else self.steps)

    # --- the noise for a budget, and proofs by samples ---------------------------------------------------------------

    def calibrate(self, epsilon: float, delta: float, *, num_samples: int = 0) -> tuple[float, Certificate | None]:
        """Smallest noise multiplier for a budget, and the proof of it if it was found by samples.

        Args:
            epsilon, delta: the budget, earlier runs included.
            num_samples: samples that a proof may draw; 0 for the computed bound alone.

        Raises:
            DPConfigError: for a budget that no noise keeps.
        """
        computed = self._computed_noise(epsilon, delta)
        if not self.is_single_mechanism:
            return computed, None
        made = self.sampler.calibrate(self.strategy, self.steps, epsilon=epsilon, delta=delta, num_samples=num_samples)
        if made is None:
            return computed, None
        multiplier = made.event.noise_multiplier / self._stddev(1.0, self.steps)
        while self._stddev(multiplier, self.steps) < made.event.noise_multiplier:
            multiplier = math.nextafter(multiplier, math.inf)  # the proof is for this much noise, not for an ulp less
        return (multiplier, made) if multiplier < computed else (computed, None)

    def certify(self, noise_multiplier: float, delta: float, *, num_samples: int) -> Certificate | None:
        """Proof by samples of the epsilon of given noise; None where there is none, or the computed one is as good."""
        if noise_multiplier == 0 or not self.is_single_mechanism:
            return None
        stddev = self._stddev(noise_multiplier, self.steps)
        return self.sampler.certify(self.strategy, stddev, self.steps, delta, num_samples=num_samples)

    def is_proven_by(self, proof: Certificate, noise_multiplier: float, num_steps: int, delta: float) -> bool:
        """Whether a proof by samples is one for so many steps with this noise, and for nothing beside them."""
        if noise_multiplier == 0 or not self.is_single_mechanism:
            return False
        stddev = self._stddev(noise_multiplier, proof.event.num_steps)
        event = dataclasses.replace(proof.event, noise_multiplier=stddev, num_steps=num_steps)
        is_same = event.num_bins == self.sampler.steps_per_epoch and event.strategy == self.strategy
        return is_same and proof.covers(event, delta)

    def _stddev(self, noise_multiplier: float, steps: int) -> float:
        """Stddev of the draws / bound on one record."""
        sensitivity = self.sampler.sensitivity_of(self.strategy, steps)
        return events.noise_stddev_over_clip(noise_multiplier * sensitivity, self.adjacency)

    def _computed_noise(self, epsilon: float, delta: float) -> float:
        if self.earlier or self.opening is not None:
            beside = self._with_all_else(dp_accounting.NoOpDpEvent(), 1)
            spent = accountants.epsilon(beside, delta, self.adjacency).epsilon
            if spent >= epsilon * (1 - MARGIN):
                what = "earlier runs" if self.earlier else "query before the first step"
                raise DPConfigError(
                    f"The {what} spent epsilon {spent:.4g} at delta {delta:g}, and target_epsilon={epsilon:g} is for "
                    f"all together. {'Raise target_epsilon' if self.earlier else 'Use more query_noise'}."
                )

        def epsilon_at(noise_multiplier: float, relative_error: float) -> float:
            return self.epsilon(noise_multiplier, delta, relative_error=relative_error).epsilon

        precision = events.gaussian_precision(events.flatten(self.event(1.0))) if self.is_single_mechanism else None
        if precision is not None:
            return calibrate_gaussian(epsilon_at, epsilon, delta, precision, self.adjacency)
        return calibrate_noise_multiplier(epsilon_at, epsilon)


# --- as a ledger describes it ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReleaseRecord:
    """Entries of a plan in a ledger that fix what a run releases. Plain JSON values, all public.

    Attributes:
        num_examples: records, or places that are sampled, see `num_units`.
        sampler: `Sampler.parameters`.
        adjacency: which datasets are neighbours.
        privacy_unit, users: what is protected as a whole, and how users contribute; `users` is None for records.
        draw_stddev: stddev of the draws that are correlated / sensitivity of one step's sum; unitless.
        noise_strategy, noise_steps: `NoiseStrategy.parameters`, and the steps that it was made for.
        noise_rng: random stream of the noise.
        is_private: False without noise, or with a key that is known.
        opening_noise: noise multiplier of the query that every key begins with; None without one.
        tuned: law of the number of runs of which this one is the best; None for a run by itself.
    """

    num_examples: int
    sampler: Mapping[str, Any]
    adjacency: str
    privacy_unit: str
    users: Mapping[str, Any] | None
    draw_stddev: float
    noise_strategy: Mapping[str, Any]
    noise_steps: int
    noise_rng: str
    is_private: bool
    opening_noise: float | None = None
    tuned: Mapping[str, Any] | None = None

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Names of the entries."""
        return tuple(field.name for field in dataclasses.fields(cls))

    @property
    def unit(self) -> str:
        """Unit that is protected as a whole, with the column that tells users apart."""
        return self.privacy_unit + (f" by {self.users['column']}" if self.users else "")

    @property
    def num_units(self) -> int:
        """Records, or users, that are protected one by one."""
        places = 1 if self.users is None or self.users["sampled"] != "records" else self.users["records_per_user"]
        return self.num_examples // places

    @functools.cached_property
    def release(self) -> Release:
        """The release that was recorded, without the runs before it.

        Raises:
            DPConfigError: for what no run wrote.
        """
        fields = {name: value for name, value in self.sampler.items() if name != "name"}
        return Release(
            sampler=SAMPLERS[self.sampler["name"]](**fields),
            strategy=from_parameters(self.noise_strategy),
            steps=self.noise_steps,
            adjacency=self.adjacency,
            opening=self.opening_noise,
            tuned=None if self.tuned is None else RunCount.read(self.tuned),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class EarlierRun(ReleaseRecord):
    """A run on the same records that was charged before this one, as its ledger describes it.

    Attributes:
        ledger_digest: last record of its ledger when it was read; what it charged later is not counted.
        charged: steps of each of its chains.
    """

    ledger_digest: str
    charged: tuple[int, ...]

    @property
    def event(self) -> dp_accounting.DpEvent:
        """Event of everything that it released; the runs before it are counted for themselves."""
        return self.release.event_of_draws(self.draw_stddev, self.charged)

    @classmethod
    def from_json(cls, entries: Mapping[str, Any]) -> EarlierRun:
        """The run that `to_json` described."""
        known = {name: entries[name] for name in cls.names() if name in entries}
        return cls(**{**known, "charged": tuple(entries["charged"])})

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, from which `from_json` makes it again."""
        return {name: getattr(self, name) for name in self.names()} | {"charged": list(self.charged)}
