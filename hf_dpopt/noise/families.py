"""Noise mechanisms by the names of the command line: how each becomes a strategy for a run.

A function here takes the run it is for, then the options a user may give (``noise_kwargs``), each with a default that
is tuned or known to be good. To add a mechanism: write its strategy, a function here, and one line in `MECHANISMS`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hf_dpopt.common.checks import check_count
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise import tuning
from hf_dpopt.noise.banded import BandedInverse, BandedToeplitz, ColumnNormalized
from hf_dpopt.noise.blt import BufferedLinearToeplitz
from hf_dpopt.noise.nu_dpftrl import DampedAntiPGD, IdentityStrategy, NuDPFTRL
from hf_dpopt.noise.participation import Participation
from hf_dpopt.noise.restarted import Restarted
from hf_dpopt.noise.strategy import NoiseStrategy
from hf_dpopt.noise.tree import TreeAggregation
from hf_dpopt.noise.workloads import Workload

DEFAULT_BANDS = 16  # in a fixed order, where more bands are better but each keeps a copy of the gradient
DEFAULT_INVERSE_BANDS = 64  # fewer are bad for long runs
MAX_DENSE_STEPS = 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What a strategy is tuned for.

    Args:
        num_steps: n, optimizer steps of the run.
        participation: k and b, as the sampler promises them.
        workload: what the optimizer makes of the gradients; None for prefix sums.
    """

    num_steps: int
    participation: Participation
    workload: Workload | None = None


@dataclasses.dataclass(frozen=True)
class Family:
    """A mechanism that has a name.

    Args:
        make: from a `Setting` and options to a strategy.
        sampler: what ``sampling="auto"`` means for it.
        summary: one line for command lines and tables.
    """

    make: Callable[..., NoiseStrategy]
    sampler: str
    summary: str

    @property
    def options(self) -> tuple[str, ...]:
        """Names of what a user may set."""
        return tuple(inspect.signature(self.make).parameters)[1:]


# --- families --------------------------------------------------------------------------------------------------------


def _independent(setting: Setting) -> NoiseStrategy:
    return IdentityStrategy()


def _nu_dpftrl(setting: Setting, nu: float | None = None, num_buffers: int | None = 6) -> NoiseStrategy:
    exact = (
        NuDPFTRL(nu)
        if nu is not None
        else tuning.optimize_nu(setting.num_steps, setting.participation, setting.workload)
    )
    if num_buffers is None or exact.nu == 1:
        return exact
    return tuning.fit_blt(exact.nu, num_buffers, num_steps=setting.num_steps)


def _blt(
    setting: Setting,
    num_buffers: int = 3,
    error: str = "mean",
    poles: Sequence[float] | None = None,
    zeros: Sequence[float] | None = None,
) -> NoiseStrategy:
    if error not in ("mean", "max"):
        raise DPConfigError(f"error={error!r} is unknown. Use 'mean' or 'max'.")
    if poles is not None or zeros is not None:
        return BufferedLinearToeplitz(tuple(poles or ()), tuple(zeros or ()))
    return tuning.optimize_blt(
        setting.num_steps, setting.participation, num_buffers, error=error, workload=setting.workload  # type: ignore[arg-type]
    )  # fmt: skip


def _banded(
    setting: Setting,
    num_bands: int | None = None,
    coefs: Sequence[float] | None = None,
    column_normalize: bool = False,
) -> NoiseStrategy:
    if not isinstance(column_normalize, bool):
        raise DPConfigError(f"column_normalize={column_normalize!r} is neither true nor false.")
    if coefs is not None:
        bands = BandedToeplitz(tuple(coefs))
    else:
        most = min(setting.participation.min_sep, setting.num_steps)
        wanted = min(most, DEFAULT_BANDS) if num_bands is None else num_bands
        bands = tuning.optimize_banded(
            setting.num_steps, wanted, participation=setting.participation, workload=setting.workload
        )
    return ColumnNormalized(bands, setting.num_steps) if column_normalize else bands


def _banded_inverse(
    setting: Setting, num_bands: int | None = None, nu: float = 0.0, coefs: Sequence[float] | None = None
) -> NoiseStrategy:
    if coefs is not None:
        return BandedInverse(tuple(coefs))
    wanted = min(DEFAULT_INVERSE_BANDS, setting.num_steps) if num_bands is None else num_bands
    check_count("num_bands", wanted)
    if wanted > setting.num_steps:
        raise DPConfigError(
            f"num_bands={wanted} is more than the {setting.num_steps} steps. Use at most {setting.num_steps}."
        )
    return BandedInverse.of_nu(wanted, nu)


def _tree(setting: Setting, variant: str = "vanilla") -> NoiseStrategy:
    return TreeAggregation(variant)  # type: ignore[arg-type]  # it says which variants there are


def _honaker(setting: Setting) -> NoiseStrategy:
    return TreeAggregation("honaker")


def _dense(setting: Setting) -> NoiseStrategy:
    if setting.num_steps > MAX_DENSE_STEPS:
        raise DPConfigError(
            f"A dense matrix for {setting.num_steps} steps takes too long to tune. Use noise_mechanism='blt', which "
            f"is within a few percent of it, or at most {MAX_DENSE_STEPS} steps."
        )
    return tuning.optimize_dense(setting.num_steps, setting.participation, setting.workload)


def _anti_pgd(setting: Setting, nu: float | None = None) -> NoiseStrategy:
    if nu is not None:
        return DampedAntiPGD(nu)
    return tuning.optimize_damped(setting.num_steps, setting.participation, setting.workload)


MECHANISMS: dict[str, Family] = {
    "gaussian": Family(_independent, "truncated_poisson", "independent noise: DP-SGD"),
    "nu_dpftrl": Family(_nu_dpftrl, "fixed_order", "nu-DP-FTRL in buffers; for runs of any length"),
    "blt": Family(_blt, "fixed_order", "buffered linear Toeplitz, 3 copies of the gradient"),
    "banded": Family(_banded, "cyclic_poisson", "banded Toeplitz with amplification by sampling"),
    "banded_inverse": Family(_banded_inverse, "fixed_order", "bands of the inverse, drawn again: no memory"),
    "tree": Family(_tree, "fixed_order", "binary tree aggregation"),
    "honaker": Family(_honaker, "fixed_order", "binary tree with Honaker's estimates"),
    "dense": Family(_dense, "fixed_order", "the optimal matrix, for research"),
    "anti_pgd": Family(_anti_pgd, "fixed_order", "damped anti-PGD (DP-lambda-CGD): one draw more a step"),
}


def make_strategy(
    name: str, setting: Setting, options: Mapping[str, Any] | None = None, *, restart_every: int | None = None
) -> NoiseStrategy:
    """The strategy of a named mechanism for a run.

    Args:
        name: a key of `MECHANISMS`.
        setting: the run.
        options: of the mechanism (`Family.options`).
        restart_every: steps after which it starts anew; it is then tuned for that many.

    Raises:
        DPConfigError: for unknown options or values out of range; what is allowed is in the message.
    """
    family, options = MECHANISMS[name], dict(options or {})
    unknown = sorted(set(options) - set(family.options))
    if unknown:
        raise DPConfigError(
            f"noise_kwargs has {', '.join(unknown)}, which noise_mechanism={name!r} does not know. It takes: "
            f"{', '.join((*family.options, 'backend', 'block', 'offload')) if name != 'gaussian' else 'nothing'}."
        )
    if restart_every is None:
        return _made(family, name, setting, options)
    check_count("noise_restart_every", restart_every, "the number of steps after which the noise starts anew")
    if name in ("tree", "honaker"):
        tree = _made(family, name, setting, options)
        return dataclasses.replace(tree, restart_every=int(restart_every))  # type: ignore[type-var]
    if name == "gaussian":
        raise DPConfigError("Independent noise has nothing to restart: leave noise_restart_every out.")
    length = min(int(restart_every), setting.num_steps)
    once = dataclasses.replace(
        setting.participation, max_participations=max(1, setting.participation.fits(length))
    )  # fmt: skip
    part = Setting(num_steps=length, participation=once, workload=None)
    return Restarted(_made(family, name, part, options), int(restart_every))


def _made(family: Family, name: str, setting: Setting, options: dict[str, Any]) -> NoiseStrategy:
    try:
        return family.make(setting, **options)
    except (TypeError, ValueError, ArithmeticError) as error:
        if isinstance(error, DPConfigError):
            raise
        raise DPConfigError(
            f"noise_kwargs={options} does not fit noise_mechanism={name!r}: {error}. It takes numbers for "
            f"{', '.join(family.options)}."
        ) from error
