"""The privacy statement of a convex head."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path

from hf_dpopt.accounting.profile import no_protection
from hf_dpopt.common.durable import write_durably
from hf_dpopt.convex.head_plan import HeadPlan
from hf_dpopt.convex.subspace_plan import SubspaceHeadPlan
from hf_dpopt.report.facts import collect_versions
from hf_dpopt.report.report import FOLDER, STATEMENT
from hf_dpopt.report.statement import fill, round_up

REPORT = "head.json"
NOT_PRIVATE = "NOT PRIVATE, the noise is off"
UNKNOWN = "more than three times as large, by Renyi divergences"  # epsilon of all iterates


def write_statement(
    output_dir: Path,
    plan: HeadPlan | SubspaceHeadPlan,
    num_labels: int,
    digest: str,
    noise: str,
    declared: Mapping[str, str],
) -> None:
    """Write `statement.md` for people, whose first line says what is released, and `head.json` for programs."""
    folder = output_dir / FOLDER
    epsilon, composition = plan.epsilon() if plan.is_private else math.inf, ""
    if isinstance(plan, HeadPlan):
        composition = round_up(plan.spent.composition) if math.isfinite(plan.spent.composition) else UNKNOWN
    text = fill(
        "convex/head.md.j2",
        plan=plan,
        config=plan.config,
        is_subspace=isinstance(plan, SubspaceHeadPlan),
        headline=f"epsilon {round_up(epsilon)} at delta {plan.delta:g}" if plan.is_private else NOT_PRIVATE,
        epsilon=round_up(epsilon),
        composition=composition,
        no_protection=no_protection(epsilon),
        steps=f"{plan.config.num_steps:,}",
        num_labels=num_labels,
        noise=noise,
        declared=declared,
        digest=digest,
        versions=collect_versions(),
    )
    report = {
        **plan.public_dict(), **declared, "num_labels": num_labels, "ledger_digest": digest,
        "statement_sha256": hashlib.sha256(text.encode()).hexdigest(),
    }  # fmt: skip
    write_durably(folder / STATEMENT, text.encode(), mode=0o644)
    write_durably(folder / REPORT, (json.dumps(report, indent=1) + "\n").encode(), mode=0o644)
