"""What the user asks for: public values only, checked once, never changed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal, get_args

from hf_dpopt.clipping.thresholds import CLIPPINGS
from hf_dpopt.common.adjacency import Adjacency
from hf_dpopt.common.checks import (
    check_clipping_norm,
    check_count,
    check_noise_key,
    check_noise_multiplier,
    check_real,
)
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.errors import PrivacyWarning as PrivacyWarning
from hf_dpopt.noise import MECHANISMS
from hf_dpopt.plan.local_training import LocalTraining
from hf_dpopt.preclip import make_preclip
from hf_dpopt.sampling import SAMPLERS

ClippingName = Literal["flat", "per_layer", "automatic"]
NoiseRng = Literal["secure", "fast"]
PrivacyUnit = Literal["example", "user", "block"]
UserWeighting = Literal["constant", "mean"]
Sampling = Literal[
    "auto", "poisson", "truncated_poisson", "fixed_order", "capped_poisson", "cyclic_poisson", "balls_in_bins"
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrivacyConfig:
    """The privacy side of a run. Holds public values only: nothing here depends on the data or is secret.

    Exactly one of ``target_epsilon`` and ``noise_multiplier`` is given; `make_plan` computes the other.

    Args:
        target_epsilon: budget for the whole run; > 0. The noise is calibrated so that the planned run stays within it.
        target_delta: in (0, 1), and at most 1/n for n records (users, if they are the unit). None takes
            ``min(n^-1.1, 1 / (10 n))`` rounded down to one digit, which tells the reader of the privacy statement n to
            one digit: 1e-6 stands for 50,001 to 100,000 records, 9e-7 for 100,001 to 111,111.
        allow_large_delta: accept a target_delta above 1/n, which a run that publishes a record outright would keep;
            the statement says so.
        noise_multiplier: noise stddev / sensitivity (unitless), >= 0. 0.0 adds no noise at all: NOT PRIVATE, and
            epsilon is infinite; it is there for comparisons.
        clipping_norm: bound C on the L2 norm of one record's gradient (gradient units); from 1e-10 to 1e10,
            between which norms in float32 can be held to it.
        clipping: how one record's gradient is bounded: ``flat`` (one norm over all parameters), ``per_layer`` or
            ``automatic`` (normalised instead of clipped).
        expected_batch_size: records per logical batch on average, over all devices and accumulation steps; >= 1.
            The noisy sum is divided by this public number, never by the realised size.
        sampling: how logical batches are formed. ``auto`` is what the noise mechanism is made for; for independent
            noise ``truncated_poisson``: Poisson sampling with a cap on the batch size that costs next to nothing.
            ``fixed_order`` fixes the order once and claims no amplification. ``cyclic_poisson`` lets groups of records
            take turns, for banded noise; ``balls_in_bins`` puts every record into one batch of the epoch, secretly and
            once, for noise with coefficients >= 0. With users as the unit, ``capped_poisson`` samples and clips
            records, of which a user has at most ``records_per_user`` from the first step to the last (example-level
            sampling); `expected_batch_size` counts records then. All others sample users.
        adjacency: ``add_or_remove_one`` (one record more or less), ``zero_out`` (one record without gradient, dataset
            size public) or ``replace_one`` (one record swapped, sensitivity 2C). ``auto`` is the first of these that
            the sampler has a proof for.
        privacy_unit: what is protected as a whole: ``example``, one record, ``user``, all records with one user id,
            or ``block``, one row that is a block or a window of text: it may hold several documents, and a document
            may lie in several of them. With users, `expected_batch_size` counts users, and neighbouring datasets
            differ in one whole user.
        user_id_column: which column says whose a record is; for the ledger and the privacy statement.
        records_per_user: records of a user that take part in a step, at most; chosen anew in every step. For users
            only; >= 1.
        user_weighting: how the records of a user add up to the gradient that is clipped: ``constant``, each with
            weight 1 / records_per_user, so that a user with few records counts less; or ``mean``.
        local_training: options of SGD on the records of each user (``learning_rate``, ``batch_size``, ``epochs``,
            ``steps``), after which the user gives how far the weights moved; None gives the gradient.
        noise_mechanism: name in the registry `hf_dpopt.noise.MECHANISMS`, or ``auto`` for the one that
            `hf_dpopt.plan.compare` takes for the run.
        noise_kwargs: options of the mechanism (``nu``, ``num_buffers``, ``num_bands`` ...), and ``backend``, ``block``
            and ``offload`` of its stream (`hf_dpopt.noise.streams.make_stream`).
        noise_restart_every: steps after which correlated noise starts anew; None for never.
        noise_rng: ``secure`` (cryptographic stream) or ``fast`` (the framework's generator, labelled as such).
        preconditioner: what divides a record's gradient before the clip: a name in `hf_dpopt.preclip.PRECLIPS`.
        preconditioner_kwargs: its options (``delay``, ``clipping_norm``, ``learning_rate_ratio``, ``factored`` ...).
        unsafe_fixed_noise_key: 64 hexadecimal digits that replace the operating system's randomness. For tests only:
            the run is stamped NOT PRIVATE and its epsilon is infinite.

    Raises:
        DPConfigError: for a value outside the ranges above; the message says what is allowed.
    """

    target_epsilon: float | None = None
    target_delta: float | None = None
    allow_large_delta: bool = False
    noise_multiplier: float | None = None
    clipping_norm: float = 1.0
    clipping: ClippingName = "flat"
    expected_batch_size: int
    sampling: Sampling = "auto"
    adjacency: Adjacency | Literal["auto"] = "auto"
    privacy_unit: PrivacyUnit = "example"
    user_id_column: str | None = None
    records_per_user: int | None = None
    user_weighting: UserWeighting = "constant"
    local_training: Mapping[str, Any] | None = None
    noise_mechanism: str = "gaussian"
    noise_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    noise_restart_every: int | None = None
    noise_rng: NoiseRng = "secure"
    preconditioner: str = "none"
    preconditioner_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unsafe_fixed_noise_key: str | None = None

    def __post_init__(self) -> None:
        self._check_noise()
        self._check_numbers()
        self._check_choices()
        if self.unsafe_fixed_noise_key is not None:
            check_noise_key(self.unsafe_fixed_noise_key)

    def num_units(self, num_sampled: int) -> int:
        """Records or users that are protected one by one, of what batches are drawn from.

        Args:
            num_sampled: records, users, or places for the records of users.
        """
        in_places = self.privacy_unit == "user" and self.sampling == "capped_poisson"
        return max(1, num_sampled // (self.records_per_user or 1)) if in_places else num_sampled

    @property
    def is_private(self) -> bool:
        """False when the noise is absent or can be recomputed; epsilon is then infinite."""
        return self.noise_multiplier != 0 and self.unsafe_fixed_noise_key is None

    def _check_noise(self) -> None:
        if (self.target_epsilon is None) == (self.noise_multiplier is None):
            given = "neither" if self.target_epsilon is None else "both"
            raise DPConfigError(
                f"{given} of target_epsilon and noise_multiplier given. Give exactly one: target_epsilon=8.0 "
                "calibrates the noise to a budget, noise_multiplier=1.0 fixes it and epsilon is what comes out."
            )
        if self.target_epsilon is not None:
            check_real("target_epsilon", self.target_epsilon, "a finite number > 0; 1 to 8 is usual for finetuning")
            if self.target_epsilon <= 0:
                raise DPConfigError(
                    f"target_epsilon={self.target_epsilon} is not a budget. Use a finite number > 0; 1 to 8 is usual "
                    "for finetuning. To train without privacy use the stock Trainer."
                )
        if self.noise_multiplier is not None:
            check_noise_multiplier(self.noise_multiplier)

    def _check_numbers(self) -> None:
        check_clipping_norm("clipping_norm", self.clipping_norm)
        check_count(
            "expected_batch_size",
            self.expected_batch_size,
            "an integer >= 1: the records of one optimizer step on average, over all devices and accumulation steps",
        )
        if not isinstance(self.allow_large_delta, bool):
            raise DPConfigError(
                f"allow_large_delta={self.allow_large_delta!r} is not a yes or no. Use True or False; True accepts a "
                "delta above 1 / number of records."
            )
        if self.target_delta is not None:
            check_real("target_delta", self.target_delta, "a number in (0, 1), at most 1 / number of records")
            if not 0 < self.target_delta < 1:
                raise DPConfigError(
                    f"target_delta={self.target_delta} is outside (0, 1). Use at most 1 / number of records, or leave "
                    "it out to get a tenth of that, rounded down to one digit."
                )

    def _check_choices(self) -> None:
        choices: dict[str, tuple[str, ...]] = {
            "clipping": tuple(CLIPPINGS),
            "sampling": ("auto", *SAMPLERS),
            "adjacency": ("auto", *get_args(Adjacency)),
            "privacy_unit": get_args(PrivacyUnit),
            "user_weighting": get_args(UserWeighting),
            "noise_mechanism": (*MECHANISMS, "auto"),
            "noise_rng": get_args(NoiseRng),
        }
        for field, allowed in choices.items():
            value = getattr(self, field)
            if value not in allowed:
                raise DPConfigError(f"{field}={value!r} is unknown. Use one of: {', '.join(map(repr, allowed))}.")
        for field, example in (("noise_kwargs", '{"num_buffers": 3}'), ("preconditioner_kwargs", '{"delay": 200}')):
            object.__setattr__(self, field, _plain_options(field, getattr(self, field), example))
        make_preclip(self.preconditioner, self.preconditioner_kwargs)  # refuses what it does not know
        if self.noise_restart_every is not None:
            check_count("noise_restart_every", self.noise_restart_every)
        self._check_users()

    def _check_users(self) -> None:
        if self.local_training is not None:
            options = _plain_options("local_training", self.local_training, '{"learning_rate": 0.1}')
            object.__setattr__(self, "local_training", options)
            if self.privacy_unit != "user" or self.sampling == "capped_poisson":
                raise DPConfigError(
                    "Local training is on the records of one user: add privacy_unit='user' and sample users (any "
                    "sampling but 'capped_poisson'), or leave the local_ options out."
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
                f"{self.privacy_unit!r}: every record is protected for itself. Add privacy_unit='user', or leave it "
                "out."
            )


def _plain_options(field: str, options: Any, example: str) -> dict[str, Any]:
    """Options as a ledger would give them back."""
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise DPConfigError(
            f"{field}={options!r} is no mapping of names to values. Use JSON on a command line: --{field} '{example}'."
        )
    try:
        return json.loads(json.dumps(dict(options), default=lambda value: value.tolist()))
    except (TypeError, ValueError, AttributeError):
        raise DPConfigError(
            f"{field}={options!r} holds what JSON cannot. Use numbers, texts and lists of them."
        ) from None
