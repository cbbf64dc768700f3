"""Noise mechanisms by the names of the command line: how each becomes a strategy for a run.

A mechanism registers a function that takes a `Setting`, then the options a user may give (``noise_kwargs``), each with
a default that is tuned or known to be good.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from hf_dpopt.common.checks import check_at_most, check_count, check_known
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise.restarts import restart
from hf_dpopt.noise.sensitivity import Participation
from hf_dpopt.noise.strategy import NoiseStrategy
from hf_dpopt.noise.workloads import Workload

MAX_TUNED_STEPS = 10**5  # tuning looks at every step many times: half a minute for these


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """Run that a strategy is tuned for.

    Args:
        num_steps: n, optimizer steps of the run.
        participation: k and b, as the sampler promises them.
        workload: what the optimizer makes of the gradients; None for prefix sums.
        backend: how the noise of earlier steps will be kept; see `NoiseStrategy.stream`.
    """

    num_steps: int
    participation: Participation
    workload: Workload | None = None
    backend: str = "auto"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mechanism:
    """Registered way to make noise.

    Args:
        name: its name on the command line.
        tune: makes a strategy from a `Setting` and options.
        sampler: what ``sampling="auto"`` means for it.
        summary: one line for command lines and tables.
        compared_with: samplers with which ``noise_mechanism="auto"`` looks at it.
        max_compared_steps: longest run for which it is looked at; None for any.
        max_steps: longest run that it can be tuned for in reasonable time and memory; None for any.
        num_bands_of: number of bands of C that given options ask for, None if they leave it open; a sampler of groups
            is then given as many groups. None for a mechanism whose bands cannot be chosen.
    """

    name: str
    tune: Callable[..., NoiseStrategy]
    sampler: str
    summary: str
    compared_with: tuple[str, ...] = ()
    max_compared_steps: int | None = None
    max_steps: int | None = MAX_TUNED_STEPS
    num_bands_of: Callable[[Mapping[str, Any]], int | None] | None = None

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the options that are its own."""
        return tuple(inspect.signature(self.tune).parameters)[1:]


INDEPENDENT = "gaussian"  # the mechanism of DP-SGD, and what other noise is compared with
MECHANISMS: dict[str, Mechanism] = {}


def is_independent(name: str) -> bool:
    """Whether a mechanism of this name correlates nothing; "auto" may."""
    return name == INDEPENDENT


def register(
    name: str, *, sampler: str, summary: str, **more: Any
) -> Callable[[Callable[..., NoiseStrategy]], Callable[..., NoiseStrategy]]:
    """Decorator that gives a mechanism a name; arguments as for `Mechanism`.

    Raises:
        ValueError: for a name that is taken.
    """

    def add(tune: Callable[..., NoiseStrategy]) -> Callable[..., NoiseStrategy]:
        if name in MECHANISMS or name == "auto":
            raise ValueError(f"noise_mechanism={name!r} exists already. Choose another name.")
        MECHANISMS[name] = Mechanism(name=name, tune=tune, sampler=sampler, summary=summary, **more)
        # tables and messages begin with independent noise, whatever was imported first
        ordered = sorted(MECHANISMS.items(), key=lambda item: (item[0] != INDEPENDENT, item[0]))
        MECHANISMS.clear()
        MECHANISMS.update(ordered)
        return tune

    return add


def make_strategy(
    name: str,
    setting: Setting,
    options: Mapping[str, Any] | None = None,
    *,
    restart_every: int | None = None,
) -> NoiseStrategy:
    """Make the strategy of a named mechanism for a run.

    Args:
        name: a key of `MECHANISMS`.
        setting: the run.
        options: those of the mechanism (`Mechanism.options`).
        restart_every: steps after which it starts anew; it is then tuned for that many.

    Raises:
        DPConfigError: for unknown options or values out of range; what is allowed is in the message.
    """
    mechanism, options = MECHANISMS[name], dict(options or {})
    elsewhere = () if is_independent(name) else ("backend",)  # it is read where noise is drawn
    check_known(f"noise_mechanism={name!r}", options, (*mechanism.options, *elsewhere))
    if restart_every is None:
        return _tune(mechanism, setting, options)
    check_count("noise_restart_every", restart_every, "the number of steps after which the noise starts anew")
    length = min(int(restart_every), setting.num_steps)
    participations = max(1, setting.participation.fits(length))
    once = dataclasses.replace(setting.participation, max_participations=participations)
    part = dataclasses.replace(setting, num_steps=length, participation=once, workload=None)
    return restart(_tune(mechanism, part, options), int(restart_every))


def check_length(name: str, num_steps: int, restart_every: int | None = None) -> None:
    """Refuse runs that are too long for the named mechanism to be tuned for.

    Raises:
        DPConfigError: beyond `Mechanism.max_steps`, unless the noise starts anew before.
    """
    longest = MECHANISMS[name].max_steps if name in MECHANISMS else None
    is_short = isinstance(restart_every, int) and longest is not None and restart_every <= longest
    if longest is not None and not is_short:
        check_at_most(
            "num_steps", num_steps, longest,
            f"noise_mechanism={name!r} cannot be tuned for so many. Start it anew in between "
            f"(noise_restart_every={longest} or less), or use noise_mechanism='{INDEPENDENT}'.",
        )  # fmt: skip


def _tune(mechanism: Mechanism, setting: Setting, options: dict[str, Any]) -> NoiseStrategy:
    check_length(mechanism.name, setting.num_steps)
    try:
        strategy = mechanism.tune(setting, **options)
    except (TypeError, ValueError, ArithmeticError) as error:
        if isinstance(error, DPConfigError):
            raise
        raise DPConfigError(
            f"noise_kwargs={options} does not fit noise_mechanism={mechanism.name!r}: {error}. It takes numbers for "
            f"{', '.join(mechanism.options)}."
        ) from error
    if not isinstance(getattr(strategy, "name", None), str):
        raise DPConfigError(
            f"noise_mechanism={mechanism.name!r} made a {type(strategy).__name__}, which has no name to be read back "
            "by. Give the class a name: ClassVar[str]."
        )
    return strategy
