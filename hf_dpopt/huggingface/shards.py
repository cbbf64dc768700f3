"""Checkpoints of models in shards, which any number of ranks resumes.

The stock Trainer would write the shards of rank 0 as the optimizer's state of a model that transformers sharded, and
torch's own format for one that accelerate did, which knows nothing of filters and of what a noise-aware optimizer
keeps. Here weights, and the state of the optimizer and of the stages, are gathered, one tensor after the other, and
rank 0 writes them whole: weights for `from_pretrained`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import nn
from transformers import Trainer
from transformers.utils import (
    ADAPTER_SAFE_WEIGHTS_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    is_peft_available,
)

from hf_dpopt.common.errors import DPConfigError
from hf_dpopt.common.sharding import (
    any_sharded,
    cut_like,
    gathered,
    give_back,
    is_sharded,
    local_of,
    scattered,
    whole_of,
)

FULL = "FULL_STATE_DICT"


def is_in_shards(model: nn.Module) -> bool:
    """Whether weights of a model, trained or not, lie in shards on the ranks."""
    return any_sharded(model.parameters())


def write_whole_models(accelerator: Any) -> None:
    """Have accelerate gather the model where it is saved: its other format cannot be loaded by `from_pretrained`."""
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is not None:
        plugin.set_state_dict_type(FULL)


def whole_state(state_dict: dict[str, Any] | None, *, keeps: bool) -> dict[str, Any] | None:
    """The state of a model with whole tensors in the host's memory, where it was handed over in shards.

    Args:
        state_dict: what accelerate gathered, or on CPUs did not; the same names on every rank.
        keeps: whether this rank writes it; the others take part.
    """
    if state_dict is None or not any_sharded(state_dict.values()):
        return state_dict
    found = {}
    for name, value in state_dict.items():
        whole = whole_of(value).cpu() if is_sharded(value) else value
        if keeps:
            found[name] = whole
    return found


def average_no_gradients(accelerator: Any) -> None:
    """Place models as usual, autocast included, but without DistributedDataParallel.

    Its reducer would average un-noised gradients. The step does one SUM of clipped sums instead.
    """
    prepare = accelerator.prepare_model
    accelerator.prepare_model = lambda model, device_placement=None, evaluation_mode=False: prepare(
        model, device_placement=device_placement, evaluation_mode=True
    )


class _WholeState:
    """An optimizer of parameters in shards, whose state in a file has none; on every rank of the run together.

    Args:
        optimizer: the one that the state is of.
        whole: its state without shards, on the rank that writes it; None where it is read.
    """

    def __init__(self, optimizer: Any, whole: Any):
        self._optimizer, self._whole = optimizer, whole

    def state_dict(self) -> Any:
        return self._whole

    def load_state_dict(self, state: Any) -> None:
        parameters = (p for group in self._optimizer.param_groups for p in group["params"])
        like = next(filter(is_sharded, parameters), None)
        self._optimizer.load_state_dict(state if like is None else scattered(state, like))


@contextlib.contextmanager
def optimizer_in_files(trainer: Trainer, folder: str | None, *, saves: bool) -> Iterator[None]:
    """Let the stock save or load of the optimizer meet a state without shards, where the model is in shards.

    Args:
        trainer: whose optimizer is another one inside the context.
        folder: folder of the checkpoint; None where there is none to read.
        saves: whether its state is written, in which all ranks take part; else it is read.
    """
    model, optimizer = trainer.model, cast(Any, trainer.optimizer)
    if model is None or not is_in_shards(model) or folder is None:
        yield
        return
    is_accelerates = trainer.is_fsdp_enabled
    whole = gathered(optimizer.state_dict(), keeps=trainer.args.should_save) if saves else None
    trainer.optimizer, trainer.is_fsdp_enabled = cast(Any, _WholeState(optimizer, whole)), False
    try:
        yield
    finally:
        trainer.optimizer, trainer.is_fsdp_enabled = optimizer, is_accelerates


def load_weights(model: nn.Module, checkpoint: str) -> None:
    """Copy the weights of a checkpoint into the shards of a model; every rank reads the file.

    Args:
        model: model in shards; of one with an adapter, the checkpoint has the adapter's weights alone.
        checkpoint: folder that `save_model` wrote.

    Raises:
        DPConfigError: if there is no file, or it lacks a trained parameter.
    """
    give_back(model)
    known = dict(model.state_dict())
    files = _files(Path(checkpoint))
    if not files:
        raise DPConfigError(
            f"{checkpoint} has no {SAFE_WEIGHTS_NAME} and no {ADAPTER_SAFE_WEIGHTS_NAME}: the weights cannot be "
            "brought back to their shards. Resume from a checkpoint that a run with save_safetensors wrote."
        )
    if any(path.name == ADAPTER_SAFE_WEIGHTS_NAME for path in files):
        known = _names_in_adapter_file(model, known)
    loaded = set()
    with torch.no_grad():
        for path in files:
            with safe_open(path, framework="pt") as file:
                for name in file.keys() & known.keys():
                    to = known[name]
                    local_of(to).copy_(local_of(cut_like(to, file.get_tensor(name))))
                    loaded.add(_place(to))
    missing = [name for name, p in model.named_parameters() if p.requires_grad and _place(p) not in loaded]
    if missing:
        raise DPConfigError(
            f"{checkpoint} lacks trained weights: {', '.join(missing[:5])}. Resume from a whole checkpoint."
        )


def _place(tensor: torch.Tensor) -> tuple[int, Any]:
    """A mark that tensors share if they share their memory; an empty shard has none, so its shape tells it."""
    mine = local_of(tensor)
    return (mine.data_ptr(), tuple(tensor.shape) if mine.numel() == 0 else None)


def _files(checkpoint: Path) -> list[Path]:
    """The files with the weights of a checkpoint, or with those of its adapter."""
    index = checkpoint / SAFE_WEIGHTS_INDEX_NAME
    if index.is_file():
        return [checkpoint / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    return [path for name in (SAFE_WEIGHTS_NAME, ADAPTER_SAFE_WEIGHTS_NAME) if (path := checkpoint / name).is_file()]


def _names_in_adapter_file(model: nn.Module, known: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Name in the file of an adapter -> tensor of the model."""
    assert is_peft_available()
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(model, state_dict=dict(known), save_embedding_layers=False)
