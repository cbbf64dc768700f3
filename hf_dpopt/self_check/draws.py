"""Random draws that belong to records, for the duration of a check.

Inside, whatever torch draws for the rows of a batch (dropout masks, depth that is dropped record by record, jitter of
a router) is a function of (seed, operation, record): a record sees the same draws alone as beside others, so the two
can be compared in training mode. A draw without a row for each record is shared by the whole batch; it is the same in
every batch of a check, is noted, and can be forced to its extremes.

Shape legend: B = records, k = rows of a record.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import sys
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

UNTAGGED = {"random", "random_", "binomial", "_sample_dirichlet"}  # draws that torch does not tag as such
LOW, MIDDLE, HIGH = (
    1e-6,
    0.5,
    1 - 1e-6,
)  # quantiles; 0 itself would be below a rate of 0 that somebody compares with <=
NUM_DEVIATIONS = 3.0  # of a normal that is forced


@dataclasses.dataclass(frozen=True)
class SharedDraw:
    """A draw without a row for each record: what was drawn and in which module."""

    operation: str
    module: str


def _seed(*parts: Any) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


def _bound(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of an operation by name, defaults included."""
    names = func._schema.arguments
    given = {a.name: value for a, value in zip(names, args, strict=False)}
    return {a.name: a.default_value for a in names if a.has_default_value()} | given | kwargs


def _operation(func: Any) -> str:
    return func._schema.name.split("::")[1]


class RecordDraws(TorchDispatchMode):
    """Mode that makes draws per record while `records` are set, and passes everything through otherwise.

    `start` comes before each forward; a backward that recomputes (checkpointing) repeats the forward's draws, for all
    they depend on is one word of torch's CPU generator each, which checkpointing restores.

    Args:
        model: the model, whose modules are named in findings.
        seed: seed of all draws.
    """

    def __init__(self, model: nn.Module, seed: int = 0):
        super().__init__()
        self._names = {id(module): name for name, module in model.named_modules()}
        self._seed = seed
        self._records: tuple[int, ...] = ()
        self._shapes: dict[int, tuple[int, ...]] = {}  # word of an operation -> shape, of the forward that runs
        self._rows_at: dict[int, int | None] = {}  # word of an operation -> dimension of the records
        self._per_record: float | None = None  # quantile that draws of records are held at
        self._shared: float | int = 0  # a quantile (float) that shared draws are forced to, or a seed of theirs (int)
        self._only: SharedDraw | None = None
        self.shared: dict[SharedDraw, None] = {}
        self.num_drawn = 0  # operations so far

    def start(
        self,
        records: Iterable[int],
        *,
        per_record: float | None = None,
        shared: float | int = 0,
        only: SharedDraw | None = None,
    ) -> None:
        """Set the records of the next forward, in order, and how to draw for them.

        Args:
            records: an id for each record.
            per_record: quantile that every draw is held at (`MIDDLE`: dropout keeps everything); None draws.
            shared: quantile that shared draws are forced to (float), or their seed (int).
            only: the shared draw that `shared` applies to; None for all.
        """
        self._records, self._per_record, self._shared, self._only = tuple(records), per_record, shared, only
        self._shapes = {}
        torch.default_generator.manual_seed(self._seed)

    def stop(self) -> None:
        """Give the draws back to torch."""
        self._records = ()

    def shapes(self) -> dict[int, tuple[int, ...]]:
        """Shapes of the draws of the last forward, by operation."""
        return dict(self._shapes)

    def learn(self, num: int, of_all: dict[int, tuple[int, ...]], num_fewer: int, of_fewer: dict) -> None:
        """Find the dimension of each draw that grows with the records: widths and heads may be multiples of them.

        Args:
            num: number of records of a forward.
            of_all: `shapes` of that forward.
            num_fewer: number of records of another forward of some of them, with the same operations.
            of_fewer: `shapes` of that other forward.
        """
        self.shared.clear()
        for word, shape in of_all.items():
            fewer = of_fewer.get(word, ())
            if len(fewer) == len(shape):
                grown = [d for d, (n, m) in enumerate(zip(shape, fewer, strict=True)) if n != m]
                is_by_record = len(grown) == 1 and shape[grown[0]] * num_fewer == fewer[grown[0]] * num
                self._rows_at[word] = grown[0] if is_by_record else None

    @property
    def has_shared(self) -> bool:
        """Whether the batch shares a draw, as far as `learn` found."""
        return any(dim is None for dim in self._rows_at.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._records or not self._draws(func, args, kwargs):
            return func(*args, **kwargs)
        return self._drawn(func, args, kwargs)

    @staticmethod
    def _draws(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        name = _operation(func)
        if torch.Tag.nondeterministic_seeded not in func.tags and name not in UNTAGGED:
            return False
        if "attention" in name or "rnn" in name:  # fused: attention is made of plain operations in a check
            return False
        if name == "native_dropout":
            bound = _bound(func, args, kwargs)
            return bound["train"] is not False and bound["p"] > 0
        return True

    def _drawn(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        self.num_drawn += 1
        word = int(torch.randint(2**63 - 1, (), device="cpu"))
        with _kept_states(args, kwargs):
            shape = _shape(func, args, kwargs)
            self._shapes[word] = shape
            dim = self._dimension(func, word, shape)
            if dim is None:
                draw = SharedDraw(_operation(func), self._module())
                self.shared[draw] = None
                how = self._shared if self._only in (None, draw) else 0
                seed = _seed(word, "shared", 0 if isinstance(how, float) else how)
                return _call(func, args, kwargs, seed, how if isinstance(how, float) else None)
            seeds = [_seed(word, record) for record in self._records]
            return _call_by_record(func, args, kwargs, dim, shape[dim] // len(self._records), seeds, self._per_record)

    def _dimension(self, func: Any, word: int, shape: Sequence[int]) -> int | None:
        """The dimension in which a draw has k rows for each record; None if it has no such dimension."""
        num = len(self._records)
        if _operation(func) == "randperm" or (_operation(func) == "multinomial" and len(shape) == 1):
            return None
        if word in self._rows_at:
            dim = self._rows_at[word]
            return dim if dim is not None and dim < len(shape) and shape[dim] % num == 0 else None
        if len(shape) > 0 and shape[0] > 0 and shape[0] % num == 0:
            return 0
        return 1 if len(shape) > 1 and shape[1] == num else None  # time first

    def _module(self) -> str:
        """Name of the innermost module that runs."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            name = self._names.get(id(frame.f_locals.get("self")))
            if name:
                return name
            frame = frame.f_back
        return ""


def _accelerators(args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.device]:
    """CUDA devices that an operation draws on."""
    devices = {a.device for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)}
    if kwargs.get("device") is not None:
        devices.add(torch.device(kwargs["device"]))
    return [d for d in devices if d.type == "cuda"]


class _kept_states:
    """Context that restores torch's generators, on the CPU and on the devices of the arguments."""

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any]):
        self._devices = _accelerators(args, kwargs)

    def __enter__(self) -> None:
        self._cpu = torch.get_rng_state()
        self._others = [torch.cuda.get_rng_state(d) for d in self._devices]

    def __exit__(self, *error: Any) -> None:
        torch.set_rng_state(self._cpu)
        for device, state in zip(self._devices, self._others, strict=True):
            torch.cuda.set_rng_state(state, device)


def _shape(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Shape of the drawn tensor."""
    bound = _bound(func, args, kwargs)
    if bound.get("size") is not None:
        return tuple(bound["size"])
    return next((tuple(a.shape) for a in bound.values() if isinstance(a, torch.Tensor)), ())


def _call(func: Any, args: Any, kwargs: dict[str, Any], seed: int, position: float | None) -> Any:
    """Call the operation under a seed of its own, or give its result at a quantile."""
    # torch.manual_seed keeps the stack of each call until there is a device to seed: milliseconds, a thousand times
    torch.default_generator.manual_seed(seed)
    for device in _accelerators(args, kwargs):
        torch.cuda.default_generators[
            torch.cuda.current_device() if device.index is None else device.index
        ].manual_seed(seed)
    kwargs = {name: None if name == "generator" else value for name, value in kwargs.items()}
    result = func(*args, **kwargs)
    if position is None:
        return result
    return _hold_at(func, _bound(func, args, kwargs), result, position)


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
    if name in ("rand", "rand_like"):
        return result.fill_(position)
    if name == "uniform":
        low, high = bound.get("from", 0.0), bound.get("to", 1.0)
        return result.fill_(low + (high - low) * position)
    if name in ("randn", "randn_like", "normal"):
        mean, std = (bound.get(key) for key in ("mean", "std"))
        deviations = 0.0 if position == MIDDLE else math.copysign(NUM_DEVIATIONS, position - MIDDLE)
        spread = torch.as_tensor(1.0 if std is None else std, device=result.device) * deviations
        centre = torch.as_tensor(0.0 if mean is None else mean, device=result.device)
        return result.copy_((centre + spread).to(result.dtype).expand(result.shape))
    if name in ("randint", "randint_like", "random") and isinstance(bound.get("high", bound.get("to")), int):
        low = int(bound.get("low", bound.get("from")) or 0)
        high = int(bound.get("high", bound.get("to")))  # type: ignore[arg-type]
        return result.fill_(low if position == LOW else high - 1 if position == HIGH else (low + high) // 2)
    return result
