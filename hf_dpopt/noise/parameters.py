"""Strategies as JSON: what a ledger, a checkpoint or a cache keeps of one, and the strategy made from it again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise.banded import BandedInverse, BandedToeplitz, ColumnNormalized
from hf_dpopt.noise.blt import BufferedLinearToeplitz
from hf_dpopt.noise.dense import DenseStrategy
from hf_dpopt.noise.nu_dpftrl import DampedAntiPGD, IdentityStrategy, NuDPFTRL
from hf_dpopt.noise.restarted import Restarted, Stamped
from hf_dpopt.noise.strategy import NoiseStrategy
from hf_dpopt.noise.tree import TreeAggregation

_STRATEGIES: dict[str, type[NoiseStrategy]] = {
    strategy.name: strategy
    for strategy in (
        BandedInverse,
        BandedToeplitz,
        BufferedLinearToeplitz,
        ColumnNormalized,
        DampedAntiPGD,
        IdentityStrategy,
        NuDPFTRL,
        Restarted,
        Stamped,
        TreeAggregation,
    )
}


def to_json(strategy: NoiseStrategy) -> str:
    """The parameters of a strategy, every float exactly."""
    return json.dumps(strategy.parameters(), sort_keys=True)


def from_parameters(parameters: Mapping[str, Any]) -> NoiseStrategy:
    """The strategy with these parameters; all but a dense one, whose parameters are a digest of its matrix.

    Formal guarantee: the parameters of what is returned are those that were given; the digest is then the same, too.

    Args:
        parameters: of `NoiseStrategy.parameters`, also after a way through JSON.

    Raises:
        DPConfigError: for a name that no strategy has, and for parameters that no strategy wrote.
    """
    name = parameters.get("name") if isinstance(parameters, Mapping) else None
    if name == DenseStrategy.name:
        raise DPConfigError("the parameters of a dense strategy do not contain its matrix. Tune it again, or load it.")
    if not isinstance(name, str) or name not in _STRATEGIES:
        raise DPConfigError(f"no strategy has the name {name!r}. Use one of {', '.join(sorted(_STRATEGIES))}.")
    try:
        values = {key: value for key, value in parameters.items() if key != "name"}
        if name == ColumnNormalized.name:  # its base can only be of one kind, which is not written down
            values["base"] = BandedToeplitz(**values["base"])
        elif "base" in values:
            values["base"] = from_parameters(values["base"])
        strategy = _STRATEGIES[name](**values)
        as_written = _canonical(strategy.parameters()) == _canonical(parameters)
    except DPConfigError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DPConfigError(f"the parameters of {name} were edited: {error}. Use what parameters() gave.") from error
    if not as_written:
        raise DPConfigError(f"the parameters of {name} were edited: {parameters!r:.200}. Use what parameters() gave.")
    return strategy


def _canonical(parameters: Mapping[str, Any]) -> str:
    """Tuples are lists, and 1 is 1.0, but true is neither."""
    return json.dumps(json.loads(json.dumps(dict(parameters)), parse_int=float), sort_keys=True)
