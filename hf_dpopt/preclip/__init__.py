r"""Preconditioning: division of one record's gradient, before the clip, by a scale D of public or released values.

The clip then acts on ``g_b / D``, noise is calibrated to that clip, and what is released is the mean of the clipped
``g_b / D``: every record is still used once per step, so D costs nothing. D may never depend on the records but
through released values.

A kind is a frozen spec of public values (`Preclip`); `start` gives what a run mutates (`Preconditioning`). A new one
is one file in this folder, which adds itself to `PRECLIPS`; configurations, command lines and the contract tests read
it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_dpopt.common.checks import check_choice, check_known
from hf_dpopt.common.extras import import_modules
from hf_dpopt.preclip.delayed import DelayedPreconditioner
from hf_dpopt.preclip.one_query import OneQuery
from hf_dpopt.preclip.preconditioner import (
    Identity,
    OpeningQuery,
    Preclip,
    Preconditioning,
    PublicSource,
    ScaleChanges,
    option_names,
)
from hf_dpopt.preclip.public import PublicPreconditioner
from hf_dpopt.preclip.quantile import QuantileClipping
from hf_dpopt.preclip.scale import ScaleThenPrivatize

PRECLIPS: dict[str, Any] = {  # name -> (spec, what the name says already)
    "none": (Identity, {}),
    "dp2_rmsprop": (DelayedPreconditioner, {"second_moment": "rmsprop"}),
    "dp2_adagrad": (DelayedPreconditioner, {"second_moment": "adagrad"}),
    "dp2_yogi": (DelayedPreconditioner, {"second_moment": "yogi"}),
    "adadps": (PublicPreconditioner, {}),
    "one_query": (OneQuery, {}),
    "quantile": (QuantileClipping, {}),
}


def make_preclip(
    name: str,
    options: Mapping[str, Any] | None = None,
    num_steps: int | None = None,
    recorded: Mapping[str, Any] | None = None,
) -> Preclip:
    """The spec of a registered preconditioner.

    Args:
        name: see `PRECLIPS`.
        options: its options.
        num_steps: planned steps, which some defaults follow from; None for the defaults of its class.
        recorded: `Preclip.parameters` of the run that this one continues; its defaults are kept.

    Raises:
        DPConfigError: for an unknown name or option, or values out of range.
    """
    check_choice("preconditioner", name, PRECLIPS)
    cls, fixed = PRECLIPS[name]
    check_known(f"preconditioner={name!r}", options or {}, (n for n in option_names(cls) if n not in fixed))
    defaults = {} if num_steps is None else cls.defaults(num_steps, options or {})
    kept = {name: value for name, value in (recorded or {}).items() if name in defaults}
    return cls(**fixed | defaults | kept | dict(options or {}))


__all__ = [
    "PRECLIPS",
    "DelayedPreconditioner",
    "Identity",
    "OneQuery",
    "OpeningQuery",
    "Preclip",
    "Preconditioning",
    "PublicPreconditioner",
    "PublicSource",
    "QuantileClipping",
    "ScaleChanges",
    "ScaleThenPrivatize",
    "make_preclip",
]

import_modules(__name__, __path__)  # those that add themselves
