"""Stages of a plan that are no part of the package: what they say of themselves has no proof and no test here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hf_dpopt.noise import MECHANISMS, NoiseStrategy
from hf_dpopt.plan.plan import PrivacyPlan

PACKAGE = __name__.split(".")[0]


def unvetted_stages(plan: PrivacyPlan) -> tuple[str, ...]:
    """Stages between a record and the noise whose code lies outside the package, as "kind name".

    A stage is known by the module that its class, or the function that makes it, was defined in. A class of the
    package with options of the user's (coefficients of a strategy, say) is vetted: its proof holds for all of them.
    """
    mechanism = MECHANISMS.get(plan.config.noise_mechanism)
    parts: list[tuple[str, str, Any]] = [
        ("sampler", plan.sampler.name, type(plan.sampler)),
        ("clipping rule", plan.config.clipping, type(plan.clipper)),
        ("preconditioner", plan.preclip.name, type(plan.preclip)),
        *(("noise strategy", part.name, type(part)) for part in _parts(plan.strategy)),
        *([] if mechanism is None else [("noise mechanism", mechanism.name, mechanism.tune)]),
        *(("sampler of an earlier run", run.release.sampler.name, type(run.release.sampler)) for run in plan.earlier),
    ]
    return tuple(dict.fromkeys(f"{kind} {name}" for kind, name, made_by in parts if not _is_ours(made_by)))


def _parts(strategy: NoiseStrategy) -> Iterator[NoiseStrategy]:
    """Yield a strategy and those that it is built of."""
    yield strategy
    for value in vars(strategy).values():
        if isinstance(value, NoiseStrategy):
            yield from _parts(value)


def _is_ours(made_by: Any) -> bool:
    """Whether a class, and all that it inherits from, or a function is defined in the package."""
    kinds = made_by.__mro__ if isinstance(made_by, type) else (made_by,)
    modules = [str(getattr(kind, "__module__", "")).split(".")[0] for kind in kinds]
    return all(module in (PACKAGE, "abc", "builtins", "typing", "torch") for module in modules)
