"""Random draws that belong to records, for the duration of a check.

Inside, whatever torch draws for the rows of a batch (dropout masks, depth that is dropped record by record, jitter of
a router) is a function of (operation, record): a record sees the same draws alone as beside others, so the two
can be compared in training mode. A draw without a row for each record is shared by the whole batch; it is the same in
every batch of a check, is noted, and can be forced to its extremes.

Shape legend: B = records, k = rows of a record.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

UNTAGGED = {"random", "random_", "binomial", "_sample_dirichlet"}  # draws that torch does not tag as such
LOW, MIDDLE, HIGH = 1e-6, 0.5, 1 - 1e-6  # quantiles; 0 would be below a rate of 0 that a model compares with <=
STATE_WORDS = {LOW: 0x8D5BB930, HIGH: 0x9F862283}  # of a Mersenne Twister, that come out as these shares of 2**32


def _operation(func: Any) -> str:
    return func._schema.name.split("::")[1]


def _bound(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of an operation by name, defaults included."""
    names = func._schema.arguments
    given = {a.name: value for a, value in zip(names, args, strict=False)}
    return {a.name: a.default_value for a in names if a.has_default_value()} | given | kwargs


def seed_others(how: float | int) -> None:
    """Seed Python's and numpy's generators (int), or hold the next few hundred numbers at a quantile (float)."""
    if isinstance(how, int):
        random.seed(how)
        np.random.seed(how)
    else:
        random.setstate((3, (STATE_WORDS[how],) * 624 + (0,), None))
        np.random.set_state(("MT19937", np.full(624, STATE_WORDS[how], dtype=np.uint32), 0, 0, 0.0))


def others_were_used() -> bool:
    """Whether Python's or numpy's generator moved since `seed_others(0)`."""
    pure, words = random.Random(0).getstate(), np.random.RandomState(0).get_state(legacy=False)["state"]
    now = np.random.get_state(legacy=False)["state"]
    return random.getstate() != pure or now["pos"] != words["pos"] or not np.array_equal(now["key"], words["key"])


class RecordDraws(TorchDispatchMode):
    """Mode that makes draws per record while `records` are set, and passes everything through otherwise.

    `start` comes before each forward; a backward that recomputes (checkpointing) repeats the forward's draws, for all
    they depend on is one word of torch's CPU generator each, which checkpointing restores.

    Args:
        model: the model, whose modules are named in findings.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self._names = {id(module): name for name, module in model.named_modules()}
        self._records: tuple[int, ...] = ()
        self._rows_at: dict[int, int | None] = {}  # word of an operation -> dimension of the records
        self._per_record: float | None = None
        self._shared: float | int = 0
        self.shapes: dict[int, tuple[int, ...]] = {}  # word of an operation -> shape of its draw, of the last forward
        self.shared: dict[str, str] = {}  # module -> operation, of draws without a row for each record

    def start(self, records: Iterable[int], *, per_record: float | None = None, shared: float | int = 0) -> None:
        """Set the records of the next forward, in order, and how to draw for them.

        Args:
            records: an id for each record; none gives the draws back to torch.
            per_record: quantile that every draw is held at (`MIDDLE`: dropout keeps everything); None draws.
            shared: quantile that shared draws are forced to (float), or their seed (int).
        """
        self._records, self._per_record, self._shared, self.shapes = tuple(records), per_record, shared, {}
        torch.default_generator.manual_seed(0)

    def learn(self, of_all: dict[int, tuple[int, ...]], num: int, of_one: dict[int, tuple[int, ...]]) -> None:
        """Find the dimension of each draw that grows with the records: widths and heads may be multiples of them.

        Args:
            of_all: `shapes` of a forward of `num` records.
            of_one: `shapes` of a forward of one of them, with the same operations.
        """
        self.shared.clear()
        for word, shape in of_all.items():
            one = of_one.get(word, ())
            grown = [d for d, (n, m) in enumerate(zip(shape, one, strict=False)) if n != m]
            if len(one) == len(shape):
                is_by_record = len(grown) == 1 and shape[grown[0]] == num * one[grown[0]]
                self._rows_at[word] = grown[0] if is_by_record else None

    @property
    def has_shared(self) -> bool:
        """Whether the batch shares a draw, as far as `learn` found."""
        return None in self._rows_at.values()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled during a check, and keeping Dynamo away costs each operation its time again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._records or not _may_draw(func) or not _draws(func, args, kwargs):
            return func(*args, **kwargs)
        word = int(torch.randint(2**62, (), device="cpu"))
        accelerators = _accelerators(args, kwargs)
        with torch.random.fork_rng(accelerators):
            shape = self.shapes[word] = _shape(func, args, kwargs)
            dim = self._dimension(func, word, shape)
            if dim is not None:
                seeds, k = [word + 1 + record for record in self._records], shape[dim] // len(self._records)
                return _call_by_record(func, args, kwargs, dim, k, seeds, self._per_record)
            self.shared[self._module()] = _operation(func)
            return _call(func, args, kwargs, word - int(self._shared), self._shared)

    def _dimension(self, func: Any, word: int, shape: Sequence[int]) -> int | None:
        """The dimension in which a draw has k rows for each record; None if it has no such dimension."""
        is_one_list = _operation(func) == "randperm" or (_operation(func) == "multinomial" and len(shape) == 1)
        dim = None if is_one_list else self._rows_at.get(word, 0)
        return dim if dim is not None and dim < len(shape) and shape[dim] % len(self._records) == 0 else None

    def _module(self) -> str:
        """Name of the innermost module that runs."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            name = self._names.get(id(frame.f_locals.get("self")))
            if name:
                return name
            frame = frame.f_back
        return ""


@functools.cache
def _may_draw(func: Any) -> bool:
    """Whether an operation draws random numbers, whatever it is called with."""
    name = _operation(func)
    if torch.Tag.nondeterministic_seeded not in func.tags and name not in UNTAGGED:
        return False
    return "attention" not in name and "rnn" not in name  # fused: attention is made of plain operations in a check


def _draws(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call draws: dropout may be off."""
    bound = _bound(func, args, kwargs)
    return _operation(func) != "native_dropout" or (bound["train"] is not False and bound["p"] > 0)


def _accelerators(args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.device]:
    """CUDA devices that an operation draws on."""
    devices = {a.device for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)}
    if kwargs.get("device") is not None:
        devices.add(torch.device(kwargs["device"]))
    return [d for d in devices if d.type == "cuda"]


def _shape(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Shape of the drawn tensor."""
    bound = _bound(func, args, kwargs)
    if bound.get("size") is not None:
        return tuple(bound["size"])
    return next((tuple(a.shape) for a in bound.values() if isinstance(a, torch.Tensor)), ())


def _call(func: Any, args: Any, kwargs: dict[str, Any], seed: int, position: float | int | None) -> Any:
    """Call the operation under a seed of its own, or give its result at a quantile (float)."""
    # torch.manual_seed keeps the stack of each call until there is a device to seed: milliseconds, a thousand times
    torch.default_generator.manual_seed(seed)
    for device in _accelerators(args, kwargs):
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)
    kwargs = {name: None if name == "generator" else value for name, value in kwargs.items()}
    result = func(*args, **kwargs)
    return _hold_at(func, _bound(func, args, kwargs), result, position) if isinstance(position, float) else result


def _call_by_record(
    func: Any, args: Any, kwargs: dict[str, Any], dim: int, k: int, seeds: Sequence[int], position: float | None
) -> Any:
    """Call the operation on the rows of each record, under the record's seed."""
    total, names = k * len(seeds), [a.name for a in func._schema.arguments]

    def rows(value: Any, name: str, b: int) -> Any:
        if isinstance(value, torch.Tensor) and value.dim() > dim and value.size(dim) == total:
            return value.narrow(dim, b * k, k).contiguous()
        if name == "size":
            return [k if i == dim else n for i, n in enumerate(value)]
        return value

    results = []
    for b, seed in enumerate(seeds):
        own = [rows(value, name, b) for value, name in zip(args, names, strict=False)]
        own_kwargs = {name: rows(value, name, b) for name, value in kwargs.items()}
        results.append(_call(func, own, own_kwargs, seed, position))
    if func._schema.is_mutable:  # in place, or into `out`
        target = args[0] if _operation(func).endswith("_") else kwargs["out"]
        return target.copy_(torch.cat(results, dim=dim))
    if isinstance(results[0], tuple):
        return tuple(torch.cat(parts, dim=dim) for parts in zip(*results, strict=True))
    return torch.cat(results, dim=dim)


def _hold_at(func: Any, bound: dict[str, Any], result: Any, position: float) -> Any:
    """Replace the drawn values by a quantile; operations that are not known here keep what they drew."""
    name = _operation(func).rstrip("_")
    if name in ("native_dropout", "_fused_dropout"):
        drop = bound["p"] if name == "native_dropout" else 1 - bound["p"]
        keeps = drop < 1 and position != LOW
        value = bound["input" if name == "native_dropout" else "self"]
        scaled = value / (1 - drop) if keeps else torch.zeros_like(value)
        return scaled, torch.full_like(result[1], keeps)
    if name == "bernoulli":
        p = bound.get("p") if bound.get("p") is not None else bound["self"]
        p = torch.as_tensor(0.5 if p is None else p, device=result.device)
        ones = (p >= 1) if position == LOW else (p > 0)  # the values that a draw can take
        return result.copy_(ones.to(result.dtype).expand(result.shape))
    if name in ("rand", "rand_like", "uniform"):
        low, high = bound.get("from", 0.0), bound.get("to", 1.0)
        return result.fill_(low + (high - low) * position)
    if name in ("randn", "randn_like", "normal") and position == MIDDLE:
        mean = torch.as_tensor(0.0 if bound.get("mean") is None else bound["mean"], device=result.device)
        return result.copy_(mean.to(result.dtype).expand(result.shape))
    return result
