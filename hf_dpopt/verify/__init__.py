"""Verification of a run's privacy claim from its public files alone, by accountants and formulas that are not ours.

Nothing here imports the packages that trained the model: the files are read again, the sampling law, the strategy
matrix and its sensitivity are written again from the papers, and epsilon comes from the accountants of dp-accounting
and opacus. So a mistake in one place does not vouch for itself. No data, no key and no torch is needed.

What the public files cannot show stays open, and every outcome says so: whether the code that ran is the code that
the report names.
"""

from __future__ import annotations

from hf_dpopt.verify.outcome import FAILED, NOT_CHECKED, OK, Check, Outcome
from hf_dpopt.verify.verifying import verify

__all__ = ["FAILED", "NOT_CHECKED", "OK", "Check", "Outcome", "verify"]
