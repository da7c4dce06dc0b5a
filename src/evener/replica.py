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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import cloudpickle
from torch import Tensor, nn

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

    def persistent_id(self, obj: Any) -> int | None:
        return self._shared.get(id(obj)) if isinstance(obj, Tensor) else None


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
        with _unimportable_by_value(obj):
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
    _Pickler(file, numbers).dump(obj)
    return file.getvalue()


def _culprit(obj: Any, numbers: dict[int, int], path: str) -> tuple[str, Any]:
    """Go down to the attribute that fails by itself."""
    if isinstance(obj, nn.Module):
        parts = [(f"{path}.{name}", child) for name, child in obj.named_children()]
        parts += [
            (f"{path}.{name}", value)
            for name, value in vars(obj).items()
            if name not in ("_modules", STATE_NAME)
        ]
    elif isinstance(obj, dict):
        parts = [(f"{path}[{key!r}]", value) for key, value in obj.items()]
    elif isinstance(obj, (list, tuple)):
        parts = [(f"{path}[{i}]", value) for i, value in enumerate(obj)]
    else:
        parts = [(f"{path}.{name}", value) for name, value in getattr(obj, "__dict__", {}).items()]
    for part_path, part in parts:
        try:
            _dumps(part, numbers)
        except Exception:  # noqa: BLE001 - whatever fails is what is looked for
            return _culprit(part, numbers, part_path)
    return path.lstrip(".") or type(obj).__name__, obj


@contextmanager
def _unimportable_by_value(obj: Any) -> Iterator[None]:
    """Send classes by value whose module another interpreter would not find.

    cloudpickle does so for ``__main__`` alone. A test file that pytest loaded from its path, or a
    module that a program made, can be imported nowhere else either.
    """
    modules = obj.modules() if isinstance(obj, nn.Module) else ()
    names = {cls.__module__ for m in modules for cls in type(m).__mro__}
    registered: list[ModuleType] = []
    for name in names:
        module = sys.modules.get(name)
        if module is None or name == "__main__" or _importable(name):
            continue
        if name not in cloudpickle.list_registry_pickle_by_value():
            cloudpickle.register_pickle_by_value(module)
            registered.append(module)
    try:
        yield
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)


def _importable(name: str) -> bool:
    top = name.partition(".")[0]
    if top in sys.builtin_module_names or top in sys.stdlib_module_names or top == "torch":
        return True
    # A submodule is looked for where its package is; a package that is loaded tells where.
    parent, _, _ = name.rpartition(".")
    path = getattr(sys.modules.get(parent), "__path__", None) if parent else None
    if parent and (path is None or not _importable(parent)):
        return False
    try:
        return any(
            finder.find_spec(name, path) is not None
            for finder in sys.meta_path
            if hasattr(finder, "find_spec")
        )
    except (ImportError, ValueError):
        return False


# ------------------------------------------------------------------ into the arena and out


def adopt(tensors: Sequence[Tensor], places: Sequence[Place], region: Region) -> None:
    """Move tensors into the arena: the same objects, their values in its memory."""
    for tensor, place in zip(tensors, places, strict=True):
        there = region.tensor(place)
        there.copy_(tensor.detach())
        tensor.data = there


def give_back(tensors: Sequence[Tensor]) -> None:
    """Move tensors, and their gradients, out of the arena into memory of their own."""
    for tensor in tensors:
        tensor.data = tensor.detach().clone()
        if tensor.grad is not None:
            tensor.grad = tensor.grad.clone()
