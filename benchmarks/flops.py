"""Model FLOPs of a training step, and the peak rate of a device, for model FLOP utilisation (MFU).

MFU is the FLOPs that training the model takes / (seconds of the step * peak FLOP/s of the device). Counted is what a step
without privacy needs, whatever the measured way computes besides (norms, a second backward, recomputed activations):

    full        6 N per token         2 N forward, 2 N for the gradient of the inputs, 2 N for that of the weights
    LoRA        4 N + 6 M per token   the frozen weights N have no gradient of their own; M are the adapters
    attention   12 L d T per token    scores and values, forward and backward; causal models in full, too

with N = weights of all matrices that every token is multiplied with (linear layers and a language model's head, tied or
not; no embeddings, norms, biases, nor the head of a classifier, which one token of a record meets), L layers, d columns of
all heads of a layer together, T tokens of a record. The convention is that of Chowdhery et al. (2022), arXiv:2204.02311,
Appendix B, with N as said.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import nn
from transformers.pytorch_utils import Conv1D

# TFLOP/s by the datasheets of NVIDIA: dense products, bf16 with float32 sums on tensor cores; float32 outside of them, as
# torch computes it unless TF32 is allowed. The first name that a device's name holds decides; order matters.
PEAK = (
    ("H200 NVL", {"bf16": 835.0, "fp32": 60.0}),
    ("H200", {"bf16": 989.0, "fp32": 67.0}),
    ("H100 NVL", {"bf16": 835.0, "fp32": 60.0}),
    ("H100 PCIe", {"bf16": 756.0, "fp32": 51.0}),
    ("H100", {"bf16": 989.0, "fp32": 67.0}),
    ("A100", {"bf16": 312.0, "fp32": 19.5}),
)
PER_RECORD = "classifier"  # modules of that name see one token of a record


class Weights(NamedTuple):
    """Numbers of weights of the matrices that every token is multiplied with."""

    trained: int
    frozen: int


def matrix_weights(model: nn.Module) -> Weights:
    """Count the weights of linear layers by whether they are trained; a tied head counts once, its embedding not."""
    trained = frozen = 0
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, Conv1D)) and PER_RECORD not in name.split("."):
            if module.weight.requires_grad:
                trained += module.weight.numel()
            else:
                frozen += module.weight.numel()
    return Weights(trained, frozen)


def flops_per_record(model: nn.Module, *, layers: int, width: int, tokens: int) -> float:
    """Model FLOPs of one record in a training step without privacy; see the head of this file.

    Args:
        model: as it is trained, adapters included.
        layers: L.
        width: d, columns of all heads of a layer together.
        tokens: T, tokens of the record.
    """
    weights = matrix_weights(model)
    per_token = 6 * weights.trained + 4 * weights.frozen + 12 * layers * width * tokens
    return float(per_token * tokens)


def peak_flops(device: str, precision: str) -> float | None:
    """Peak FLOP/s of a device by its name and the precision, "bf16" or "fp32"; None if it is not known."""
    for name, rates in PEAK:
        if name in device:
            return 1e12 * rates[precision]
    return None


def utilisation(flops: float, seconds: float, device: str, precision: str) -> float | None:
    """Share of a device's peak that the model FLOPs of a step make use of; None if the peak is not known."""
    peak = peak_flops(device, precision)
    return None if peak is None else flops / (seconds * peak)
