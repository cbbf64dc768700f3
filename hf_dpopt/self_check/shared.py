"""Detection of random draws that the records of a physical batch share and that change their gradients.

Records that share a draw are not independent given the batches: removing one regroups who shares what with whom, and
the sum moves by more than a record's clipped gradient.
"""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from hf_dpopt.common.errors import UnsupportedModuleError
from hf_dpopt.records.settings import settings
from hf_dpopt.self_check.draws import HIGH, LOW, SharedDraw
from hf_dpopt.self_check.probe import Gradient, Probe, distance, length, plain_gradient

OPTIONS = re.compile(r"layer_?drop|drop_?path|jitter|stochastic|spec_augment|mask_(time|feature)_prob|^survival")
FORCED: tuple[float | int, ...] = (LOW, HIGH, 1, 2)  # quantiles, then other seeds
NUM_SEEDS = 8  # for generators that are not torch's
MAX_NAMED = 5


def check_shared_draws(probe: Probe, batch: Mapping[str, Any], num: int) -> None:
    """Refuse a model whose losses or gradients depend on a draw that all records of a batch share.

    Raises:
        UnsupportedModuleError: naming the module that draws, and the option to set to 0.
    """
    if not probe.uses_others and (probe.draws is None or not probe.draws.has_shared):
        return
    first = _outcome(probe, batch, range(num))
    shared = {} if probe.draws is None else dict(probe.draws.shared)
    if shared and _matters(probe, batch, num, None, first):
        found = [draw for draw in shared if _matters(probe, batch, num, draw, first)] or list(shared)
        _refuse(probe.engine.model, found)
    if probe.uses_others and _depends_on_others(probe, batch, num, first):
        _refuse(probe.engine.model, [SharedDraw("random or numpy.random", "")])


def _outcome(probe: Probe, batch: Mapping[str, Any], records: range, **how: Any) -> tuple[torch.Tensor, Gradient]:
    losses_B = probe.losses_of(batch, records, **how)
    return losses_B.detach().double(), plain_gradient(losses_B.sum(), probe.engine.parameters)


def _differ(one: tuple[torch.Tensor, Gradient], other: tuple[torch.Tensor, Gradient], tolerance: float) -> bool:
    losses_B, others_B = one[0], other[0]
    same_losses = bool(((losses_B - others_B).abs() <= tolerance * losses_B.abs().clamp(min=1e-3)).all())
    same_gradients = distance(one[1], other[1]) <= tolerance * max(length(one[1]), 1e-12)
    return not (same_losses and same_gradients)  # differs, too, if either is no number


def _matters(probe: Probe, batch: Mapping[str, Any], num: int, draw: SharedDraw | None, first: Any) -> bool:
    """Whether the outcome changes with a shared draw, or with all of them."""
    outcomes = (_outcome(probe, batch, range(num), shared=how, only=draw) for how in FORCED)
    return any(_differ(first, outcome, probe.tolerance) for outcome in outcomes)


def _depends_on_others(probe: Probe, batch: Mapping[str, Any], num: int, first: Any) -> bool:
    for quantile in (LOW, HIGH):
        with _forced_uniforms(quantile):
            if _differ(first, _outcome(probe, batch, range(num)), probe.tolerance):
                return True
    return any(
        _differ(first, _outcome(probe, batch, range(num), shared=seed), probe.tolerance)
        for seed in range(1, NUM_SEEDS + 1)
    )


@contextlib.contextmanager
def _forced_uniforms(quantile: float) -> Iterator[None]:
    """Hold Python's and numpy's uniforms at a quantile, so that rare events happen."""

    def uniforms(size: Any = None) -> Any:
        return quantile if size is None else np.full(size, quantile)

    changed: list[tuple[Any, str, Any]] = [
        (random, "random", uniforms),
        (random, "uniform", lambda a, b: a + (b - a) * quantile),
        (np.random, "rand", lambda *shape: uniforms(shape or None)),
        (np.random, "random", uniforms),
        (np.random, "random_sample", uniforms),
        (np.random, "uniform", lambda low=0.0, high=1.0, size=None: low + (high - low) * uniforms(size)),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in changed]
    for module, name, value in changed:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def _refuse(model: nn.Module, found: list[SharedDraw]) -> None:
    places = [f"{draw.module or 'the model'} ({draw.operation})" for draw in found]
    named = ", ".join(places[:MAX_NAMED]) + (f" and {len(places) - MAX_NAMED} more" if len(places) > MAX_NAMED else "")
    raise UnsupportedModuleError(
        f"Self-check failed before training: {named} draws random numbers once for the whole batch, and they change "
        "the gradients: records share them, so one record more or less changes which others share a draw. "
        f"{way_out(model, found)}"
    )


def way_out(model: nn.Module, found: list[SharedDraw]) -> str:
    """Say which options look responsible, and where they are."""
    options = {
        f"{path}{name}": False if isinstance(value, bool) else 0.0
        for path, name, value in settings(model)
        if OPTIONS.search(name) and isinstance(value, int | float) and value
    }
    modules = {draw.module: model.get_submodule(draw.module) for draw in found if draw.module}
    dropouts = [name for name, module in modules.items() if isinstance(getattr(module, "p", None), float)]
    fixes = []
    if options and len(dropouts) < len(found):
        values = ", ".join(f"config.{name} = {value}" for name, value in options.items())
        fixes.append(f"Set {values} before the model is made (from_pretrained takes them as arguments, too).")
    if dropouts:
        named = ", ".join(repr(name) for name in dropouts[:MAX_NAMED])
        fixes.append(f"Set p = 0 there: for name in [{named}]: model.get_submodule(name).p = 0.0.")
    return (
        " ".join(fixes) or "Turn that off, or draw one number for each record (a tensor whose first dimension is B)."
    )
