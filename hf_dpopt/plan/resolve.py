"""Choice of sampler, adjacency and strategy by the names in a config, and what "auto" means for each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.noise import MECHANISMS, NoiseStrategy, Setting, Workload, from_parameters, is_whole, make_strategy
from hf_dpopt.noise.registry import STREAM_OPTIONS
from hf_dpopt.plan.config import PrivacyConfig
from hf_dpopt.plan.cyclic import choose_num_bands
from hf_dpopt.sampling import SAMPLERS, Sampler

MAX_CHOSEN_BANDS = 16  # each but the first keeps a copy of the gradient; more have to be asked for


class NoiseChoice(NamedTuple):
    """A config without "auto", and what it stands for; `noise_steps` are those the strategy is made for."""

    config: PrivacyConfig
    sampler: Sampler
    strategy: NoiseStrategy
    noise_steps: int


def choose_noise(
    config: PrivacyConfig,
    *,
    num_examples: int,
    num_steps: int,
    delta: float,
    workload: Workload | None = None,
    recorded: Mapping[str, Any] | None = None,
    phases: tuple[int, ...] | None = None,
) -> NoiseChoice:
    """Choose the noise that a config stands for.

    Args:
        config: what was asked for; a `noise_mechanism` of "auto" only with `recorded`.
        num_examples, num_steps, delta: sizes of the run and delta of its guarantee.
        workload: what the optimizer makes of the gradients, for which the strategy is tuned.
        recorded: the plan of the run that this one continues: its strategy is kept if it was asked for in the same
            words. If not, what was asked for now is made, and the ledger will refuse it.
        phases: steps of each kind of phase, where each has a stream of its own; see `hf_dpopt.noise.copies`.

    Raises:
        DPConfigError: for options that the mechanism does not know.
    """
    if recorded is not None and config.noise_mechanism == "auto":
        config = as_recorded(config, recorded)
    kept = _recorded_strategy(config, recorded)
    mechanism = MECHANISMS[config.noise_mechanism]
    options = {name: value for name, value in config.noise_kwargs.items() if name not in STREAM_OPTIONS}
    if mechanism.is_independent and set(config.noise_kwargs) - set(options):
        raise DPConfigError("Independent noise keeps nothing: leave backend, block and offload out of noise_kwargs.")
    sampler = make_sampler(config, num_examples)
    if sampler.has_groups and mechanism.num_bands_of is not None:
        if recorded is not None and kept is not None:  # a strategy may have fewer bands than there are groups
            bands = recorded["sampler"].get("num_groups", 1)
        else:
            asked = mechanism.num_bands_of(options)
            bands = _best_num_bands(config, sampler, num_steps, delta, workload) if asked is None else asked
            if asked is None:
                options["num_bands"] = bands
        sampler = sampler.with_groups(bands)
    if config.adjacency == "auto":
        config = dataclasses.replace(config, adjacency=sampler.adjacencies[0])  # type: ignore[arg-type]
    config = dataclasses.replace(config, sampling=sampler.name)  # type: ignore[arg-type]
    if kept is not None:
        return NoiseChoice(config, sampler, *kept)
    setting = Setting(
        num_steps=int(num_steps),
        participation=sampler.participation(num_steps),
        workload=workload,
        backend=stream_options(config)["backend"],
    )
    strategy = make_strategy(
        config.noise_mechanism, setting, options, restart_every=config.noise_restart_every, phases=phases
    )
    return NoiseChoice(config, sampler, strategy, int(num_steps))


def make_sampler(config: PrivacyConfig, num_examples: int) -> Sampler:
    """The sampler a config names; of several groups, with one group."""
    name = MECHANISMS[config.noise_mechanism].sampler if config.sampling == "auto" else config.sampling
    given = {field: getattr(config, field) for field in SAMPLERS[name].takes}
    return SAMPLERS[name](num_examples=int(num_examples), expected_batch_size=int(config.expected_batch_size), **given)


def stream_options(config: PrivacyConfig) -> dict[str, Any]:
    """Options of how the noise is kept between steps: `backend`, `block` and `offload` of `NoiseStrategy.stream`."""
    given = {name: value for name, value in config.noise_kwargs.items() if name in STREAM_OPTIONS}
    if given.get("backend") == "blt" and config.noise_mechanism == "nu_dpftrl":
        given["backend"] = "auto"  # its name in ledgers of 0.1.0
    return {**STREAM_OPTIONS, **given}


def _best_num_bands(
    config: PrivacyConfig, sampler: Sampler, num_steps: int, delta: float, workload: Workload | None
) -> int:
    """Bands, and so groups, with the least error for the budget.

    Raises:
        DPConfigError: without a budget.
    """
    if config.target_epsilon is None:
        raise DPConfigError(
            "How many bands are best depends on the budget, and noise_multiplier gives none. Use target_epsilon, or "
            "say how many: noise_kwargs={'num_bands': 8}."
        )
    return choose_num_bands(
        num_steps,
        sampler.num_examples,
        sampler.expected_batch_size,
        config.target_epsilon,
        delta,
        adjacency=sampler.adjacencies[0] if config.adjacency == "auto" else config.adjacency,
        workload=workload,
        max_bands=MAX_CHOSEN_BANDS,
    )


def as_recorded(config: PrivacyConfig, recorded: Mapping[str, Any]) -> PrivacyConfig:
    """Replace "auto" by what the recorded run decided on."""
    refuse_options_of_auto(config)
    return dataclasses.replace(
        config,
        noise_mechanism=recorded["noise_mechanism"],
        noise_kwargs=recorded["noise_kwargs"],
        noise_restart_every=recorded["noise_restart_every"],
        sampling=recorded["sampler"]["name"] if config.sampling == "auto" else config.sampling,
        adjacency=recorded["adjacency"] if config.adjacency == "auto" else config.adjacency,
    )


def refuse_options_of_auto(config: PrivacyConfig) -> None:
    """Options are of a mechanism, and "auto" is none yet."""
    if config.noise_kwargs or config.noise_restart_every is not None:
        raise DPConfigError(
            "noise_mechanism='auto' chooses the options, too: leave noise_kwargs and noise_restart_every out, or name "
            f"the mechanism they are for ({', '.join(MECHANISMS)})."
        )


def _recorded_strategy(config: PrivacyConfig, recorded: Mapping[str, Any] | None) -> tuple[NoiseStrategy, int] | None:
    """Strategy and steps of the run that is continued, if the same noise was asked for."""
    if recorded is None or not is_whole(recorded["noise_strategy"]):
        return None
    asked = (config.noise_mechanism, dict(config.noise_kwargs), config.noise_restart_every)
    if asked != tuple(recorded[name] for name in ("noise_mechanism", "noise_kwargs", "noise_restart_every")):
        return None
    if (config.noise_at_changes == "by_phase") != (recorded["noise_strategy"]["name"] == "phased"):
        return None
    return from_parameters(recorded["noise_strategy"]), int(recorded["noise_steps"])
