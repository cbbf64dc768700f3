"""Room on the device of a run for noise that is kept between steps."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from hf_dpopt.common.errors import DPConfigError

TRAINED_BYTES = 16  # of a trained coordinate: its sum, its gradient and two moments, each in float32
MEMORY = Path("/proc/meminfo")


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a device; that which the system calls available for the CPU."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = dict(line.split(":") for line in MEMORY.read_text(encoding="utf-8").splitlines())
    return 1024 * int(lines["MemAvailable"].split()[0])


def room_for_noise(model: nn.Module, device: torch.device) -> tuple[int, int]:
    """Trained coordinates, and bytes that noise may keep: half of the rest once weights, sums and moments have theirs.

    The other half is for activations, which nothing tells before the first batch.

    Args:
        model: the model as it will be trained.
        device: where it will be trained.
    """
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    to_come = sum(p.numel() * p.element_size() for p in model.parameters() if p.device.type != device.type)
    return trained, max(0, free_bytes(device) - to_come - TRAINED_BYTES * trained) // 2


def check_is_whole(model: object, peft_config: object) -> nn.Module:
    """Refuse to choose for a model that is not there yet, or will get its adapters later."""
    if not isinstance(model, nn.Module) or peft_config is not None:
        raise DPConfigError(
            "noise_kwargs={'backend': 'fit'} chooses by the number of trained parameters, and the model is not whole "
            "yet. Hand over a loaded model with its adapters, or name the backend (auto, history, regenerate)."
        )
    return model
