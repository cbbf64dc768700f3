"""Configuration of a private run: public values only, checked once, never changed."""

from __future__ import annotations

import dataclasses
import json
from collections import ChainMap
from collections.abc import Mapping
from typing import Any, Literal

from hf_dpopt.accounting.best_of_runs import RunCount
from hf_dpopt.clipping.thresholds import CLIPPINGS
from hf_dpopt.common.adjacency import Adjacency
from hf_dpopt.common.checks import (
    check_choice,
    check_clipping_norm,
    check_count,
    check_kind,
    check_mapping,
    check_noise_key,
    check_noise_multiplier,
)
from hf_dpopt.common.errors import DPConfigError, shown
from hf_dpopt.common.errors import PrivacyWarning as PrivacyWarning
from hf_dpopt.noise import MECHANISMS
from hf_dpopt.plan.local_training import LocalTraining
from hf_dpopt.plan.options import (
    OPTIONS,
    ClippingName,
    NoiseAtChanges,
    PrivacyUnit,
    UserWeighting,
    copy_option,
    documented,
)
from hf_dpopt.plan.private_metrics import PrivateMetrics
from hf_dpopt.plan.size_limits import check_budget
from hf_dpopt.preclip import PRECLIPS, make_preclip
from hf_dpopt.sampling import SAMPLERS

AUTO = {"auto": None}
_MAPPINGS = {  # option -> example
    "noise_kwargs": '{"num_buffers": 3}',
    "preconditioner_kwargs": '{"delay": 200}',
    "private_metrics_kwargs": '{"loss_bound": 2}',
}
REGISTRIES: dict[str, Mapping[str, Any]] = {  # option -> names that are allowed, besides its choices
    "clipping": CLIPPINGS,
    "sampling": ChainMap(SAMPLERS, AUTO),
    "noise_mechanism": ChainMap(MECHANISMS, AUTO),
    "preconditioner": PRECLIPS,
}


def check_choices(values: Mapping[str, Any]) -> None:
    """Refuse a value that is not among the choices of its option, or a name that nobody registered.

    Args:
        values: option -> value.
    """
    for name, value in values.items():
        if allowed := (*OPTIONS[name].metadata.get("choices", ()), *REGISTRIES.get(name, ())):
            check_choice(name, value, allowed)


@documented
@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivacyConfig:
    """The privacy side of a run. Holds public values only: nothing here depends on the data or is secret.

    Exactly one of ``target_epsilon`` and ``noise_multiplier`` is given; `make_plan` computes the other. A value out of
    range raises `DPConfigError`, which says what is allowed.
    """

    target_epsilon: float | None = copy_option("target_epsilon")
    target_delta: float | None = copy_option("target_delta")
    allow_large_delta: bool = copy_option("allow_large_delta")
    tuned_runs: float | None = copy_option("tuned_runs")
    noise_multiplier: float | None = copy_option("noise_multiplier")
    clipping_norm: float = copy_option("clipping_norm")
    clipping: ClippingName = copy_option("clipping")
    expected_batch_size: int = dataclasses.field(metadata=OPTIONS["expected_batch_size"].metadata)
    sampling: str = copy_option("sampling")
    adjacency: Adjacency | Literal["auto"] = copy_option("adjacency")
    privacy_unit: PrivacyUnit = copy_option("privacy_unit")
    user_id_column: str | None = copy_option("user_id_column")
    records_per_user: int | None = copy_option("records_per_user")
    user_weighting: UserWeighting = copy_option("user_weighting")
    local_training: Mapping[str, Any] | None = copy_option("local_training")
    noise_mechanism: str = copy_option("noise_mechanism")
    noise_kwargs: Mapping[str, Any] = copy_option("noise_kwargs")
    noise_restart_every: int | None = copy_option("noise_restart_every")
    noise_at_changes: NoiseAtChanges = copy_option("noise_at_changes")
    preconditioner: str = copy_option("preconditioner")
    preconditioner_kwargs: Mapping[str, Any] = copy_option("preconditioner_kwargs")
    log_private_metrics: float | None = copy_option("log_private_metrics")
    private_metrics_kwargs: Mapping[str, Any] = copy_option("private_metrics_kwargs")
    amplification_samples: int = copy_option("amplification_samples")
    unsafe_fixed_noise_key: str | None = copy_option("unsafe_fixed_noise_key")

    def __post_init__(self) -> None:
        self._check_noise()
        self._check_numbers()
        self._check_choices()
        _ = self.tuned  # refuses a mean out of range
        if self.unsafe_fixed_noise_key is not None:
            check_noise_key(self.unsafe_fixed_noise_key)

    def num_units(self, num_sampled: int) -> int:
        """Records or users that are protected one by one, of what batches are drawn from.

        Args:
            num_sampled: records, users, or places for the records of users.
        """
        return max(1, num_sampled // (self.records_per_user or 1)) if self.samples_records_of_users else num_sampled

    @property
    def samples_records_of_users(self) -> bool:
        """Whether batches are drawn of the records of users, in place of whole users."""
        return self.privacy_unit == "user" and self.sampling == "capped_poisson"

    @property
    def tuned(self) -> RunCount | None:
        """Law of the number of runs of which the best is released; None for a run that is released as it is."""
        return None if self.tuned_runs is None else RunCount(mean=self.tuned_runs)

    @property
    def is_private(self) -> bool:
        """False when the noise is absent or can be recomputed; epsilon is then infinite."""
        return self.noise_multiplier != 0 and self.unsafe_fixed_noise_key is None

    @property
    def mechanism_options(self) -> dict[str, Any]:
        """Options of the noise mechanism itself, out of `noise_kwargs`."""
        return {name: value for name, value in self.noise_kwargs.items() if name != "backend"}

    @property
    def noise_backend(self) -> str:
        """Backend that keeps the noise of earlier steps; see `NoiseStrategy.stream`."""
        return str(self.noise_kwargs.get("backend", "auto"))

    def _check_noise(self) -> None:
        if (self.target_epsilon is None) == (self.noise_multiplier is None):
            given = "Neither of target_epsilon and noise_multiplier is"
            if self.target_epsilon is not None:
                given = "Both target_epsilon and noise_multiplier are"
            raise DPConfigError(
                f"{given} given. Give exactly one: target_epsilon=8.0 "
                "calibrates the noise to a budget, noise_multiplier=1.0 fixes it and epsilon is what comes out."
            )
        if self.noise_multiplier is not None:
            check_noise_multiplier(self.noise_multiplier)
        check_budget(self.target_epsilon, self.target_delta)

    def _check_numbers(self) -> None:
        check_clipping_norm("clipping_norm", self.clipping_norm)
        check_count(
            "expected_batch_size",
            self.expected_batch_size,
            "an integer >= 1: the records of one optimizer step on average, over all devices and accumulation steps",
        )
        if self.amplification_samples != 0:
            what = "an integer such as 4000000, or 0 for the computed bound alone"
            check_count("amplification_samples", self.amplification_samples, what)
        check_kind("allow_large_delta", self.allow_large_delta, bool)

    def _check_choices(self) -> None:
        check_choices({field.name: getattr(self, field.name) for field in dataclasses.fields(self)})
        for name, example in _MAPPINGS.items():
            object.__setattr__(self, name, _plain_options(name, getattr(self, name), example))
        make_preclip(self.preconditioner, self.preconditioner_kwargs)  # refuses what it does not know
        if self.noise_restart_every is not None:
            check_count("noise_restart_every", self.noise_restart_every)
        self._check_users()
        self._check_private_metrics()

    @property
    def private_metrics(self) -> PrivateMetrics | None:
        """Noisy numbers about the units of a step; None for none.

        Raises:
            DPConfigError: if no bound on a loss was declared.
        """
        return PrivateMetrics.of(self.log_private_metrics, self.private_metrics_kwargs)

    def _check_private_metrics(self) -> None:
        any_bound = {"loss_bound": 1.0} if self.log_private_metrics is not None else {}  # a trainer knows it later
        checked = PrivateMetrics.of(self.log_private_metrics, {**any_bound, **self.private_metrics_kwargs})
        if checked is not None and self.local_training is not None:
            raise DPConfigError(
                f"log_private_metrics={self.log_private_metrics} has no loss to sum where users train: they give how "
                "far their weights moved. Leave log_private_metrics out, or local_training."
            )

    def _check_users(self) -> None:
        if self.local_training is not None:
            options = _plain_options("local_training", self.local_training, '{"learning_rate": 0.1}')
            object.__setattr__(self, "local_training", options)
            if self.privacy_unit != "user" or self.sampling == "capped_poisson":
                raise DPConfigError(
                    "Local training is on the records of one user: add privacy_unit='user' and sample users (any "
                    "sampling but 'capped_poisson'), or leave local_training out."
                )
            LocalTraining.of(options)
        if self.privacy_unit == "user":
            what = "an integer >= 1: the records of a user that take part in a step, at most"
            check_count("records_per_user", self.records_per_user, what)
        elif self.sampling == "capped_poisson":
            raise DPConfigError(
                "sampling='capped_poisson' samples records and protects users. Add privacy_unit='user', or use "
                "sampling='poisson'."
            )
        elif self.records_per_user is not None:
            raise DPConfigError(
                f"records_per_user={self.records_per_user} is for privacy_unit='user', and the unit is "
                f"{self.privacy_unit!r}. Add privacy_unit='user', or leave it out."
            )


def _plain_options(field: str, options: Any, example: str) -> dict[str, Any]:
    """Options as a ledger would give them back; None has none."""
    given = check_mapping(field, {} if options is None else options, example)
    try:
        return json.loads(json.dumps(dict(given), default=lambda value: value.tolist()))
    except (TypeError, ValueError, AttributeError):
        raise DPConfigError(
            f"{field}={shown(options)} is not JSON-serialisable. Use numbers, strings and lists."
        ) from None
