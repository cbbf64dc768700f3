"""Audits: lower bounds on epsilon, and tests of the noise, from runs of the real trainer on canaries."""

from hf_dpopt.audit.auditing import Audit, audit
from hf_dpopt.audit.bounds import lower_bounds

__all__ = ["Audit", "audit", "lower_bounds"]
