"""Clipped gradient sums: capture, rules per layer, contributions, engines.

A new engine is one file and one line in `ENGINES`.
"""

from __future__ import annotations

from torch import nn

from hf_dpopt.clipping.book_keeping import BookKeepingEngine
from hf_dpopt.clipping.engine import ClippingEngine, UnprivatizedStatistics
from hf_dpopt.clipping.explain import explain, unruled
from hf_dpopt.clipping.thresholds import Clipping
from hf_dpopt.clipping.two_pass import TwoPassEngine
from hf_dpopt.common.checks import check_choice

__all__ = [
    "ENGINES",
    "BookKeepingEngine",
    "ClippingEngine",
    "TwoPassEngine",
    "UnprivatizedStatistics",
    "choose_engine",
    "explain",
    "make_engine",
    "unruled",
]

ENGINES: dict[str, type[ClippingEngine]] = {cls.name: cls for cls in (BookKeepingEngine, TwoPassEngine)}
MATMUL_SHARE = 0.1


def make_engine(model: nn.Module, clipping: Clipping, name: str = "auto") -> ClippingEngine:
    """The clipping engine of that name; "auto" takes the choice of `choose_engine`.

    Raises:
        DPConfigError: for an unknown name.
        UnsupportedModuleError: if a trainable parameter cannot be covered; names it.
    """
    if name == "auto":
        name, _ = choose_engine(model)
    check_choice("clipping_engine", name, ("auto", *ENGINES))
    return ENGINES[name](model, clipping)


def choose_engine(model: nn.Module) -> tuple[str, str]:
    """The name of the faster engine for the model, and the reason.

    Book-keeping is faster and keeps the inputs of trained layers until the end of the backward. That is no more than
    autograd keeps, unless gradient checkpointing has just freed it and most of the layers are trained.
    """
    checkpointing = any(getattr(module, "gradient_checkpointing", False) for module in model.modules())
    if not checkpointing:
        return BookKeepingEngine.name, "one backward; gradient checkpointing is off"
    matrices = [p for p in model.parameters() if p.dim() > 1]
    trained = sum(p.numel() for p in matrices if p.requires_grad)
    share = trained / max(1, sum(p.numel() for p in matrices))
    if share > MATMUL_SHARE:
        return TwoPassEngine.name, f"gradient checkpointing is on and {share:.0%} of the weights are trained"
    return BookKeepingEngine.name, f"one backward; only {share:.1%} of the weights are trained"
