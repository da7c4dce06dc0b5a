"""A program: a user's script under ``evener run``, with evener's DataParallel in torch's place.

``evener run train.py --lr 0.1`` does what ``python train.py --lr 0.1`` does, on evener's devices.
The program is the module ``__main__`` from its first line to its last exit handler, for pickles
and processes look it up there; and it ends as it would: its exit code, its traceback, its signal.

While it runs, and no longer, the names in ``torch.nn`` and ``torch.nn.parallel`` mean evener's.
Nothing else is changed: ``torch.cuda`` tells the truth.
"""

from __future__ import annotations

import builtins
import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from evener.devices import DevicesSpec, devices
from evener.errors import ProgramError
from evener.shares import weights_of
from evener.standin import StandIn


class Program:
    """A program, to be called once.

    Args:
        words: the path of a script or the name of a module, and the program's arguments.
        spec: the devices that DataParallel has, and whose numbers it is given.
        shares: ``"auto"`` or ``"even"``, as in :func:`evener.parallelize`.
        is_module: whether it is the name of a module, as for ``python -m``.

    Raises:
        ProgramError: if there is no such script.
        SharesError: if ``shares`` is another word.
        DeviceError: if a device is not there.
    """

    def __init__(
        self, words: Sequence[str], spec: DevicesSpec, shares: str = "auto", *, is_module: bool
    ) -> None:
        self._name, self._arguments = words[0], list(words[1:])
        self._is_module = is_module
        places = devices(spec)
        weights_of(shares, len(places))  # known before the program begins
        self._stand_in = StandIn(places, shares)
        if not is_module and not Path(self._name).is_file():
            raise ProgramError(
                f"there is no file {self._name!r}; expected the path of a Python script, or with "
                "-m the name of a module"
            )

    def __call__(self) -> int:
        """Run it.

        Returns:
            The exit code.

        Raises:
            ProgramError: if there is no such module.
            SystemExit: what the program raised.
            KeyboardInterrupt: what the program raised; its traceback has been printed.
        """
        main = ModuleType("__main__")
        vars(main).update(__builtins__=builtins, __file__=None, __cached__=None)
        # It stays there: exit handlers and threads of the program come later.
        sys.modules["__main__"] = main
        has_failed = True
        try:
            with self._stand_in.in_torchs_place():
                try:
                    code = self._module_code(main) if self._is_module else self._script_code(main)
                    exec(code, vars(main))  # noqa: S102 - it is what we are for
                    has_failed = False
                except SystemExit:
                    has_failed = False
                    raise
                finally:
                    self._stand_in.tell(None if has_failed else main)
        except (SystemExit, ProgramError):
            raise
        except BaseException as error:
            trace = _of_the_program(error.__traceback__)
            sys.excepthook(type(error), error.with_traceback(trace), trace)
            if isinstance(error, KeyboardInterrupt):
                # Python then ends by the signal, as it does for any program; it has been told.
                sys.excepthook = lambda *_: None
                raise
            return 1
        return 0

    def _script_code(self, main: ModuleType) -> CodeType:
        file = Path(self._name).absolute()
        self._set_up(self._name, str((file.resolve() if file.is_symlink() else file).parent))
        path = str(file)
        vars(main).update(__file__=path, __loader__=SourceFileLoader("__main__", path))
        with io.open_code(path) as source:
            return compile(source.read(), path, "exec", dont_inherit=True)

    def _module_code(self, main: ModuleType) -> CodeType:
        self._set_up("-m", os.getcwd())
        spec = _spec_of(self._name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = _spec_of(f"{self._name}.__main__")
        get_code = getattr(spec and spec.loader, "get_code", None)
        code: CodeType | None = get_code(spec.name) if spec and get_code else None
        if spec is None or code is None:
            raise ProgramError(
                f"there is no module {self._name!r} to run; expected one that is installed or "
                f"found from {os.getcwd()}, or a package with a __main__.py"
            )
        vars(main).update(
            __file__=spec.origin,
            __cached__=spec.cached,
            __loader__=spec.loader,
            __package__=spec.parent,
            __spec__=spec,
        )
        sys.argv[0] = str(spec.origin)
        return code

    def _set_up(self, name: str, folder: str) -> None:
        sys.argv[:] = [name, *self._arguments]
        if not getattr(sys.flags, "safe_path", False):
            sys.path[0] = folder


def _spec_of(name: str) -> Any:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return None
        raise
    except ValueError:  # of a name such as "" or "__main__"
        return None


def _of_the_program(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames that lead to the program."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace
