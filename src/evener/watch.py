"""Watch: what the user changed in a module between two calls, so that every replica follows.

Before each call the module is compared with what was sent. Attributes that changed (``training``
among them) and buffers are sent as an :class:`Update`; a change of structure, or a parameter that
moved to other memory, needs a new copy of the whole module. What a forward itself changes is not a
change by the user: the forward of each replica did the same to its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from evener.pickling import STATE_NAME
from evener.replica import from_bytes, private_buffers, to_bytes

#: The dictionaries in which nn.Module keeps the structure of a module.
_STRUCTURE = (
    "_parameters",
    "_modules",
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)
_values = dict.values

#: What nn.Module keeps for itself; all else in a module's dictionary are plain attributes.
_INTERNAL = frozenset(vars(nn.Module())) - {"training"} | {STATE_NAME}
#: Buffers up to this size are sent at each call in training: batch norm changes its running
#: statistics without counting the change, and to compare costs as much as to send.
_SMALL_BYTES = 1 << 16


@dataclass
class Update:
    """What changed in the user's module since it was last sent.

    Attributes:
        attributes: bytes of a dict from (number of the submodule, name) to the new value.
        removed: (number of the submodule, name) of attributes that are gone.
        requires_grad: for each shared tensor whether a gradient is wanted; None if as before.
        buffers: numbers of the private buffers whose values in the arena are new.
    """

    attributes: bytes | None = None
    removed: list[tuple[int, str]] = field(default_factory=list)
    requires_grad: list[bool] | None = None
    buffers: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.attributes or self.removed or self.buffers) or (
            self.requires_grad is not None
        )

    def apply(
        self, modules: Sequence[nn.Module], shared: Sequence[Tensor], buffers: Sequence[Tensor]
    ) -> None:
        """Make a replica follow.

        Args:
            modules: its submodules in order.
            shared: its shared tensors.
            buffers: the values of the private buffers, in the arena.
        """
        if self.attributes:
            for (number, name), value in from_bytes(self.attributes, shared).items():
                modules[number].__dict__[name] = value
        for number, name in self.removed:
            modules[number].__dict__.pop(name, None)
        if self.requires_grad is not None:
            for tensor, wanted in zip(shared, self.requires_grad, strict=True):
                tensor.requires_grad_(wanted)
        if self.buffers:
            keys = [
                (module, name)
                for module in modules
                for name, buffer in module._buffers.items()
                if buffer is not None and not buffer.requires_grad
            ]
            for number in self.buffers:
                module, name = keys[number]
                # A new tensor, not a copy into the old: an earlier call's graph may need that.
                module._buffers[name] = buffers[number].clone()


class Watch:
    """Notices what the user changed in a module between two calls.

    The usual answer, nothing, is found by comparing lists of the same objects, at the speed of C.
    Lists, dicts and sets are compared one level deep, tensors by their count of changes, small
    arrays by their values; a change further inside, or inside another kind of object, is not seen
    until the attribute itself is set anew.

    Args:
        module: the user's module.
        shared: its shared tensors.

    Attributes:
        buffers: its private buffers, as they are since :meth:`is_stale` was last asked.
    """

    def __init__(self, module: nn.Module, shared: Sequence[Tensor]) -> None:
        self._shared = shared
        self._dicts = [vars(m) for m in module.modules()]
        self._parts = [d[name] for d in self._dicts for name in _STRUCTURE]
        self._buffer_parts = [d["_buffers"] for d in self._dicts]
        # The objects are held, so that none of them can go and another take its identity.
        self._held = [value for part in self._parts for value in part.values()]
        self._structure = self._structure_now()
        self._pointers = [_memory(tensor) for tensor in shared]
        self._requires_grad = [tensor.requires_grad for tensor in shared]
        self.buffers = list(private_buffers(module).values())
        self._forms = self._forms_now()
        self._sent = [(b, b.data_ptr(), _version(b)) for b in self.buffers]
        self._was_training = False
        # The plain attributes, as they were: of each module, and all in a row.
        self._before: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._objects: list[Any] = []
        self._containers: list[tuple[int, str, Any, Any]] = []
        self.accept()

    def is_stale(self) -> bool:
        """Whether a new copy is needed: structure, a shared tensor's memory or a buffer's form."""
        self.buffers = [
            buffer
            for part in self._buffer_parts
            if part
            for buffer in part.values()
            if buffer is not None and not buffer.requires_grad
        ]
        return (
            self._structure_now() != self._structure
            or [_memory(tensor) for tensor in self._shared] != self._pointers
            or self._forms_now() != self._forms
        )

    def update(self) -> Update:
        """What changed since this or :meth:`accept` was last called; false where nothing did."""
        update = Update()
        changed = self._containers_changed()
        if not self._is_as_before():
            changed |= self._attributes_changed(update)
        if changed:
            update.attributes = to_bytes(changed, self._shared, "changed attributes")
        if changed or update.removed:
            self.accept()
        requires_grad = [tensor.requires_grad for tensor in self._shared]
        if requires_grad != self._requires_grad:
            update.requires_grad = self._requires_grad = requires_grad
        # Also at the first call after training: the last forward in training changed them still.
        training = any(d["training"] for d in self._dicts)
        small = training or self._was_training
        self._was_training = training
        now = [(b, b.data_ptr(), _version(b)) for b in self.buffers]
        update.buffers = [
            i
            for i, (state, sent) in enumerate(zip(now, self._sent, strict=True))
            if state[0] is not sent[0]
            or state[1:] != sent[1:]
            or (small and state[0].nbytes <= _SMALL_BYTES)
        ]
        self._sent = now
        return update

    def accept(self) -> None:
        """Take the attributes as they are: the module's own forward has just run."""
        if not self._is_as_before():
            self._before = [dict(d) for d in self._dicts]
            self._names = [*chain.from_iterable(self._dicts)]
            self._objects = [*chain.from_iterable(map(_values, self._dicts))]
            self._containers = [
                (number, name, value, None)
                for number, d in enumerate(self._dicts)
                for name, value in d.items()
                if name not in _INTERNAL and _is_mutable(value)
            ]
        self._containers = [
            (number, name, value, _content(value)) for number, name, value, _ in self._containers
        ]

    def _forms_now(self) -> list[tuple[int, str, torch.Size, torch.dtype, bool]]:
        return [
            (i, name, buffer.shape, buffer.dtype, buffer.requires_grad)
            for i, part in enumerate(self._buffer_parts)
            if part
            for name, buffer in part.items()
            if buffer is not None
        ]

    def _structure_now(self) -> list[Any]:
        # By identity: an equal parameter in another's place is another parameter. And by name and
        # by how many there are in each place.
        parts = list(filter(None, self._parts))
        return [
            *map(len, self._parts),
            *map(id, chain.from_iterable(map(_values, parts))),
            *chain.from_iterable(parts),
        ]

    def _is_as_before(self) -> bool:
        """Whether all attributes are the same objects under the same names.

        By identity: 1 and 1.0 are equal, and a user's own ``==`` may fail for what it is not
        made for.
        """
        return [*chain.from_iterable(self._dicts)] == self._names and all(
            map(is_, chain.from_iterable(map(_values, self._dicts)), self._objects)
        )

    def _containers_changed(self) -> dict[tuple[int, str], Any]:
        return {
            (number, name): value
            for number, name, value, before in self._containers
            if not _same(_content(value), before)
        }

    def _attributes_changed(self, update: Update) -> dict[tuple[int, str], Any]:
        changed: dict[tuple[int, str], Any] = {}
        for number, (d, before) in enumerate(zip(self._dicts, self._before, strict=True)):
            update.removed.extend((number, name) for name in before if name not in d)
            changed.update(
                ((number, name), value)
                for name, value in d.items()
                if name not in _INTERNAL and (name not in before or not _same(before[name], value))
            )
        return changed


def _version(tensor: Tensor) -> int:
    """Counts the changes of a tensor in place; an inference tensor does not count: never alike."""
    return -time.monotonic_ns() if tensor.is_inference() else tensor._version


def _is_mutable(value: Any) -> bool:
    """Whether a plain attribute can change without being set."""
    if isinstance(value, (list, dict, set, Tensor)):
        return True
    return _is_array(value) and value.nbytes <= _SMALL_BYTES


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"


def _content(value: Any) -> Any:
    """What a mutable attribute holds, for comparison with a later time."""
    if isinstance(value, Tensor):
        return value.data_ptr(), _version(value)
    return value.tobytes() if _is_array(value) else value.copy()


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal, in their types too; false where their ``==`` does not tell."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    try:
        if isinstance(one, dict):
            return list(one) == list(other) and _same(list(one.values()), list(other.values()))
        if isinstance(one, (list, tuple)):
            return len(one) == len(other) and all(map(_same, one, other))
        return bool(one == other)
    except Exception:  # noqa: BLE001 - whatever a user's == does
        return False
