"""Statement, report and model card of a run, and the scan before anything is published."""

from __future__ import annotations

from hf_dpopt.report.facts import RunFacts, collect_versions
from hf_dpopt.report.model_card import add_privacy_section, strip_training_losses
from hf_dpopt.report.release_scan import Finding, refuse_release, scan_for_secrets
from hf_dpopt.report.report import read_report, write_report
from hf_dpopt.report.statement import render_statement

__all__ = [
    "Finding",
    "RunFacts",
    "add_privacy_section",
    "collect_versions",
    "read_report",
    "refuse_release",
    "render_statement",
    "scan_for_secrets",
    "strip_training_losses",
    "write_report",
]
