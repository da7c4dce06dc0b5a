"""Replicas: the module as it stands on each device, kept equal to the user's.

The user's own module object is the replica of the first device. A helper has a copy, made from
bytes in which parameters do not travel: they stand for themselves by number, and in the helper
become ``Parameter`` objects over the same memory of the arena::

    user's module ── pickle by value ──► bytes ──► the helper's module
      Parameter 7 ───────── "7" ─────────────────► Parameter 7'
            └──────────► arena memory ◄────────────────┘

How a copy follows what the user changes later is told in :mod:`evener.watch`.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from evener.arena import Place, Region, normal_mode
from evener.errors import ModuleError
from evener.pickling import STATE_NAME, dumps


def private_buffers(module: nn.Module) -> dict[tuple[int, str], Tensor]:
    """The buffers of which each replica has its own copy.

    Returns:
        Each buffer under the number of its submodule and its name there.
    """
    return {
        (number, name): buffer
        for number, submodule in enumerate(module.modules())
        for name, buffer in submodule._buffers.items()
        if buffer is not None and not buffer.requires_grad
    }


def shared_tensors(module: nn.Module) -> list[Tensor]:
    """The tensors of which all replicas use the same memory: those that a gradient can reach.

    Returns:
        Each parameter once, and each buffer that requires a gradient, in the module's order.
    """
    found: list[Tensor] = list(module.parameters())
    found.extend(buffer for buffer in module.buffers() if buffer.requires_grad)
    return found


# ------------------------------------------------------------------ to bytes and back


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, shared: Sequence[Tensor]) -> None:
        super().__init__(file)
        self._shared = shared

    def persistent_load(self, pid: Any) -> Tensor:
        number: int = pid
        return self._shared[number]


def to_bytes(obj: Any, shared: Sequence[Tensor], path: str = "") -> bytes:
    """Pickle an object, classes of the user's program by value, shared tensors as numbers.

    Args:
        obj: the module, or the value of one of its attributes.
        shared: the shared tensors, in order.
        path: what the object is called, for messages.

    Raises:
        ModuleError: if something in it cannot be sent to another process; names where it is.
    """
    numbers = {id(tensor): i for i, tensor in enumerate(shared)}
    try:
        return dumps(obj, numbers)
    except Exception as error:
        where, what = _culprit(obj, numbers, path)
        kind, reason = type(what).__name__, str(error)
        if kind not in reason:  # as a rule it is what the error speaks of
            reason = f"{kind}: {reason}"
        raise ModuleError(
            f"{where} cannot be sent to a helper: {reason}; make it when it "
            "is needed instead of keeping it as an attribute, or leave it out in __getstate__"
        ) from error


def from_bytes(data: bytes, shared: Sequence[Tensor]) -> Any:
    """The opposite of :func:`to_bytes`, with this process's shared tensors."""
    return _Unpickler(io.BytesIO(data), shared).load()


def complete_main(module: nn.Module) -> None:
    """Give this process's ``__main__`` the names that the functions of a replica's classes know.

    cloudpickle gives functions of the user's ``__main__`` the names they use, and leaves those out
    of the module itself; torch's compiler looks for them there.
    """
    main = vars(sys.modules["__main__"])
    for kind in {kind for each in module.modules() for kind in type(each).__mro__}:
        forward = vars(kind).get("forward")
        if kind.__module__ == "__main__" and isinstance(forward, FunctionType):
            for name, value in forward.__globals__.items():
                main.setdefault(name, value)


def _culprit(obj: Any, numbers: dict[int, int], path: str) -> tuple[str, Any]:
    """Find the nearest part that fails although none of its own parts does."""
    seen = {id(obj)}
    level = [(path, obj)]
    found = (path, obj)
    while level:
        below: list[tuple[str, Any]] = []
        for part_path, part in level:
            failing = [
                (name, inner) for name, inner in _parts(part, part_path) if _fails(inner, numbers)
            ]
            if not failing and part is not obj:
                return part_path.lstrip("."), part
            below += [(name, inner) for name, inner in failing if id(inner) not in seen]
            seen.update(id(inner) for _, inner in failing)
        level = below
        found = level[0] if level else found
    return found[0].lstrip(".") or type(obj).__name__, found[1]


def _parts(obj: Any, path: str) -> list[tuple[str, Any]]:
    if isinstance(obj, dict):
        return [(f"{path}[{key!r}]", value) for key, value in obj.items()]
    if isinstance(obj, (list, tuple, set)):
        return [(f"{path}[{i}]", value) for i, value in enumerate(obj)]
    attributes = getattr(obj, "__dict__", {})
    if not isinstance(obj, nn.Module):
        return [(f"{path}.{name}", value) for name, value in attributes.items()]
    parts = [
        (f"{path}.{name}", value)
        for name, value in attributes.items()
        if name not in ("_modules", STATE_NAME)
    ]
    return parts + [(f"{path}.{name}", child) for name, child in obj.named_children()]


def _fails(obj: Any, numbers: dict[int, int]) -> bool:
    try:
        dumps(obj, numbers)
    except Exception:  # noqa: BLE001 - whatever fails is what is looked for
        return True
    return False


# ------------------------------------------------------------------ into the arena and out


def adopt(tensors: Sequence[Tensor], places: Sequence[Place], region: Region) -> None:
    """Move tensors into the arena: the same objects, their values in its memory.

    Raises:
        ModuleError: if two of them use the same memory: they would come apart.
    """
    by_memory: dict[int, Tensor] = {}
    for tensor in tensors:
        first = by_memory.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        if first is not tensor and tensor.untyped_storage().nbytes():
            raise ModuleError(
                f"two parameters, of shapes {tuple(first.shape)} and {tuple(tensor.shape)}, use "
                "the same memory; tie them by giving both names to one nn.Parameter"
            )
    # The user may call under inference_mode; what is made here outlives that.
    with normal_mode(), torch.no_grad():
        for tensor, place in zip(tensors, places, strict=True):
            there = region.tensor(place)
            there.copy_(tensor.detach())
            tensor.data = there


def give_back(tensors: Sequence[Tensor]) -> None:
    """Move tensors, and their gradients, out of the arena into memory of their own."""
    with normal_mode(), torch.no_grad():
        for tensor in tensors:
            tensor.data = tensor.detach().clone()
            if tensor.grad is not None:
                tensor.grad = tensor.grad.clone()
