"""Way in which correlated noise is kept where the config leaves it to a cost model: chosen once, and recorded.

Ways differ in the rounding of the noise and in nothing else. The choice depends on the machine, so the plan of a run
that goes on takes the recorded one: the bits of its noise stay what they were.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hf_dpopt.noise import MECHANISMS
from hf_dpopt.noise.streams import Speed, StreamCost, cheapest
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.plan.plan import PrivacyPlan

FIT = "fit"  # the backend that stands for a choice
BLOCKS = (1, 2, 4, 8, 16, 32, 64)  # steps that one pass over the earlier draws may serve


def is_left_open(config: PrivacyConfig) -> bool:
    """Whether the config asks for the cheapest way that fits; independent noise keeps nothing, and has no ways."""
    mechanism = MECHANISMS.get(config.noise_mechanism)
    return mechanism is not None and not mechanism.is_independent and config.noise_kwargs.get("backend") == FIT


def as_recorded_or_auto(config: PrivacyConfig, recorded: Mapping[str, Any] | None) -> PrivacyConfig:
    """Replace an open way by the recorded one, or by none until `choose_way` has a plan to choose for."""
    if not is_left_open(config):
        return config
    kept = {} if recorded is None else recorded["noise_kwargs"]
    return _with_way(config, {name: kept[name] for name in ("backend", "block") if name in kept})


def choose_way(plan: PrivacyPlan, *, coordinates: int, room: float, speed: Speed) -> PrivacyPlan:
    """Give a plan the way to keep its noise that takes the least time among those that fit.

    Formal guarantee: strategy, noise level, sampler and epsilon are those of the plan that was given.

    Args:
        plan: the plan of a run that begins.
        coordinates: trained coordinates, >= 1.
        room: bytes that the noise may keep on the device.
        speed: that of the device.
    """
    costs, ways = dict[str, StreamCost](), dict[str, dict[str, Any]]()
    for way in _ways(plan):
        name = f"{way.get('backend', 'auto')}, {way.get('block', 1)}"
        ways[name] = way
        costs[name] = plan.strategy.cost(
            plan.noise_steps, backend=way.get("backend", "auto"), block=way.get("block", 1)
        )
    best = ways[cheapest(costs, coordinates=coordinates, room=room, speed=speed)]
    mechanism = dataclasses.replace(plan.mechanism, backend=best.get("backend", "auto"), block=best.get("block", 1))
    return dataclasses.replace(plan, config=_with_way(plan.config, best), mechanism=mechanism)


def _ways(plan: PrivacyPlan) -> list[dict[str, Any]]:
    """Options of each way; a tree has one, for its nodes are drawn as they are completed."""
    if not plan.strategy.is_square:
        return [{}]
    again = [{"backend": "regenerate", **({} if block == 1 else {"block": block})} for block in BLOCKS]
    return [{}, {"backend": "history"}, *again]


def _with_way(config: PrivacyConfig, way: Mapping[str, Any]) -> PrivacyConfig:
    others = {name: value for name, value in config.noise_kwargs.items() if name not in ("backend", "block")}
    return dataclasses.replace(config, noise_kwargs={**others, **way})
