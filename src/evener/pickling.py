"""Pickling: what the user's program made, as bytes that another interpreter understands.

cloudpickle sends by value what is defined in ``__main__``, such as the classes of a script or of a
notebook. This adds what else a fresh interpreter could not import: a file that was loaded from its
path (as pytest does with tests), a module that a program made; and parametrized modules, whose
classes torch makes as it goes.
"""

from __future__ import annotations

import io
import os
import pkgutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

#: Where a parallel module keeps what makes it parallel; never sent to a helper.
STATE_NAME = "_evener"
#: Where it keeps how its forward is compiled on each device (see ``compiling``); sent to helpers.
COMPILE_NAME = "_evener_compile"


def dumps(obj: Any, shared: Mapping[int, int] | None = None) -> bytes:
    """Pickle an object by value.

    Args:
        obj: any object.
        shared: for the ``id`` of a tensor the number that is sent instead of it. Default: none.

    Returns:
        Bytes for ``pickle.loads``, or for an unpickler that knows the numbers.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, shared or {})
    try:
        pickler.dump(obj)
    finally:
        for module in pickler.by_value:
            cloudpickle.unregister_pickle_by_value(module)
    return file.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's, with shared tensors as numbers and more kinds of objects by value."""

    def __init__(self, file: io.BytesIO, shared: Mapping[int, int]) -> None:
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
        if isinstance(obj, ModuleType) and type(obj) is not ModuleType:
            # torch.ops, torch.backends.cudnn: an object stands in the module's place.
            name = _name_of(obj)
            if name is not None:
                return pkgutil.resolve_name, (name,)
        if isinstance(obj, CodeType):
            # cloudpickle 3.1.3 forgets the file; a helper's traceback is to show the user's line.
            return _code_of_file, (obj.co_filename, *self.dispatch_table[CodeType](obj))
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


def _code_of_file(path: str, kind: type[CodeType], args: tuple[Any, ...]) -> CodeType:
    return kind(*args).replace(co_filename=path)


def _name_of(obj: ModuleType) -> str | None:
    """A name by which another interpreter finds what stands in a module's place."""
    names = [name for name, module in list(sys.modules.items()) if module is obj]
    for name in [*names, getattr(obj, "__name__", "")]:
        with suppress(Exception):  # whatever an import does
            if name != "__main__" and pkgutil.resolve_name(name) is obj:
                return name
    return None


def _is_importable(module: ModuleType) -> bool:
    """Whether another interpreter with our search path finds this very module by its name."""
    # One may stand in sys.modules under a second name too, as collections.abc does.
    name: str = getattr(getattr(module, "__spec__", None), "name", module.__name__)
    if getattr(module, "__file__", None) is None:  # made by a library in C, or by a program
        name = name.partition(".")[0]
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
    if origin is None or spec.origin is None or not spec.has_location:  # frozen into Python
        return True
    return bool(os.path.realpath(spec.origin) == os.path.realpath(origin))
