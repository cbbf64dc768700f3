"""Per-record gradient norms and exact clipped sums, without per-record gradients."""

from hf_dpopt.grads.engine import ClippingEngine, UnprivatizedStatistics

__all__ = ["ClippingEngine", "UnprivatizedStatistics"]
