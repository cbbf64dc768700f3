"""The privacy statement of a convex head."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_dpopt.accounting.meaning import no_protection
from hf_dpopt.common.durable import read_whole, write_durably
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.json_text import parse_json
from hf_dpopt.convex.plan import HeadPlan
from hf_dpopt.convex.subspace import SubspaceHeadPlan
from hf_dpopt.report.facts import collect_versions
from hf_dpopt.report.report import FOLDER, STATEMENT
from hf_dpopt.report.statement import round_up
from hf_dpopt.run.ledger import Ledger

REPORT = "head.json"

_TEXT = """\
# Final weights only: {headline}

Published are the weights of a linear head after the last step, and nothing else that was computed from the training
data: no intermediate weights, no losses or metrics on training records, no choice between several runs. **The promise
is void as soon as any of that leaves.**

For every two datasets that differ in one record (`add_or_remove_one`: one of them has one record more), and every set
of final weights, the probabilities P and P' of the two satisfy P <= e^epsilon P' + delta with epsilon = {epsilon}
and delta = {delta:g}, in the arithmetic of real numbers and with an ideal random generator.{weak}

* **How.** Softmax regression ({num_labels} labels) on features of a frozen model, each shortened to norm {norm:g};
  projected noisy SGD, {steps:,} steps. {sampling} Noise of {sigma:.6g} times the largest gradient of a record
  (sqrt(2) x {norm:g}) is added to the sum of every batch; step size {eta:g}{decay}{l2}; the weights stay in a ball of
  radius {radius:g}.
* **Accounting.** {accounting}
* **Not proven** here: batches of fixed size, replacing a record, momentum, Adam, filters, correlated noise, clipped
  gradients, and any layer below the head. None of it was used.
* **Protected** is a row of the training set. A person with several rows is not protected as a whole. Public are the
  number of records n (both datasets are trained on with the numbers above, which were chosen for n; n itself is a
  declared number and no secret), the list of labels, the frozen model (and whatever it learned before) and all
  numbers above.
* **Not covered**: the evaluation data, on which metrics are exact (declared: {evaluation}); what was learned from
  training records before training (declared: {preprocessing}); other runs on the same records, which add up.
* **Must stay secret**: the training data and their features, which stay in the private directory of the run; until it
  ended, all of that directory.

Noise: {noise}. Ledger: `{ledger}`, digest `{digest}`. Software: {software}.
"""

_SUBSPACE_TEXT = """\
# Composition of {steps:,} releases, no last-iterate bound: {headline}

Published may be everything that is made of the {steps:,} noisy releases of this run: all iterates, and their mean, the
weights of the linear head. Losses and metrics on training records, and a choice between several runs, are not covered.

For every two datasets that differ in one record (`add_or_remove_one`: one of them has one record more), and every set
of outcomes, the probabilities P and P' of the two satisfy P <= e^epsilon P' + delta with epsilon = {epsilon} and
delta = {delta:g}, in the arithmetic of real numbers and with an ideal random generator.{weak}

* **How.** Softmax regression ({num_labels} labels) on features of a frozen model, each shortened to norm {norm:g}, by
  AdaGrad in a public subspace (arXiv:2008.06570, Algorithm 1), {steps:,} steps. {sampling} The sum of a batch's
  gradients is projected to at most {rank} directions of gradients of public records, computed anew every
  {refresh_every} steps; to its coordinates there noise of {sigma:.6g} times the largest gradient of a record
  (sqrt(2) x {norm:g}) is added. AdaGrad's matrix is made of these releases; step size {eta:g}; after a step the
  weights go to the closest point of a ball of radius {radius:g} in the norm of that matrix.
* **Accounting.** {accounting}
* **Protected** is a row of the training set. A person with several rows is not protected as a whole. Public are the
  number of records n (both datasets are trained on with the numbers above, which were chosen for n; n itself is a
  declared number and no secret), the list of labels, the frozen model (and whatever it learned before) and all
  numbers above.
* **Not protected at all**: the public records, labels included, of which the directions are made.
* **Not covered**: the evaluation data, on which metrics are exact (declared: {evaluation}); what was learned from
  training records before training (declared: {preprocessing}); other runs on the same records, which add up.
* **Must stay secret**: the training data and their features, which stay in the private directory of the run; until it
  ended, all of that directory.

Noise: {noise}. Ledger: `{ledger}`, digest `{digest}`. Software: {software}.
"""

_BY_COMPOSITION = (
    "No last-iterate bound: the matrix of a step is made of earlier releases, so steps are no contractions. Epsilon "
    "is that of {steps:,} {releases}, composed one after the other; every one of them may be seen."
)
_WEAK = """
Delta is not below 1/n = {worthless:.3g}: publishing one record outright, chosen at random, would keep a promise with
such a delta."""

_BY_LAST = (
    "The privacy loss of the last iterate (Altschuler and Talwar 2022, arXiv:2205.13710, in the trade-off functions "
    "of arXiv:2403.00278): the last {horizon:,} steps count, {share:.0%} of their noise hides what came before. All "
    "{steps:,} iterates together would have epsilon {plain}."
)
_NONE = "None: there is no noise."
_BY_ALL = "Plain composition over all {steps:,} steps is the better bound here: every iterate may be seen."


def render(
    plan: HeadPlan | SubspaceHeadPlan, num_labels: int, digest: str, noise: str, declared: Mapping[str, str]
) -> str:
    """The statement as Markdown; its first line says what is released."""
    config = plan.config
    epsilon = round_up(plan.epsilon()) if plan.is_private else "infinite"
    weak = _WEAK.format(worthless=1 / plan.num_examples) if plan.delta >= 1 / plan.num_examples else ""
    weak += f" {said}" if (said := no_protection(plan.epsilon() if plan.is_private else math.inf)) else ""
    own = _of_subspace(plan) if isinstance(plan, SubspaceHeadPlan) else _of_last_iterate(plan)
    return (_SUBSPACE_TEXT if isinstance(plan, SubspaceHeadPlan) else _TEXT).format(
        **own,
        headline=f"epsilon {epsilon} at delta {plan.delta:g}" if plan.is_private else "NOT PRIVATE, the noise is off",
        epsilon=epsilon,
        delta=plan.delta,
        weak=weak,
        num_labels=num_labels,
        norm=config.feature_norm,
        steps=config.num_steps,
        sampling=plan.sampler.describe(),
        sigma=plan.noise_multiplier,
        eta=config.step_size,
        radius=config.head_radius,
        noise=noise,
        evaluation=declared.get("eval_data_privacy", "undeclared"),
        preprocessing=declared.get("data_dependent_preprocessing", "not declared"),
        ledger=f"{FOLDER}/ledger.jsonl",
        digest=digest,
        software=", ".join(f"{name} {version}" for name, version in collect_versions().items()),
    )


def _of_last_iterate(plan: HeadPlan) -> dict[str, str]:
    """Parts of the statement that the bound on the last iterate alone has."""
    config, spent = plan.config, plan.spent
    known = math.isfinite(spent.composition)
    plain = round_up(spent.composition) if known else "more than three times as large, by Renyi divergences"
    accounting = (_BY_ALL if spent.horizon is None else _BY_LAST).format(
        horizon=spent.horizon or 0, share=spent.share or 0.0, steps=config.num_steps, plain=plain
    )
    return {
        "accounting": accounting if plan.is_private else _NONE,
        "decay": f" x t^-{config.decay:g}" if config.decay else "",
        "l2": f", l2 regularisation {config.l2:g}" if config.l2 else "",
    }


def _of_subspace(plan: SubspaceHeadPlan) -> dict[str, str | int]:
    """Parts of the statement that the composition of releases alone has."""
    config = plan.config
    is_full = config.expected_batch_size == plan.num_examples
    releases = "Gaussian releases" if is_full else "Gaussian releases of Poisson batches"
    accounting = _BY_COMPOSITION.format(steps=config.num_steps, releases=releases)
    return {
        "accounting": accounting if plan.is_private else _NONE,
        "rank": config.rank,
        "refresh_every": config.refresh_every,
    }


def write_statement(
    output_dir: Path,
    plan: HeadPlan | SubspaceHeadPlan,
    num_labels: int,
    ledger: Ledger,
    noise: str,
    declared: Mapping[str, str],
) -> None:
    """Write `statement.md` for people and `head.json` for programs."""
    folder = output_dir / FOLDER
    text = render(plan, num_labels, ledger.digest(), noise, declared)
    report = {
        **plan.public_dict(), **declared, "num_labels": num_labels, "ledger_digest": ledger.digest(),
        "statement_sha256": hashlib.sha256(text.encode()).hexdigest(),
    }  # fmt: skip
    write_durably(folder / STATEMENT, text.encode(), mode=0o644)
    write_durably(folder / REPORT, (json.dumps(report, indent=1) + "\n").encode(), mode=0o644)


def read_head_report(output_dir: Path) -> dict[str, Any] | None:
    """The report of a head's run; None if the folder holds no head.

    Raises:
        DPConfigError: if it is damaged.
    """
    path = output_dir / FOLDER / REPORT
    if not os.path.lexists(path):
        return None
    content = read_whole(path)
    try:
        report = parse_json(content)
    except ValueError:
        report = None
    digests = ("statement_sha256", "ledger_digest")
    if not isinstance(report, dict) or not all(isinstance(report.get(name), str) for name in digests):
        raise DPConfigError(
            f"{path} is no report of a head: it was damaged or edited. Put the file back; what the run cost is in the "
            "ledger beside it."
        )
    return report


def read_statement(output_dir: Path) -> str:
    """Text of the statement of a head's run.

    Raises:
        DPConfigError: if it is missing.
    """
    return read_whole(output_dir / FOLDER / STATEMENT).decode(errors="replace")


def disagreements(output_dir: Path, report: dict[str, Any]) -> list[str]:
    """Contradictions between a head's folder and its report, one sentence each."""
    folder, problems = output_dir / FOLDER, []
    statement = folder / STATEMENT
    content = statement.read_bytes() if statement.is_file() else b""
    if hashlib.sha256(content).hexdigest() != report["statement_sha256"]:
        problems.append(f"{statement} is missing or was edited.")
    digest = Ledger.read(folder / "ledger.jsonl").digest()
    if digest != report["ledger_digest"]:
        problems.append(f"the ledger's digest is {digest}, the report names {report['ledger_digest']}.")
    return problems
