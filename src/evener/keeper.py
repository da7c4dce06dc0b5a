"""The keeper: lets each cell of a batch begin with the module as it was before the call.

A forward may change buffers (running statistics) and set attributes. What one cell changed must
not reach the next: which cells a device computes one after the other depends on the devices. So
each cell gets copies of the buffers, and what it made of them is read and put away::

    before ──copy──► cell 0 ──► after ──► (after - before) x part of the batch ──┐
       │                                                                         ├─ tree ─► new
       └─────copy──► cell 1 ──► after ──► (after - before) x part of the batch ──┘

Buffers that are no floats, and attributes that were set, are afterwards those of the first cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from evener.arena import normal_mode
from evener.errors import ModuleError

#: For each private buffer what is to be added to it, or its new value if it is not of floats; None
#: if it has not changed.
Changes: TypeAlias = list[Tensor | None]


class Keeper:
    """Keeps a module as it is while cells are computed.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        named = list(module.named_modules())
        self._dicts = [(name, vars(each)) for name, each in named]
        self._before = [dict(d) for _, d in self._dicts]
        self._first: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._parts = [(name, each._buffers) for name, each in named if each._buffers]
        self._held = [dict(part) for _, part in self._parts]
        self._buffers = [
            (f"{path}.{name}".lstrip("."), part, name, buffer)
            for path, part in self._parts
            for name, buffer in part.items()
            if buffer is not None and not buffer.requires_grad
        ]
        #: By the buffer's id: one may have two names. The next cell gets what did not change.
        self._copies: dict[int, Tensor] = {}
        # What cannot be put back must not change.
        fixed: list[tuple[str, Tensor]] = list(module.named_parameters())
        fixed += [
            (name, buffer) for name, buffer in module.named_buffers() if buffer.requires_grad
        ]
        fixed += [(name, buffer) for name, _, _, buffer in self._buffers]
        fixed += [
            (f"{path}.{name}".lstrip("."), value)
            for (path, _), d in zip(self._dicts, self._before, strict=True)
            for name, value in d.items()
            if isinstance(value, Tensor)
        ]
        self._generators = [
            (f"{path}.{name}".lstrip("."), value, value.get_state())
            for (path, _), d in zip(self._dicts, self._before, strict=True)
            for name, value in d.items()
            if isinstance(value, torch.Generator)
        ]
        self._fixed = [
            (name, tensor, tensor._version) for name, tensor in fixed if not tensor.is_inference()
        ]

    def begin(self) -> None:
        """A cell begins: put copies of the buffers in their places."""
        with normal_mode(), torch.no_grad():
            for _, part, name, buffer in self._buffers:
                if id(buffer) not in self._copies:
                    self._copies[id(buffer)] = buffer.clone()
                part[name] = self._copies[id(buffer)]

    def end(self, weight: float, *, is_first: bool) -> Changes:
        """A cell is over.

        Args:
            weight: its part of the batch.
            is_first: whether it is the first of the whole batch.

        Returns:
            What it has changed.

        Raises:
            ModuleError: if it has changed what cannot be put back.
        """
        for name, tensor, version in self._fixed:
            if tensor._version != version:
                raise ModuleError(
                    f"forward changes {name} in place, which is not a buffer under its own name; "
                    "with grid= that cannot be the same on any devices; make it a buffer, or "
                    "leave grid= out"
                )
        for name, generator, state in self._generators:
            if not torch.equal(generator.get_state(), state):
                raise ModuleError(
                    f"forward draws from {name}, a generator of its own, which goes on from cell "
                    "to cell; with grid= that cannot be the same on any devices; draw without "
                    "generator= (each cell has its own seed), or leave grid= out"
                )
        for (path, part), held in zip(self._parts, self._held, strict=True):
            if [*part] != [*held] or any((part[n] is None) != (held[n] is None) for n in held):
                raise ModuleError(
                    f"forward adds or removes a buffer of {path or 'the module'}; with grid= each "
                    "cell begins with the buffers of before the call; call the module once before "
                    "evener.parallelize, or leave grid= out"
                )
        with normal_mode(), torch.no_grad():
            changes: Changes = []
            for name, part, key, buffer in self._buffers:
                after = part[key]
                _check_form(name, buffer, after)
                is_same = torch.equal(after, buffer)
                if not is_same or after is not self._copies.get(id(buffer)):
                    self._copies.pop(id(buffer), None)
                changes.append(None if is_same else _change(buffer, after, weight, is_first))
        for (_, d), before in zip(self._dicts, self._before, strict=True):
            if len(d) == len(before) and all(map(is_, d.values(), before.values())):
                continue
            if is_first:
                self._first.append((d, dict(d)))
            d.clear()
            d.update(before)
        return changes

    def restore(self) -> None:
        """Make the module what it was, but for the attributes that the first cell has set."""
        for (_, part), held in zip(self._parts, self._held, strict=True):
            part.clear()
            part.update(held)
        for (_, d), before in zip(self._dicts, self._before, strict=True):
            if len(d) != len(before) or not all(map(is_, d.values(), before.values())):
                d.clear()
                d.update(before)
        for d, first in self._first:
            d.clear()
            d.update(first)


def _check_form(name: str, before: Tensor, after: Tensor) -> None:
    if after.shape != before.shape or after.dtype != before.dtype:
        raise ModuleError(
            f"forward makes another {after.dtype} of {tuple(after.shape)} of the buffer {name}, "
            f"which was {before.dtype} of {tuple(before.shape)}; with grid= a buffer keeps its "
            "form; call the module once before evener.parallelize, or leave grid= out"
        )


def _change(before: Tensor, after: Tensor, weight: float, is_first: bool) -> Tensor | None:  # noqa: FBT001
    if not _adds(before):
        return after.detach().clone() if is_first else None
    # Where nothing has changed there may be infinities, as in a mask.
    return torch.where(after == before, 0, after.detach() - before).mul_(weight)


def add_changes(left: Changes, right: Changes) -> Changes:
    """The changes of two nodes of the tree together."""
    return [
        theirs if mine is None else mine if theirs is None else mine + theirs
        for mine, theirs in zip(left, right, strict=True)
    ]


def apply_changes(buffers: Sequence[Tensor], changes: Changes) -> None:
    """Change the buffers of a module.

    Args:
        buffers: its private buffers, in order.
        changes: the sum of those of all cells.
    """
    with torch.no_grad():
        new = [
            None if change is None else buffer + change if _adds(buffer) else change
            for buffer, change in zip(buffers, changes, strict=True)
        ]
        for buffer, value in zip(buffers, new, strict=True):
            if value is not None:
                buffer.copy_(value)


def _adds(buffer: Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


# ------------------------------------------------------------------ to another process


class Packed(NamedTuple):
    """Small tensors whose forms are known: which are there, and the values of these."""

    present: list[bool]
    values: bytearray


def pack(tensors: Changes) -> Packed:
    """Make tensors, some of which are None, fit for a message; see :func:`unpack`."""
    there = [tensor for tensor in tensors if tensor is not None]
    values = bytearray(sum(_stride(tensor) for tensor in there))
    offset = 0
    for tensor in there:
        if tensor.numel():
            flat = torch.frombuffer(
                values, dtype=tensor.dtype, count=tensor.numel(), offset=offset
            )
            flat.view(tensor.shape).copy_(tensor)
        offset += _stride(tensor)
    return Packed([tensor is not None for tensor in tensors], values)


def unpack(packed: Packed, like: Sequence[Tensor]) -> Changes:
    """The opposite of :func:`pack`.

    Args:
        packed: what it gave.
        like: tensors of the same forms.
    """
    found: Changes = []
    offset = 0
    for form, is_there in zip(like, packed.present, strict=True):
        if not is_there:
            found.append(None)
            continue
        if form.numel():
            flat = torch.frombuffer(
                packed.values, dtype=form.dtype, count=form.numel(), offset=offset
            )
            found.append(flat.view(form.shape))
        else:
            found.append(torch.empty(form.shape, dtype=form.dtype))
        offset += _stride(form)
    return found


def _stride(tensor: Tensor) -> int:
    """What a tensor takes among others, so that each begins where its type may begin."""
    return -(-tensor.nbytes // 16) * 16
