"""State of a model that no forward may change: parameters, buffers, extra state and configurations.

It is saved, so whatever a forward writes there would leave without noise, and would carry one record into the
gradients, scores and features of the next.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hf_dpopt.common.errors import DPConfigError, UnsupportedModuleError
from hf_dpopt.common.sharding import give_back, is_sharded, local_of
from hf_dpopt.common.types import SPOILT

LARGEST_COPY = 2**24  # bytes of a buffer that is kept as a copy for a whole training
SMALL = 2**20  # bytes of a buffer that is compared every time
BLOCK = 2**24  # bytes that are hashed at once
WORDS = 2**22  # that are summed at once
CACHED_WORDS = 2**16  # the same on a CPU, whose caches should hold the products
EXTRA = "_extra_state"  # end of a name in a state dict
CONFIGS = ("config", "generation_config")  # attributes of a model
WRITTEN_BY_TRANSFORMERS = "problem_type"  # of a classifier, at its first loss; it depends on types and shapes alone


@dataclasses.dataclass
class _Entry:
    """One tensor in a module's table of buffers or parameters."""

    owner: nn.Module
    table: dict[str, Any]
    key: str
    tensor: torch.Tensor
    is_cache: bool  # a buffer that is not saved
    value: torch.Tensor | None = None
    digest: bytes | None = None
    mark: tuple[int, ...] = ()


class KeptState:
    """The state of a model as it is now.

    Formal guarantee: after `restore` returns, all of it has the bytes that it had when this was made, or
    `refuse_spoilt` refuses the model. Caches (buffers that are not saved) are excepted, if they were left out.

    Memory: a copy of the buffers; of parameters and, for a whole training, of large buffers only digests.

    Args:
        model: the model.
        has_caches: whether buffers that are not saved belong to it, and buffers of any size are copied.
        has_parameters: whether parameters do; each thorough comparison hashes them.
    """

    def __init__(self, model: nn.Module, *, has_caches: bool, has_parameters: bool = True):
        self._model, self._has_caches, self._has_parameters = model, has_caches, has_parameters
        give_back(model)
        self._trained: set[str] = set()
        self._marks: dict[str, tuple[int, ...]] = {}  # of trained parameters, during a step
        self._entries = self._find()
        hashed = []
        for entry in self._entries.values():
            is_buffer, entry.mark = entry.table is entry.owner._buffers, _mark(entry.tensor)
            if is_buffer and (has_caches or entry.tensor.nbytes <= LARGEST_COPY):
                entry.value = entry.tensor.detach().clone()
            else:
                hashed.append(entry)
        with ThreadPoolExecutor() as pool:
            for entry, digest in zip(hashed, pool.map(_digest, [entry.tensor for entry in hashed]), strict=True):
                entry.digest = digest
        self._extra = [(module, copy.deepcopy(module.get_extra_state())) for _, module in _with_extra(model)]
        self._added = _added(model)
        self._configs = copy.deepcopy(_configs_of(model)) if has_caches else None

    def release_trained(self) -> None:
        """Exclude trained parameters: the optimizer changes them."""
        self._trained = {n for n, p in self._model.named_parameters(remove_duplicate=False) if p.requires_grad}
        self._entries = {name: entry for name, entry in self._entries.items() if name not in self._trained}

    @contextlib.contextmanager
    def in_step(self, *, is_local: bool) -> Iterator[None]:
        """Check inside the context that nothing writes to trained parameters, unless users train them locally."""
        named = {} if is_local else dict(self._model.named_parameters())
        self._marks = {name: _mark(p) for name, p in named.items() if p.requires_grad and not is_sharded(p)}
        self._configs = copy.deepcopy(_configs_of(self._model))
        try:
            yield
            self.check(is_thorough=False)
        finally:
            self._marks, self._configs = {}, None

    def _find(self) -> dict[str, _Entry]:
        found = {}
        for prefix, module in self._model.named_modules():
            tables = [module._buffers, module._parameters] if self._has_parameters else [module._buffers]
            for table in tables:
                for key, tensor in table.items():
                    name, is_cache = f"{prefix}.{key}".lstrip("."), key in module._non_persistent_buffers_set
                    if tensor is not None and name not in self._trained and (self._has_caches or not is_cache):
                        found[name] = _Entry(module, table, key, tensor, is_cache)
        return found

    def changed(self, *, is_thorough: bool = True, has_caches: bool = True) -> list[str]:
        """Names of what has other content than at the start.

        Args:
            is_thorough: whether to compare all contents; else those of small buffers, and of tensors whose version
                or address changed. That costs next to nothing, and misses writes to large tensors through `.data`.
            has_caches: whether to name buffers that are not saved.
        """
        if is_thorough:
            give_back(self._model)
        now = self._find()
        known = {**now, **self._entries}
        with ThreadPoolExecutor() if is_thorough else contextlib.nullcontext() as pool:
            each = map if pool is None else pool.map  # threads where there is much to hash
            changes = each(lambda name: self._is_changed(name, now.get(name), is_thorough), known)
            names = [name for name, is_changed in zip(known, changes, strict=True) if is_changed]
        if not has_caches:
            names = [name for name in names if not known[name].is_cache]
        names += [n for n, p in self._model.named_parameters() if n in self._marks and _mark(p) != self._marks[n]]
        if self._configs is not None:
            now_configs, before = _opened(_configs_of(self._model)), _opened(self._configs)
            names += [attribute for attribute in CONFIGS if now_configs[attribute] != before[attribute]]
        return names + self._changed_added(is_thorough=is_thorough)

    def _changed_added(self, *, is_thorough: bool) -> list[str]:
        now = _added(self._model, only_extra=not is_thorough)
        before = {name: content for name, content in self._added.items() if is_thorough or name.endswith(EXTRA)}
        return [name for name in {**before, **now} if now.get(name) != before.get(name)]

    def _is_changed(self, name: str, now: _Entry | None, is_thorough: bool) -> bool:
        was = self._entries.get(name)
        if was is None or now is None:
            return True
        if not is_thorough and is_sharded(was.tensor) != is_sharded(now.tensor):
            return False  # put together for a forward
        mark, is_small = _mark(now.tensor), was.value is not None and was.value.nbytes <= SMALL
        if mark == was.mark and not is_thorough and not is_small:
            return False
        if not (_digest(now.tensor) == was.digest if was.value is None else _is_same(now.tensor, was.value)):
            return True
        was.mark = mark
        return False

    def restore(self, *, is_thorough: bool = True) -> list[str]:
        """Restore what was changed, and mark the modules in which that is not possible; return the names.

        Args:
            is_thorough: whether to compare all contents; see `changed`.
        """
        names = self.changed(is_thorough=is_thorough)
        if not names:
            return names
        now = self._find()
        for name in names:
            was = self._entries.get(name)
            if name in self._marks:
                setattr(self._model.get_submodule(name.rpartition(".")[0]), SPOILT, name)
            elif was is None and name in now:
                del now[name].table[now[name].key]
            elif was is not None:
                if was.value is not None:
                    was.tensor.data = was.value.clone()
                elif _digest(was.tensor) != was.digest:
                    setattr(was.owner, SPOILT, name)
                    continue
                was.table[was.key] = was.tensor
        for attribute in CONFIGS:
            if attribute in names and self._configs is not None:
                values = vars(getattr(self._model, attribute))
                kept = {name: value for name, value in values.items() if name == WRITTEN_BY_TRANSFORMERS}
                values.clear()
                values.update(copy.deepcopy(self._configs[attribute]) | kept)
        for module, value in self._extra:
            module.set_extra_state(copy.deepcopy(value))
        if left := self._changed_added(is_thorough=is_thorough):
            setattr(self._model, SPOILT, left[0])
        return names

    def content_of_trained(self) -> dict[str, list[int]]:
        """Checksums of the parameters that `in_step` watches, which also writes through `.data` change."""
        named = {n: p for n, p in self._model.named_parameters() if n in self._marks}
        if not named:
            return {}
        odd = _odd_numbers(next(iter(named.values())).device)
        return dict(zip(named, torch.stack([_checksum(p, odd) for p in named.values()]).tolist(), strict=True))

    def check_trained(self, before: dict[str, list[int]]) -> None:
        """Refuse a model in which a forward wrote to a trained parameter.

        Args:
            before: `content_of_trained` before the forwards.

        Raises:
            UnsupportedModuleError: naming the parameter.
        """
        if names := [name for name, now in self.content_of_trained().items() if now != before[name]]:
            setattr(self._model, SPOILT, names[0])
            raise UnsupportedModuleError(changed_by_a_forward(names))

    def check(self, *, is_thorough: bool = True) -> None:
        """Restore what was changed, and refuse the model that changed it.

        Raises:
            UnsupportedModuleError: naming what was changed.
        """
        if names := self.restore(is_thorough=is_thorough):
            raise UnsupportedModuleError(changed_by_a_forward(names))


def keep_layout(model: nn.Module) -> None:
    """Keep weights in 4 bits as they are stored.

    On processors with AVX512-BF16 bitsandbytes packs them in the first forward in evaluation mode, and rounds their
    scales to bfloat16 for it: the file that is saved would depend on whether there was an evaluation.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def changed_by_a_forward(names: list[str]) -> str:
    """Message about state that a forward changed."""
    return (
        f"{', '.join(names)}: changed by a forward (or a callback), and would be saved without noise. Freeze the "
        "layer's statistics, switch its observers off, or replace the layer."
    )


def refuse_spoilt(model: nn.Module) -> None:
    """Refuse a model that holds what a forward made of private records.

    Raises:
        DPConfigError: naming the tensor.
    """
    name = next((getattr(module, SPOILT) for module in model.modules() if hasattr(module, SPOILT)), None)
    if name is not None:
        raise DPConfigError(
            f"{name}: a forward changed this tensor, and its former values are lost. Load the model again: this one "
            "is not trained, evaluated or saved."
        )


@contextlib.contextmanager
def kept_buffers(model: nn.Module) -> Iterator[KeptState]:
    """Restore all buffers and extra state after the context; yields the state at its start."""
    state = KeptState(model, has_caches=True, has_parameters=False)
    try:
        yield state
    finally:
        state.restore()


def _configs_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The values of a model's configurations, which are saved with it, themselves: copy what is to be kept."""
    found = {attribute: getattr(getattr(model, attribute, None), "__dict__", {}) for attribute in CONFIGS}
    return {
        attribute: {name: value for name, value in values.items() if name != WRITTEN_BY_TRANSFORMERS}
        for attribute, values in found.items()
    }


def _opened(value: Any) -> Any:
    """A value with all attributes of the configurations in it, which compare declared ones alone, or not at all."""
    if hasattr(value, "to_dict"):
        return type(value), _opened(vars(value))
    if isinstance(value, (list, tuple)):
        return [*map(_opened, value)]
    return {name: _opened(one) for name, one in value.items()} if isinstance(value, dict) else value


def _added(model: nn.Module, *, only_extra: bool = False) -> dict[str, bytes]:
    """Digests of what a state dict has beyond parameters and buffers: extra state, and what hooks put there."""
    if only_extra:
        found = {f"{name}.{EXTRA}".lstrip("."): module.get_extra_state() for name, module in _with_extra(model)}
    else:
        known = dict(model.named_parameters(remove_duplicate=False)) | dict(
            model.named_buffers(remove_duplicate=False)
        )
        state = model.state_dict(keep_vars=True)
        found = {name: value for name, value in state.items() if value is not known.get(name)}
    return {
        name: _digest(value) if isinstance(value, torch.Tensor) else pickle.dumps(value)
        for name, value in found.items()
    }


def _odd_numbers(device: torch.device) -> torch.Tensor:
    """Random odd numbers, int64, one for each word of those summed at once; the same in each call.

    With numbers in a row, changes that are alike would cancel: twice the weights would have the sums of the weights.
    """
    num, generator = CACHED_WORDS if device.type == "cpu" else WORDS, torch.Generator(device).manual_seed(0)
    return 2 * torch.randint(2**62, (num,), generator=generator, device=device) + 1


def _checksum(tensor: torch.Tensor, odd: torch.Tensor) -> torch.Tensor:
    """Sums of the words of a tensor and of their upper halves, each times an odd number of its place, int64, (2,).

    Any one word changes the first; signs that are flipped could cancel there, and change the second.

    Args:
        tensor: any.
        odd: the numbers of `_odd_numbers`.
    """
    words = _bytes(tensor)
    is_aligned = words.numel() % 8 == 0 and words.storage_offset() % 8 == 0
    words = (words if is_aligned else F.pad(words, (0, -words.numel() % 8))).view(torch.int64)
    is_cpu, sums = words.device.type == "cpu", []
    for i, block in enumerate(words.split(len(odd))):
        places = odd[: len(block)]
        for values in (block, block >> 32):  # in one pass; accelerators have no such product of integers
            sums.append((torch.dot(values, places) if is_cpu else (values * places).sum()) * odd[i % len(odd)])
    return torch.stack(sums).view(-1, 2).sum(0)


def _with_extra(model: nn.Module) -> list[tuple[str, nn.Module]]:
    plain = nn.Module.get_extra_state
    return [(name, module) for name, module in model.named_modules() if type(module).get_extra_state is not plain]


def _mark(tensor: torch.Tensor) -> tuple[int, ...]:
    """Number that changes with most writes: the object, its address and its version."""
    version = 0 if tensor.is_inference() else tensor._version
    return id(tensor), local_of(tensor.detach()).data_ptr(), version


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of this rank's part of a tensor."""
    return local_of(tensor.detach()).as_subclass(torch.Tensor).contiguous().reshape(-1).view(torch.uint8)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bytes(one), _bytes(other))


def _digest(tensor: torch.Tensor) -> bytes:
    """SHA-256 of dtype, shape and bytes, block by block."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    if not tensor.is_meta:
        for block in _bytes(tensor).split(BLOCK):
            digest.update(block.cpu().numpy().data)
    return digest.digest()
