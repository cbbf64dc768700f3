"""Content of pickles, read from their opcodes: nothing is imported, called or built but plain Python values.

Unpickling runs what the file says. Here the stack machine of the format is followed with plain values only; an object
of a class becomes an `Opaque`, which keeps what it would have been made of.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import pickletools
from collections.abc import Callable, Iterator
from typing import Any

MAX_OPCODES = 5_000_000
MAX_DEPTH = 100
TORCH_MAGIC = 0x1950A86A20F9469CFC6C  # first value of torch's format without zip, which has five pickles
_MARK = object()


class PickleError(pickle.UnpicklingError):
    """Bytes that are no pickle, or one too large to be followed."""


@dataclasses.dataclass(eq=False)
class Opaque:
    """An object that was not built: its class or function, and everything it was given.

    Attributes:
        name: module and name of what would have been called, or "tensor storage".
        content: arguments, state and items.
    """

    name: str
    content: list[Any] = dataclasses.field(default_factory=list)


def read_pickles(data: bytes) -> tuple[list[Any], int]:
    """The values of the pickles that stand in a row at the beginning of the data, and where they end.

    Raises:
        PickleError: if the data does not begin with a pickle, or it has more than `MAX_OPCODES` opcodes.
    """
    stream, values, end = io.BytesIO(data), [], 0
    while end < len(data):
        try:
            values.append(_Machine().run(stream))
        except PickleError:
            raise
        except Exception as error:  # the data decides what is wrong with it
            if not values:
                raise PickleError(f"no pickle ({type(error).__name__})") from error
            break
        end = stream.tell()
        if values[0] == TORCH_MAGIC and len(values) == 5:
            break
    return values, end


def walk(value: Any) -> Iterator[tuple[str, Any]]:
    """Every value inside a value, with the key it stands under (an empty text if it has none); each object once."""
    seen: set[int] = set()
    todo: list[tuple[str, Any, int]] = [("", value, 0)]
    while todo:
        key, one, depth = todo.pop()
        if isinstance(one, (dict, list, tuple, Opaque)):
            if id(one) in seen or depth > MAX_DEPTH:
                continue
            seen.add(id(one))
        yield key, one
        if isinstance(one, dict):
            todo += [(name if isinstance(name, str) else "", item, depth + 1) for name, item in one.items()]
            todo += [("", name, depth + 1) for name in one]
        elif isinstance(one, (list, tuple)):
            todo += [("", item, depth + 1) for item in one]
        elif isinstance(one, Opaque):
            todo += [("", item, depth + 1) for item in one.content]


class _Machine:
    """One pickle's stack and memo."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, stream: io.BytesIO) -> Any:
        argument: Any  # by opcode: a string, a number or nothing
        for number, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
            if number > MAX_OPCODES:
                raise PickleError(f"more than {MAX_OPCODES} opcodes")
            name = opcode.name
            if name in _STORES:
                self.memo[len(self.memo) if name == "MEMOIZE" else int(argument)] = self.stack[-1]
            elif name in _LOADS:
                self.stack.append(self.memo[int(argument)])
            elif name in _IGNORED:
                continue
            elif name in _RULES:
                _RULES[name](self, argument)
            else:
                self.stack.append(argument)  # a number, a text or bytes: every opcode left pushes what it carries
        return self.stack[-1] if self.stack else None

    def pop_to_mark(self) -> list[Any]:
        place = len(self.stack) - 1
        while self.stack[place] is not _MARK:
            place -= 1  # ends in an IndexError where there is none
        items = self.stack[place + 1 :]
        del self.stack[place:]
        return items

    def make(self, name: str, num_arguments: int) -> None:
        """Replace what a call would take from the stack by an opaque object."""
        content = [self.stack.pop() for _ in range(num_arguments)][::-1]
        self.stack.append(Opaque(name, content))

    def add(self, items: list[Any]) -> None:
        """Give items to what lies on top."""
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(items)
        elif isinstance(target, Opaque):
            target.content.extend(items)

    def put(self, items: list[Any]) -> None:
        """Give keys and values in turn to what lies on top."""
        target = self.stack[-1]
        made: dict[Any, Any] = {}
        for key, value in zip(items[::2], items[1::2], strict=True):
            made[key if isinstance(key, (str, int, float, bytes, bool, type(None))) else id(key)] = value
        if isinstance(target, dict):
            target.update(made)
        elif isinstance(target, Opaque):
            target.content.append(made)

    def build(self) -> None:
        """Give a state to what lies on top."""
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Opaque):
            target.content.append(state)
        else:
            self.stack[-1] = Opaque("object", [target, state])

    def from_global(self, argument: str) -> None:
        self.stack.append(Opaque(str(argument)))

    def from_mark(self, kind: Callable[[list[Any]], Any]) -> None:
        self.stack.append(kind(self.pop_to_mark()))


def _dictionary(items: list[Any]) -> dict[Any, Any]:
    machine = _Machine()
    machine.stack.append({})
    machine.put(items)
    return machine.stack[0]


def _append_items(machine: _Machine, _: Any) -> None:
    items = machine.pop_to_mark()
    machine.add(items)


def _set_items(machine: _Machine, _: Any) -> None:
    items = machine.pop_to_mark()
    machine.put(items)


def _append(machine: _Machine, _: Any) -> None:
    item = machine.stack.pop()
    machine.add([item])


def _set_item(machine: _Machine, _: Any) -> None:
    value, key = machine.stack.pop(), machine.stack.pop()
    machine.put([key, value])


def _stack_global(machine: _Machine, _: Any) -> None:
    name, module = machine.stack.pop(), machine.stack.pop()
    machine.stack.append(Opaque(f"{module} {name}"))


_STORES = ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE")
_LOADS = ("GET", "BINGET", "LONG_BINGET")
_IGNORED = ("PROTO", "FRAME", "STOP", "NEXT_BUFFER", "READONLY_BUFFER")
_RULES: dict[str, Callable[[_Machine, Any], Any]] = {
    "NONE": lambda m, _: m.stack.append(None),
    "NEWTRUE": lambda m, _: m.stack.append(True),
    "NEWFALSE": lambda m, _: m.stack.append(False),
    "MARK": lambda m, _: m.stack.append(_MARK),
    "POP": lambda m, _: m.stack.pop(),
    "POP_MARK": lambda m, _: m.pop_to_mark(),
    "DUP": lambda m, _: m.stack.append(m.stack[-1]),
    "EMPTY_LIST": lambda m, _: m.stack.append([]),
    "EMPTY_DICT": lambda m, _: m.stack.append({}),
    "EMPTY_TUPLE": lambda m, _: m.stack.append(()),
    "EMPTY_SET": lambda m, _: m.stack.append([]),
    "LIST": lambda m, _: m.from_mark(list),
    "TUPLE": lambda m, _: m.from_mark(tuple),
    "FROZENSET": lambda m, _: m.from_mark(list),
    "DICT": lambda m, _: m.from_mark(_dictionary),
    "TUPLE1": lambda m, _: m.stack.append((m.stack.pop(),)),
    "TUPLE2": lambda m, _: m.stack.append(tuple([m.stack.pop() for _ in range(2)][::-1])),
    "TUPLE3": lambda m, _: m.stack.append(tuple([m.stack.pop() for _ in range(3)][::-1])),
    "APPEND": _append,
    "APPENDS": _append_items,
    "ADDITEMS": _append_items,
    "SETITEM": _set_item,
    "SETITEMS": _set_items,
    "GLOBAL": lambda m, argument: m.from_global(argument),
    "STACK_GLOBAL": _stack_global,
    "EXT1": lambda m, argument: m.from_global(f"extension {argument}"),
    "EXT2": lambda m, argument: m.from_global(f"extension {argument}"),
    "EXT4": lambda m, argument: m.from_global(f"extension {argument}"),
    "REDUCE": lambda m, _: m.make("call", 2),
    "NEWOBJ": lambda m, _: m.make("object", 2),
    "NEWOBJ_EX": lambda m, _: m.make("object", 3),
    "INST": lambda m, argument: m.stack.append(Opaque(str(argument), m.pop_to_mark())),
    "OBJ": lambda m, _: m.from_mark(lambda items: Opaque("object", items)),
    "BUILD": lambda m, _: m.build(),
    "PERSID": lambda m, argument: m.stack.append(Opaque("tensor storage", [argument])),
    "BINPERSID": lambda m, _: m.make("tensor storage", 1),
}
