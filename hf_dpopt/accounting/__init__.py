"""Privacy accounting: events, accountants and calibration. Nothing here imports transformers."""

from __future__ import annotations

from hf_dpopt.accounting.accountants import ACCOUNTANTS, Spent, epsilon
from hf_dpopt.accounting.calibrate import calibrate_noise_multiplier

__all__ = ["ACCOUNTANTS", "Spent", "calibrate_noise_multiplier", "epsilon"]
