"""The plan of a config: candidates for what it leaves open, their scores, and the plan with the best of them.

Open are the mechanism (``noise_mechanism="auto"``), the sampler and the adjacency, how many bands a sampler of groups
has, and the way of correlated noise across changes of the scale. All of it is decided from public numbers, before the
first step, and a run that goes on takes what was recorded.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from hf_dpopt.accounting.certificates import Certificate
from hf_dpopt.accounting.delta import resolve_delta
from hf_dpopt.clipping.thresholds import make_clipping
from hf_dpopt.common.checks import check_at_most, check_noise_multiplier, check_positive
from hf_dpopt.common.errors import DPBudgetExceeded, DPConfigError, PrivacyWarning
from hf_dpopt.noise import MECHANISMS, NoiseStrategy, Setting, Workload, banded, from_parameters, is_whole
from hf_dpopt.noise.gaussian import IdentityStrategy
from hf_dpopt.noise.registry import is_independent, make_strategy
from hf_dpopt.plan.compare import ComparedNoise, ranked
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.plan.plan import PrivacyPlan
from hf_dpopt.plan.record import PlanRecord
from hf_dpopt.plan.release import EarlierRun, Release
from hf_dpopt.plan.size_limits import check_sizes
from hf_dpopt.preclip import Preclip, ScaleChanges, make_preclip
from hf_dpopt.sampling import SAMPLERS, Sampler

SPENT = 0.9  # of a budget that calibration spends, at least
MAX_CHOSEN_BANDS = 16  # each but the first keeps a copy of the gradient; more have to be asked for
MOST_APART = 3.0  # of the factors of two phases; beyond, noise that is carried on leaves more than one that restarts
MAX_COMPARED_STEPS = 10**5  # of a run whose mechanisms are compared, each tuned for it


def make_plan(
    config: PrivacyConfig,
    *,
    num_examples: int,
    num_steps: int,
    workload: Workload | None = None,
    recorded: PlanRecord | None = None,
    preclip: Preclip | None = None,
    advised: Mapping[str, Any] | None = None,
    earlier: Sequence[EarlierRun] = (),
) -> PrivacyPlan:
    """Build the plan of a run, calibrating the noise where a budget was given.

    Args:
        config: what was asked for.
        num_examples: records in the training set, or users if they are what is sampled; >= 1. Treated as public.
        num_steps: optimizer steps of the whole run; >= 1.
        workload: what the optimizer makes of the gradients, for which correlated noise is tuned; it has no influence
            on privacy. None for plain sums.
        recorded: `PrivacyPlan.record` of the run that this one continues; it keeps that noise, and that delta
            unless another is asked for. ``target_epsilon`` stays the budget, but `PrivacyPlan.epsilon` may exceed it.
        preclip: a preconditioner of one's own; None for the one that ``config`` names.
        advised: options that were chosen for the user, which the plan notes down; see `hf_dpopt.plan.advice`.
        earlier: runs on the same records that were charged before: ``target_epsilon`` is for them and this run.

    Raises:
        DPConfigError: for a combination without a privacy proof, or values out of range, a delta above 1/n among them.
        DPBudgetExceeded: for more steps than the recorded noise was made for.

    Warns:
        PrivacyWarning: if delta is 1/n or more, n the number of records or users that are protected; if a budget is
            larger than what the accountant can spend.
    """
    run: dict[str, Any] = dict(
        num_examples=num_examples, num_steps=num_steps, workload=workload, preclip=preclip, earlier=tuple(earlier)
    )
    if config.noise_mechanism == "auto" and recorded is None:
        best = compare_mechanisms(config, **run)[0].plan.config
        config = dataclasses.replace(best, amplification_samples=config.amplification_samples)
    if recorded is not None:
        config = _as_recorded(config, recorded)
    made = _Choice(config, recorded=recorded, **run).plan(advised=advised)
    if recorded is None and config.target_epsilon is not None and made.is_private:
        _warn_of_unspent(made.epsilon(), config.target_epsilon)
    return made


def compare_mechanisms(
    config: PrivacyConfig,
    *,
    num_examples: int,
    num_steps: int,
    workload: Workload | None = None,
    preclip: Preclip | None = None,
    earlier: Sequence[EarlierRun] = (),
) -> list[ComparedNoise]:
    """Mechanisms at the same budget, the best score first; of those as good, the one that keeps least.

    Args:
        config: budget, batch size, and what else was asked for: a sampler or an adjacency leaves the others out.
        num_examples, num_steps: size of the training set and length of the run.
        workload: what the optimizer makes of the gradients; None for plain sums.
        preclip: a preconditioner of one's own, which may ask for more noise, or for noise that starts anew; None for
            the one that ``config`` names.
        earlier: runs on the same records that the budget includes.

    Raises:
        DPConfigError: without a budget, or if no mechanism fits what was asked for.
    """
    if config.target_epsilon is None:
        raise DPConfigError("Mechanisms are compared at the same budget: give target_epsilon, not noise_multiplier.")
    _refuse_options_of_auto(config)
    check_at_most(
        "num_steps", num_steps, MAX_COMPARED_STEPS,
        "so long a run takes minutes to compare. Name a mechanism: gaussian, or nu_dpftrl up to 1,000,000 steps.",
    )  # fmt: skip
    plans, refused = [], []
    for name, sampling in all_candidates():
        longest = MECHANISMS[name].max_compared_steps
        if config.sampling not in ("auto", sampling) or (longest is not None and num_steps > longest):
            continue
        # computed bounds alone: to draw samples for every row would take minutes, and prove the same order
        asked = dataclasses.replace(config, noise_mechanism=name, sampling=sampling, amplification_samples=0)
        choice = _Choice(
            asked, num_examples=num_examples, num_steps=num_steps, workload=workload, preclip=preclip,
            earlier=tuple(earlier),
        )  # fmt: skip
        try:
            plans.append(choice.plan())
        except DPConfigError as error:
            refused.append(f"{name}: {error}")
    if not plans:
        raise DPConfigError(f"No mechanism fits what was asked for. {' '.join(refused)}")
    return ranked(plans, workload)


def all_candidates() -> list[tuple[str, str]]:
    """Pairs of (mechanism, sampler) to compare; the others are for research, or were never better."""
    return [(name, sampling) for name, made in MECHANISMS.items() for sampling in made.compared_with]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Choice:
    """A run whose mechanism has a name, and the choice of the rest; arguments as for `make_plan`."""

    config: PrivacyConfig = dataclasses.field(kw_only=False)
    num_examples: int
    num_steps: int
    workload: Workload | None
    preclip: Preclip | None
    earlier: tuple[EarlierRun, ...]
    recorded: PlanRecord | None = None

    @functools.cached_property
    def delta(self) -> float:
        """Delta of the guarantee."""
        unit = self.config.privacy_unit
        return resolve_delta(
            self.config.target_delta,
            self.config.num_units(self.num_examples),
            allow_large=self.config.allow_large_delta,
            recorded=None if self.recorded is None else self.recorded.delta,
            unit="record" if unit == "example" else unit,
        )

    @functools.cached_property
    def stage(self) -> Preclip:
        """The preconditioner."""
        recorded = None if self.recorded is None else self.recorded.preclip
        return self.preclip or make_preclip(
            self.config.preconditioner, self.config.preconditioner_kwargs, self.num_steps, recorded
        )

    @functools.cached_property
    def changes(self) -> ScaleChanges | None:
        """Changes of the coordinates of the clip; None for never."""
        return self.stage.changes(self.config.clipping_norm)

    def plan(self, advised: Mapping[str, Any] | None = None) -> PrivacyPlan:
        """Plan with noise for the budget."""
        check_sizes(self.num_examples, self.num_steps)
        self.stage.check_steps(self.num_steps)
        config, release = self._settled()
        self.stage.check_config(config)
        check_earlier(self.earlier, config, release.sampler)
        if release.horizon is not None and self.num_steps > release.horizon:
            raise DPBudgetExceeded(
                f"The {config.noise_mechanism} noise of this run was made for {release.horizon} steps, and "
                f"{self.num_steps} were asked for. Stop there, or start over in another output_dir (its cost adds up)."
            )
        noise_multiplier, proof = self._noise(config, release)
        plan = PrivacyPlan(
            config=config, release=release, num_steps=int(self.num_steps), delta=self.delta, certificate=proof,
            noise_multiplier=noise_multiplier, clipper=make_clipping(config.clipping, config.clipping_norm),
            preclip=self.stage, advised=dict(advised or {}),
        )  # fmt: skip
        _ = plan.mechanism, plan.sensitivity_ratio  # they refuse now what would fail in the first step
        return plan

    def _noise(self, config: PrivacyConfig, release: Release) -> tuple[float, Certificate | None]:
        """Noise multiplier, and a proof by samples of a smaller epsilon than the computed one; None without."""
        given, recorded, samples = config.noise_multiplier, self.recorded, config.amplification_samples
        if recorded is not None:
            given = recorded.noise_multiplier if given is None else given
            proof = _kept_certificate(recorded, release.strategy)
        else:
            proof = None
            if given is None:
                assert config.target_epsilon is not None
                given, proof = release.calibrate(config.target_epsilon, self.delta, num_samples=samples)
            if proof is None and config.is_private:
                proof = release.certify(given, self.delta, num_samples=samples)
        check_noise_multiplier(given)
        if proof is not None and not release.is_proven_by(proof, given, self.num_steps, self.delta):
            proof = None  # a run that was made longer has none
        return given, proof

    def _way_across(self, sampler: Sampler) -> Any:
        """Value of `noise_at_changes` that "auto" stands for: carry on where that is proven, and taken back later."""
        config, changes = self.config, self.changes
        if is_independent(config.noise_mechanism):
            return "auto"
        if changes is None:
            if config.noise_at_changes != "auto":
                raise DPConfigError(
                    f"noise_at_changes={config.noise_at_changes!r}, and no scale changes in this run: there is no "
                    "preconditioner, or a fixed one. Leave it out."
                )
            return "auto"
        if config.noise_at_changes != "auto":
            return config.noise_at_changes
        if self.recorded is not None:
            return self.recorded.noise_at_changes or "restart"
        if changes.every == 1:
            return "carry_on"
        if config.noise_restart_every is not None:
            return "carry_on" if changes.every % config.noise_restart_every else "restart"
        is_taken_back = changes.is_taken_back and max(changes.factors) <= MOST_APART * min(changes.factors)
        return "carry_on" if is_taken_back and sampler.takes_changing_scales else "restart"

    def _settled(self) -> tuple[PrivacyConfig, Release]:
        """The config without "auto", and everything that it releases.

        Raises:
            DPConfigError: if it has no proof, or for options that the mechanism does not know.
        """
        sampler = make_sampler(self.config, self.num_examples)
        config = dataclasses.replace(self.config, noise_at_changes=self._way_across(sampler))
        if config.noise_at_changes == "restart":
            assert self.changes is not None
            config = _restarted(config, self.changes.every)
        mechanism, options = MECHANISMS[config.noise_mechanism], config.mechanism_options
        if is_independent(config.noise_mechanism) and options != config.noise_kwargs:
            raise DPConfigError("Independent noise keeps nothing: leave backend out of noise_kwargs.")
        kept = self._kept_strategy(config)
        adjacency: Any = sampler.adjacencies[0] if config.adjacency == "auto" else config.adjacency
        if sampler.has_groups and mechanism.num_bands_of is not None:
            if self.recorded is not None and kept is not None:  # a strategy may have fewer bands than there are groups
                num_bands = self.recorded.sampler.get("num_groups", 1)
            elif (num_bands := mechanism.num_bands_of(options)) is None:
                if config.target_epsilon is None:
                    raise DPConfigError(
                        "How many bands are best depends on the budget, and noise_multiplier gives none. Use "
                        "target_epsilon, or say how many: noise_kwargs={'num_bands': 8}."
                    )
                num_bands = options["num_bands"] = choose_num_bands(
                    sampler, self.num_steps, config.target_epsilon, self.delta, adjacency=adjacency,
                    workload=self.workload, max_bands=MAX_CHOSEN_BANDS,
                )  # fmt: skip
            sampler = sampler.with_groups(num_bands)
        strategy, steps = kept or (self._tuned_strategy(config, sampler, options), int(self.num_steps))
        check_sizes(self.num_examples, steps)  # which a recorded plan names
        if self.stage.opening is not None:
            check_positive(noise_multiplier_of_the_opening_query=self.stage.opening.noise_multiplier)
        release = Release(
            sampler=sampler, strategy=strategy, steps=steps, adjacency=adjacency, tuned=config.tuned,
            opening=None if self.stage.opening is None else self.stage.opening.noise_multiplier, earlier=self.earlier,
        )  # fmt: skip
        if config.noise_at_changes == "carry_on" and not sampler.takes_changing_scales:
            raise DPConfigError(
                f"Correlated noise that goes on where scales change has no proof with sampling={sampler.name!r}. "
                "Use sampling='fixed_order', or noise_at_changes='restart'."
            )
        return dataclasses.replace(config, sampling=sampler.name, adjacency=adjacency), release

    def _tuned_strategy(self, config: PrivacyConfig, sampler: Sampler, options: dict[str, Any]) -> NoiseStrategy:
        setting = Setting(
            num_steps=int(self.num_steps),
            participation=sampler.participation(self.num_steps),
            workload=self.workload,
            backend=config.noise_backend,
        )
        return make_strategy(config.noise_mechanism, setting, options, restart_every=config.noise_restart_every)

    def _kept_strategy(self, config: PrivacyConfig) -> tuple[NoiseStrategy, int] | None:
        """Strategy and steps of the run that is continued, if the same noise was asked for in the same words.

        If not, what was asked for now is made, and the ledger will refuse it.
        """
        recorded = self.recorded
        if recorded is None or not is_whole(recorded.noise_strategy):
            return None
        names = ("noise_mechanism", "noise_kwargs", "noise_restart_every")
        if any(getattr(config, name) != getattr(recorded, name) for name in names):
            return None
        return from_parameters(recorded.noise_strategy), int(recorded.noise_steps)


def make_sampler(config: PrivacyConfig, num_examples: int) -> Sampler:
    """The sampler a config names; of several groups, with one group."""
    name = MECHANISMS[config.noise_mechanism].sampler if config.sampling == "auto" else config.sampling
    given = {field: getattr(config, field) for field in SAMPLERS[name].takes}
    return SAMPLERS[name](num_examples=int(num_examples), expected_batch_size=int(config.expected_batch_size), **given)


def choose_num_bands(
    sampler: Sampler, num_steps: int, epsilon: float, delta: float, *, adjacency: str = "add_or_remove_one",
    workload: Workload | None = None, max_bands: int | None = None,
) -> int:  # fmt: skip
    """Number of bands, and groups of a cyclic sampler, with the least error for a budget.

    More bands correlate the noise of more steps, but a record is then sampled from a smaller group, more often. Looks
    through powers of two, and the bands with which every group is one batch, which is no sampling at all.

    Args:
        sampler: one of groups, of any number.
        num_steps: length of the run.
        epsilon, delta: the budget.
        adjacency: one that the sampler has a proof for.
        workload: what the bands are tuned for; None for prefix sums.
        max_bands: limit of the memory, for every band but the first keeps a copy of the gradient; None for no limit.

    References:
        Choquette-Choo et al. (2023), arXiv:2306.08153, Section 5.
    """

    def noise_multiplier_of(num_bands: int) -> float:
        """Noise of so many groups: columns of norm 1 meet a record one at a time, as independent draws do."""
        grouped = sampler.with_groups(num_bands)
        release = Release(sampler=grouped, strategy=IdentityStrategy(), steps=num_steps, adjacency=adjacency)
        return release.calibrate(epsilon, delta)[0]

    most = max(1, min(num_steps, sampler.num_examples // sampler.expected_batch_size, max_bands or num_steps))
    return banded.choose_num_bands(num_steps, most, noise_multiplier_of, workload)


def check_earlier(runs: Sequence[EarlierRun], config: PrivacyConfig, sampler: Sampler) -> None:
    """Refuse earlier runs on another data set, or with another promise.

    Args:
        runs: what was charged before.
        config: what is asked for now; its adjacency is no longer "auto".
        sampler: sampler of this run.

    Raises:
        DPConfigError: if they do not protect the same units of as many records in the same sense.
    """
    unit = config.privacy_unit + (f" by {config.user_id_column}" if config.privacy_unit == "user" else "")
    now = (config.num_units(sampler.num_examples), unit, config.adjacency)
    for run in runs:
        was = (run.num_units, run.unit, run.adjacency)
        if was != now:
            raise DPConfigError(
                f"An earlier run protected {was[0]:,} units ({was[1]}, {was[2]}), this one {now[0]:,} ({now[1]}, "
                f"{now[2]}): such costs cannot be composed. Use the same training set and unit, and --adjacency "
                f"{was[2]}; or leave earlier_runs out and add up epsilon and delta."
            )


def _restarted(config: PrivacyConfig, changes_every: int) -> PrivacyConfig:
    """Noise that starts anew wherever the coordinates change.

    Raises:
        DPConfigError: for restarts of one's own at other steps, and where every step would be one.
    """
    if changes_every == 1:
        raise DPConfigError(
            "noise_at_changes='restart' would start the noise anew in every step, for the scale changes in every "
            "step. Use noise_at_changes='carry_on', or noise_mechanism='gaussian'."
        )
    every = config.noise_restart_every
    if every is None:
        return dataclasses.replace(config, noise_restart_every=changes_every)
    if changes_every % every:
        raise DPConfigError(
            f"noise_restart_every={every} does not meet every change of the preconditioner, which is after "
            f"{changes_every} steps. Leave it out, use a divisor of {changes_every}, or noise_at_changes='carry_on'."
        )
    return config


def _warn_of_unspent(epsilon: float, target: float) -> None:
    """Warn of a budget so large that the accountant has no bound between what is spent and infinity."""
    if epsilon < SPENT * target:
        warnings.warn(
            f"target_epsilon={target:g} is more than this accountant can spend: with less noise than that of epsilon "
            f"{epsilon:.4g} its bound is infinite, so the run has that. A target_epsilon of 1 to 8 is usual.",
            PrivacyWarning,
            stacklevel=3,
        )


# --- a run that goes on ----------------------------------------------------------------------------------------------


def _as_recorded(config: PrivacyConfig, recorded: PlanRecord) -> PrivacyConfig:
    """Replace "auto" by what the recorded run decided on."""
    if config.noise_mechanism != "auto":
        return config
    _refuse_options_of_auto(config)
    return dataclasses.replace(
        config,
        noise_mechanism=recorded.noise_mechanism,
        noise_kwargs=recorded.noise_kwargs,
        noise_restart_every=recorded.noise_restart_every,
        sampling=recorded.sampler["name"] if config.sampling == "auto" else config.sampling,
        adjacency=recorded.adjacency if config.adjacency == "auto" else config.adjacency,  # type: ignore[arg-type]
    )


def _refuse_options_of_auto(config: PrivacyConfig) -> None:
    """Options are of a mechanism, and "auto" is none yet."""
    if config.noise_kwargs or config.noise_restart_every is not None:
        raise DPConfigError(
            "noise_mechanism='auto' chooses the options, too: leave noise_kwargs and noise_restart_every out, or name "
            f"the mechanism they are for ({', '.join(MECHANISMS)})."
        )


def _kept_certificate(recorded: PlanRecord, strategy: NoiseStrategy) -> Certificate | None:
    """The proof that the run began with: samples taken after its first step would prove less."""
    same_noise = json.loads(json.dumps(strategy.parameters())) == recorded.noise_strategy
    if recorded.certificate is None or not same_noise:  # other noise is refused by the ledger
        return None
    return Certificate.read(recorded.certificate, strategy)
