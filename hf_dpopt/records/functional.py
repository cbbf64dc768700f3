"""`clipped_gradient_sum`: the middle tier, for tests and for one's own training loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hf_dpopt.clipping import make_engine
from hf_dpopt.clipping.thresholds import make_clipping
from hf_dpopt.common.checks import check_clipping_norm
from hf_dpopt.records.losses import RecordLoss, RecordLosses, num_records


def clipped_gradient_sum(
    model: nn.Module,
    batch: Mapping[str, Any],
    *,
    clipping_norm: float,
    clipping: str = "flat",
    loss: str | RecordLoss = "auto",
    engine: str = "auto",
) -> dict[str, torch.Tensor]:
    r"""``sum_b clip(grad L_b)`` over the records of a batch; nothing is added to it.

    Formal guarantee: adding or removing one record moves the result by at most ``clipping_norm`` in L2 over all
    tensors together, if the loss of a record depends on that record alone. The result is *not* private.

    Args:
        model: any supported transformers model, PEFT-wrapped or not; its mode (train / eval) is left as it is.
        batch: collated inputs with labels, on the model's device; every tensor has one row per record.
        clipping_norm: bound on a record's gradient norm, gradient units, from 1e-10 to 1e10.
        clipping: "flat", "per_layer" or "automatic".
        engine: "book_keeping", "two_pass", or "auto" (the cheaper one); the result is the same.
        loss: "auto" (own-token mean of the model's task) or a function (outputs, labels) or
            (outputs, labels, inputs) -> (B,).

    Returns:
        Name -> fp32 tensor (float64 for float64 models) of the parameter's shape, trainable parameters only.

    Raises:
        DPConfigError: for a bad clipping norm or name, a packed or inconsistent batch, an unknown task.
        UnsupportedModuleError: for trainable parameters whose per-record gradient cannot be captured.

    References:
        Abadi et al. (2016), arXiv:1607.00133, Alg. 1; Bu et al. (2023), arXiv:2210.00038.
    """
    rule = make_clipping(clipping, clipping_norm)
    check_clipping_norm("clipping_norm", clipping_norm)
    clipper = make_engine(model, rule, engine)
    losses = RecordLosses(model, loss)
    sums = clipper.empty_sum()
    clipper.add_clipped_sum(sums, lambda: losses(batch), num_records(batch))
    return sums.result()
