"""The search space of a tuning: a law from which the options of every run are drawn, each for itself.

Runs have to be draws from one law, options included, or their best has no proof. So the space is fixed before the
first run, nothing is learnt from one run for the next, and what decides the mechanism (batch, steps, noise) is in no
space: it is the same in all runs.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_dpopt.common.errors import DPConfigError, shown

EXAMPLE = '{"learning_rate": {"low": 1e-4, "high": 1e-1, "log": true}, "weight_decay": [0, 0.01]}'
# Options that decide what a run costs, or where it writes: the tuning sets them, or they are the same in all runs.
SET_BY_TUNING = (
    "output_dir", "private_state_dir", "target_epsilon", "tuned_runs", "privacy_ledger",
    "privacy_ledger_epsilon", "privacy_ledger_entry", "resume_from_checkpoint", "report_to",
)  # fmt: skip
REFUSED = (
    "noise_multiplier", "push_to_hub", "hub_model_id", "hub_token", "earlier_runs", "warm_start_epsilon",
    "log_unprivatized", "non_private", "unsafe_fixed_noise_key",
)  # fmt: skip
SAME_IN_ALL_RUNS = (
    "target_delta", "allow_large_delta", "expected_batch_size", "gradient_accumulation_steps", "sampling", "adjacency",
    "privacy_unit", "user_id_column", "records_per_user", "num_train_epochs", "max_steps", "noise_mechanism",
    "noise_kwargs", "noise_restart_every", "noise_at_changes", "amplification_samples", "preconditioner",
    "preconditioner_kwargs", "eval_data_privacy", "journal_limit", "logging_dir",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Range:
    """Numbers between two ends: uniform, or with a uniform logarithm; of whole numbers both ends are drawn, too."""

    low: float
    high: float
    log: bool = False
    integer: bool = False

    def draw(self, source: random.Random) -> float:
        """Draw a number."""
        if self.integer:
            return source.randint(int(self.low), int(self.high))
        if self.log:
            return float(f"{math.exp(source.uniform(math.log(self.low), math.log(self.high))):.6g}")
        return float(f"{source.uniform(self.low, self.high):.6g}")


@dataclasses.dataclass(frozen=True)
class Space:
    """Options with the law of each.

    Args:
        options: name -> a `Range`, or the values that are equally likely.
    """

    options: Mapping[str, Range | tuple[Any, ...]]

    @classmethod
    def read(cls, given: str | Path | Mapping[str, Any]) -> Space:
        """The space in a mapping, in JSON, or in a file of JSON.

        Raises:
            DPConfigError: for what is none, or has an option that is not to be tuned.
        """
        content: Any = given
        if not isinstance(given, Mapping):
            text = str(given)
            try:
                if not text.lstrip().startswith(("{", "[")):
                    text = Path(text).read_text(encoding="utf-8")
                content = json.loads(text)
            except (OSError, ValueError, RecursionError) as error:
                raise DPConfigError(
                    f"space={shown(str(given))} is no file of JSON and no JSON ({error}). Use such as '{EXAMPLE}'."
                ) from None
        if not isinstance(content, Mapping) or not content:
            raise DPConfigError(f"space={shown(content)} has no options to draw. Use for instance '{EXAMPLE}'.")
        return cls({str(name): _law(str(name), value) for name, value in content.items()})

    def draw(self, source: random.Random) -> dict[str, Any]:
        """Draw the options of a run, independently of all other runs."""
        return {
            name: law.draw(source) if isinstance(law, Range) else source.choice(law)
            for name, law in self.options.items()
        }

    def public_dict(self) -> dict[str, Any]:
        """Plain JSON values, from which `read` makes it again."""
        return {
            name: dataclasses.asdict(law) if isinstance(law, Range) else list(law)
            for name, law in self.options.items()
        }


def _law(name: str, value: Any) -> Range | tuple[Any, ...]:
    _check_name(name)
    if isinstance(value, list | tuple) and value and all(isinstance(one, str | int | float | bool) for one in value):
        return tuple(value)
    try:
        found = Range(**value)
        numbers = [float(found.low), float(found.high)]
        whole = all(number == int(number) for number in numbers)
    except (TypeError, ValueError, OverflowError):
        raise _no_law(name, value) from None
    if not (numbers[0] < numbers[1] and (found.integer <= whole) and (not found.log or numbers[0] > 0)):
        raise _no_law(name, value)
    if found.log and found.integer:
        raise _no_law(name, value)
    return found


def _no_law(name: str, value: Any) -> DPConfigError:
    return DPConfigError(
        f"`space` has {name}={shown(value)}, which is no law. Use a list of values, or "
        '{"low": 1e-4, "high": 1e-1, "log": true}; {"low": 0, "high": 20, "integer": true} for whole numbers.'
    )


def _check_name(name: str) -> None:
    if name in SET_BY_TUNING or name in REFUSED:
        raise DPConfigError(f"`space` has {name}, which the tuning sets, or which has no place in one.")
    if name in SAME_IN_ALL_RUNS:
        raise DPConfigError(
            f"`space` has {name}, which decides what a run costs, and all runs cost the same. Fix it in the "
            "command; `hf-dpopt plan` advises."
        )
