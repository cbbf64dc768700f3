"""`hf-dpopt audit`: lower bounds on epsilon, and tests of the noise, from runs of the real trainer."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from hf_dpopt.audit.auditing import Audit, audit
from hf_dpopt.cli.show import print_json
from hf_dpopt.common.collectives import current_ranks
from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.report.report import INSTALLATION, add_audit, read_report

LIKE = ("noise_mechanism", "noise_kwargs", "adjacency", "clipping", "clipping_norm", "privacy_unit")


def _settings_like(output_dir: Path) -> dict[str, Any]:
    """Options that audit what a run did: its noise, sampling, clip and budget, on as few records as canaries.

    Raises:
        DPConfigError: without a report, or for a run with a preconditioner.
    """
    plan = read_report(output_dir).plan
    if plan.get("preclip"):
        raise DPConfigError(
            "The run had a preconditioner, whose releases the audit does not follow. Audit without --like."
        )
    return {
        "target_epsilon": plan["target_epsilon"] or plan["epsilon"],
        "target_delta": plan["delta"],
        "sampling": plan["sampler"]["name"],
    } | {name: plan[name] for name in LIKE if plan.get(name) not in (None, {})}


def show_audit(
    options: Mapping[str, Any],
    *,
    num_canaries: int,
    num_steps: int,
    as_json: bool,
    like: Path | None = None,
) -> int:
    """Audit these options, or those of a run it is like, print what was found, and return 1 if a test failed."""
    settings = {} if like is None else _settings_like(like)
    settings |= {name: value for name, value in options.items() if value is not None}
    done = audit(settings, num_canaries=num_canaries, num_steps=num_steps)
    if like is not None:
        current_ranks().same(lambda: _write_down(like, done))
    if as_json:
        print_json(done.public_dict())
    else:
        _print(done)
    return 0 if done.has_passed else 1


def _write_down(output_dir: Path, done: Audit) -> None:
    """Put the audit beside the report of the run that it is like."""
    setting = done.setting
    counts = {name: setting[name] for name in ("num_canaries", "num_steps")}
    path = add_audit(output_dir, INSTALLATION, done.public_dict() | counts)
    sys.stderr.write(f"hf-dpopt: written to {path}, and into the statement beside it.\n")


def _print(done: Audit) -> None:
    setting = done.setting
    typer.echo(
        f"{setting['num_canaries']} canaries, {setting['num_steps']} steps of {setting['expected_batch_size']}, "
        f"{setting['sampling']}, {setting['noise_mechanism']}, {setting['adjacency']}: epsilon "
        f"{done.claimed_epsilon:.4g} at delta {done.delta:g} is claimed"
    )
    for finding in done.findings:
        typer.echo(f"{'ok' if finding.has_passed else 'FAILED':<7} {finding.name}: {finding.seen}")
    for method, bound in done.bounds.items():
        typer.echo(f"        epsilon >= {bound:.2f} by {method}, with confidence {1 - done.significance:.0%}")
    typer.echo(done.verdict)
