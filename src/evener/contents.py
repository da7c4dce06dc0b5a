"""Contents: what a module's plain attributes hold, as deep as it goes.

An attribute may be a list, a dict, an object with fields, and so on inside of each other; a user
who changes ``model.config.rates["bias"]`` sets no attribute of the module. Here everything that
can be changed inside the attributes is gathered once, and compared at the speed of C::

    dicts, fields of objects    by their versions (see versions.py)
    lists, sets                 all their items in a row, by identity
    tensors                     by memory and torch's count of changes in place
    small arrays of NumPy       by their bytes
"""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from itertools import chain
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from evener.versions import Versions

#: Arrays, and buffers, up to this size are compared, or sent, without knowing of a change.
SMALL_BYTES = 1 << 16
#: So many parts of one attribute are looked at; what is beyond is followed when it is set anew.
MAX_PARTS = 1000

_CLOSED = (str, bytes, int, float, complex, bool, type(None), type, nn.Module, ModuleType)
_CLOSED += (FunctionType, BuiltinFunctionType, MethodType)  # type: ignore[assignment]


class Contents:
    """Tells in which attributes something was changed inside.

    Args:
        attributes: each attribute's value under whatever the caller calls it.
    """

    def __init__(self, attributes: Mapping[Any, Any]) -> None:
        self._dicts: list[tuple[Hashable, dict[Any, Any], dict[Any, Any]]] = []
        self._rows: list[tuple[Hashable, list[Any] | set[Any], Any]] = []
        self._tensors: list[tuple[Hashable, Tensor, Any]] = []
        self._arrays: list[tuple[Hashable, Any, bytes]] = []
        for key, value in attributes.items():
            self._gather(key, value)
        self._versions = Versions([d for _, d, _ in self._dicts])
        self._take_rows()

    def changed(self) -> set[Hashable]:
        """The attributes inside of which something was changed since this was last asked."""
        found: set[Hashable] = set()
        for number in self._versions.changed():
            key, now, before = self._dicts[number]
            if not same(now, before):
                found.add(key)
                self._dicts[number] = (key, now, dict(now))
        rows = [row for _, row, _ in self._rows]
        if list(map(len, rows)) != self._lengths or not all(
            map(is_, chain.from_iterable(rows), self._items)
        ):
            found.update(key for key, now, before in self._rows if not same(now, before))
            self._rows = [(key, row, row.copy()) for key, row, _ in self._rows]
            self._take_rows()
        for i, (key, tensor, before) in enumerate(self._tensors):
            if (current := mark(tensor)) != before:
                found.add(key)
                self._tensors[i] = (key, tensor, current)
        for i, (key, array, data) in enumerate(self._arrays):
            if array.tobytes() != data:
                found.add(key)
                self._arrays[i] = (key, array, array.tobytes())
        return found

    def _take_rows(self) -> None:
        rows = [row for _, row, _ in self._rows]
        self._lengths = list(map(len, rows))
        self._items = [*chain.from_iterable(rows)]

    def _gather(self, key: Hashable, value: Any) -> None:
        seen: set[int] = set()
        rest: list[Any] = [value]
        while rest and len(seen) < MAX_PARTS:
            part = rest.pop()
            if isinstance(part, _CLOSED) or id(part) in seen or _compiles(part):
                continue
            seen.add(id(part))
            if isinstance(part, Tensor):
                self._tensors.append((key, part, mark(part)))
            elif _is_array(part):
                if part.nbytes <= SMALL_BYTES:
                    self._arrays.append((key, part, part.tobytes()))
            else:
                rest.extend(self._open(key, part))

    def _open(self, key: Hashable, part: Any) -> Iterator[Any]:
        """Watch what can be changed in one part, and give what is inside of it."""
        fields = getattr(part, "__dict__", None)
        dicts = [d for d in (part, fields) if isinstance(d, dict)]
        self._dicts.extend((key, d, dict(d)) for d in dicts)
        if isinstance(part, (list, set)):
            self._rows.append((key, part, part.copy()))
        inside: Iterable[Any] = part if isinstance(part, (list, set, tuple, frozenset)) else ()
        return chain(inside, *(d.values() for d in dicts))


def hidden_gradients(
    attributes: Mapping[Any, Any], known: Collection[int]
) -> Iterator[tuple[Any, str]]:
    """Find what wants a gradient and is neither a parameter nor a buffer of the module.

    Args:
        attributes: each attribute's value under whatever the caller calls it.
        known: the identities of the module's tensors and submodules.

    Yields:
        The attribute, and what it holds.
    """
    for key, value in attributes.items():
        rest, seen = [value], 0
        while rest and (seen := seen + 1) < MAX_PARTS:
            part = rest.pop()
            if id(part) in known:
                continue
            if isinstance(part, Tensor):
                if part.requires_grad and part.is_leaf:
                    yield key, "a tensor that wants a gradient"
            elif isinstance(part, nn.Module):
                if any(id(parameter) not in known for parameter in part.parameters()):
                    yield key, f"a {type(part).__name__}"
            elif isinstance(part, dict):
                rest.extend(part.values())
            elif isinstance(part, (list, tuple)):
                rest.extend(part)


def can_change(value: Any) -> bool:
    """Whether an attribute can be changed without being set."""
    return not isinstance(value, _CLOSED)


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, in their types too; false where their ``==`` does not tell."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    try:
        if isinstance(one, dict):
            return list(one) == list(other) and same(list(one.values()), list(other.values()))
        if isinstance(one, (list, tuple)):
            return len(one) == len(other) and all(map(same, one, other))
        return bool(one == other)
    except Exception:  # noqa: BLE001 - whatever a user's == does
        return False


def mark(tensor: Tensor) -> tuple[int, int]:
    """What is another one after each change of a tensor's values: its memory, and a count."""
    return tensor.data_ptr(), count_of_changes(tensor)


def count_of_changes(tensor: Tensor) -> int:
    """Counts the changes of a tensor in place; an inference tensor does not count: never alike."""
    return -time.monotonic_ns() if tensor.is_inference() else tensor._version


def _compiles(part: Any) -> bool:
    """Whether it belongs to torch's compiler, which changes it as it compiles."""
    return type(part).__module__.startswith("torch._dynamo")


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"
