"""The facts of a privacy report, as one frozen object of public values."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import platform
import typing
from typing import Any

from hf_dpopt.common import version
from hf_dpopt.common.checks import check_kind
from hf_dpopt.common.durable import parse_json
from hf_dpopt.common.errors import DPConfigError, shown

REPORT_VERSION = 1

# Everything that computes, draws, accounts or stores something the statement speaks of.
_DISTRIBUTIONS = (
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "dp-accounting",
    "cryptography",
    "numpy",
    "scipy",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFacts:
    """All that the statement, the report and the model card print. Public values only: every field may be published.

    Args:
        plan: the plan, as `PlanRecord.to_json` gives it.
        epsilon_spent: epsilon of the charged steps, under the plan's adjacency; infinite if nothing is guaranteed.
        epsilon_replace_one: the planned steps under ``replace_one``, or those charged if they cost more; None where no
            analysis of the sampler is known.
        delta: delta of both epsilons, in (0, 1).
        steps_charged: steps in the ledger, over all resumes, branches and crashes.
        steps_planned: steps the noise was calibrated for.
        steps_lost: charged steps that made no update, for the run was killed before their release was on the disk.
        chains: noise keys used, one for each uninterrupted sequence of steps.
        world_size: processes of the last launch.
        ledger_digest: SHA-256 of the last ledger record.
        self_check: outcome of the check at the start, such as ``passed`` or ``skipped by the user``.
        unsafe: whether the user fixed a noise key: whoever knows it can remove the noise.
        non_private_outputs: descriptions of everything that left the run without noise.
        callbacks: class names of the callbacks the user added.
        after_noise: filters and optimizer that use the released gradients, in order; for repeating the run.
        eval_data_privacy: the user's declaration about the evaluation data; None if there is none.
        data_dependent_preprocessing: the user's declaration about tokenizer, vocabulary, label set, filters and so
            on; None if there is none.
        unit_declared: whether the user declared that rows are records, whatever they look like; None if not.
        model_class: class name of the model.
        num_trainable: coordinates that are trained, clipped and noised.
        versions: distribution name -> version; see `collect_versions`.
        released_files: name -> SHA-256 of the weights and configurations that were saved to the output folder.
        meaning: what the privacy profile means, as `hf_dpopt.plan.privacy_profile.meaning_of_plan` gives it; empty
            without a promise.
        unvetted: stages between a record and the noise that are no part of the package, as "kind name"; their
            proofs are those of their authors.
        evaluations: budget of the private evaluation set and what was charged; empty where there was none.
    """

    plan: dict[str, Any]
    epsilon_spent: float
    epsilon_replace_one: float | None = None
    delta: float
    steps_charged: int
    steps_planned: int
    chains: int
    world_size: int
    ledger_digest: str
    self_check: str
    unsafe: bool
    non_private_outputs: tuple[str, ...] = ()
    callbacks: tuple[str, ...] = ()
    after_noise: tuple[str, ...] = ()
    eval_data_privacy: str | None = None
    data_dependent_preprocessing: str | None = None
    unit_declared: bool | None = None
    steps_lost: int = 0
    model_class: str
    num_trainable: int
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    released_files: dict[str, str] = dataclasses.field(default_factory=dict)
    meaning: dict[str, Any] = dataclasses.field(default_factory=dict)
    unvetted: tuple[str, ...] = ()
    evaluations: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def not_private_reasons(self) -> tuple[str, ...]:
        """Reasons why the run guarantees nothing; empty for a run that guarantees something."""
        reasons = []
        if self.unsafe:
            reasons.append("a noise key was fixed by hand, so the noise can be computed and taken off again")
        if not self.plan["noise_multiplier"] > 0:
            reasons.append("the noise multiplier is 0, so no noise was added")
        if not reasons and not (self.plan["is_private"] and max(self.epsilon_planned, self.epsilon_spent) < math.inf):
            reasons.append("no finite epsilon is known for what was run")
        return tuple(reasons)

    @property
    def epsilon_planned(self) -> float:
        """Epsilon of the steps the noise was calibrated for."""
        return float(self.plan["epsilon"])  # infinity is spelt "inf" there

    @property
    def epsilon(self) -> float:
        """Epsilon that the run may claim: the larger of planned and charged; infinity if nothing is guaranteed.

        Never the smaller one: a run may have stopped early because of what the data showed.
        """
        return math.inf if self.not_private_reasons else max(self.epsilon_planned, self.epsilon_spent)

    def to_json(self) -> str:
        """The facts as strict JSON; infinity is the string ``"inf"``."""
        content = {"report_version": REPORT_VERSION, "private": not self.not_private_reasons} | dataclasses.asdict(
            self
        )
        return json.dumps(spell_infinity(content), indent=2, sort_keys=True, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> RunFacts:
        """The facts that `to_json` wrote.

        Raises:
            DPConfigError: if the text is no report, or one of another version.
        """
        try:
            content = parse_json(text)
            version = content.pop("report_version")
            content.pop("private")
        except (ValueError, KeyError, AttributeError, TypeError):
            raise DPConfigError("This is no report of hf_dpopt. Give the output_dir of a private run.") from None
        known = {field.name for field in dataclasses.fields(cls)}
        if version != REPORT_VERSION or set(content) != known:
            raise DPConfigError(
                f"The report has format {version!r}, or other fields than format {REPORT_VERSION}, which this release "
                f"reads. Use the release of hf_dpopt that wrote it, {_writer(content)}, or a newer one."
            )
        for name in ("epsilon_spent", "epsilon_replace_one"):
            content[name] = math.inf if content[name] == "inf" else content[name]
        for name, hint in typing.get_type_hints(cls).items():
            _check_field(name, content[name], hint)
        for name in ("non_private_outputs", "callbacks", "after_noise", "unvetted"):
            content[name] = tuple(content[name])
        return cls(**content)


def _check_field(name: str, value: Any, hint: Any) -> None:
    """Refuse a value that no run wrote: of another type than the field, or a number below 0 or none at all."""
    check_kind(f"The report was damaged or edited: {name}", value, hint)
    is_number = isinstance(value, (int, float))
    if (is_number and not value >= 0) or (typing.get_origin(hint) is tuple and not isinstance(value, list)):
        raise DPConfigError(f"The report was damaged or edited: {name}={shown(value)} is nothing that a run writes.")


def _writer(content: dict[str, Any]) -> str:
    """Release that wrote a report."""
    versions = content.get("versions")
    return str(versions.get("hf_dpopt")) if isinstance(versions, dict) else "of an unknown version"


def collect_versions() -> dict[str, str]:
    """Versions of Python, of the package and of the libraries its statements rest on, as far as they are installed."""
    versions = {"python": platform.python_version(), "hf_dpopt": version.__version__}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"  # peft is optional
    return versions


def spell_infinity(value: Any) -> Any:
    """The value with the text "inf" in the place of every infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: spell_infinity(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [spell_infinity(item) for item in value]
    return "inf" if value == math.inf else value
