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
import os
import pickle
import sys
from collections.abc import Sequence
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from evener.arena import Place, Region
from evener.errors import ModuleError

#: Where a parallel module keeps what makes it parallel; never sent to a helper.
STATE_NAME = "_evener"


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


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles a module with its shared tensors as numbers."""

    def __init__(self, file: io.BytesIO, shared: dict[int, int]) -> None:
        super().__init__(file, protocol=5)
        self._shared = shared
        self.by_value: list[ModuleType] = []

    def persistent_id(self, obj: Any) -> int | None:
        return self._shared.get(id(obj)) if isinstance(obj, Tensor) else None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, nn.Module) and is_parametrized(obj):
            # Its class forbids pickles, for a file would outlive the class; ours lives as long.
            state = vars(obj).get(STATE_NAME)
            attributes = {name: v for name, v in vars(obj).items() if name != STATE_NAME}
            kind = type(obj) if state is None else state.plain
            return object.__new__, (kind,), attributes
        if isinstance(obj, (type, FunctionType)):
            self._send_by_value_unless_importable(obj)
        return super().reducer_override(obj)

    def _send_by_value_unless_importable(self, obj: Any) -> None:
        """Send by value what is in a module that another interpreter would not find.

        cloudpickle does so for ``__main__`` alone. A test file that pytest loaded from its path,
        or a module that a program made, can be imported nowhere else either.
        """
        module = sys.modules.get(getattr(obj, "__module__", None) or "")
        known = {"__main__", *cloudpickle.list_registry_pickle_by_value()}
        if module is not None and module.__name__ not in known and not _is_importable(module):
            cloudpickle.register_pickle_by_value(module)
            self.by_value.append(module)


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
        return _dumps(obj, numbers)
    except Exception as error:
        where, what = _culprit(obj, numbers, path)
        raise ModuleError(
            f"{where} cannot be sent to a helper: {type(what).__name__}: {error}; make it when it "
            "is needed instead of keeping it as an attribute, or leave it out in __getstate__"
        ) from error


def from_bytes(data: bytes, shared: Sequence[Tensor]) -> Any:
    """The opposite of :func:`to_bytes`, with this process's shared tensors."""
    return _Unpickler(io.BytesIO(data), shared).load()


def _dumps(obj: Any, numbers: dict[int, int]) -> bytes:
    file = io.BytesIO()
    pickler = _Pickler(file, numbers)
    try:
        pickler.dump(obj)
    finally:
        for module in pickler.by_value:
            cloudpickle.unregister_pickle_by_value(module)
    return file.getvalue()


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
        _dumps(obj, numbers)
    except Exception:  # noqa: BLE001 - whatever fails is what is looked for
        return True
    return False


def _is_importable(module: ModuleType) -> bool:
    """Whether another interpreter with our search path finds this very module by its name."""
    name = module.__name__
    if name.partition(".")[0] in ("torch", "evener") or name in sys.builtin_module_names:
        return True
    # A submodule is looked for where its package is; a package that is loaded tells where.
    parent = sys.modules.get(name.rpartition(".")[0])
    if "." in name and (parent is None or not _is_importable(parent)):
        return False
    path = getattr(parent, "__path__", None) if "." in name else None
    try:
        specs = [finder.find_spec(name, path) for finder in sys.meta_path]
    except Exception:  # noqa: BLE001 - finders of other libraries do as they like
        return False
    spec = next((spec for spec in specs if spec is not None), None)
    if spec is None:
        return False
    origin = getattr(module, "__file__", None)
    return (
        origin is None
        or spec.origin is None
        or os.path.realpath(spec.origin) == (os.path.realpath(origin))
    )


# ------------------------------------------------------------------ into the arena and out


def adopt(tensors: Sequence[Tensor], places: Sequence[Place], region: Region) -> None:
    """Move tensors into the arena: the same objects, their values in its memory."""
    # The user may call under inference_mode; what is made here outlives that.
    with torch.inference_mode(mode=False), torch.no_grad():
        for tensor, place in zip(tensors, places, strict=True):
            there = region.tensor(place)
            there.copy_(tensor.detach())
            tensor.data = there


def give_back(tensors: Sequence[Tensor]) -> None:
    """Move tensors, and their gradients, out of the arena into memory of their own."""
    with torch.inference_mode(mode=False), torch.no_grad():
        for tensor in tensors:
            tensor.data = tensor.detach().clone()
            if tensor.grad is not None:
                tensor.grad = tensor.grad.clone()
