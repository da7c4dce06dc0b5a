"""The injector: makes a helper fail at a certain place in its work, exactly once.

It is an attribute of the module under test, so a replica brings it into each helper, where it puts
its points around the helper's work. A file tells what is to happen; who does it takes the file
away first, so that what is done again does not fail again::

    main process    fail_at("cpu:1", "backward", "SIGKILL")  ──► file "armed"
    helper cpu:1    ... backward: is it for me?  rename "armed" to "fired", then die
    its successor   ... backward: no file, go on
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from evener.channel import Channel
from evener.helper import HELPER_VARIABLE, Helper
from evener.messages import Backward, Forward, Reply

#: Tells a helper that has no replica yet where the file is (see ``SITE``).
FOLDER_VARIABLE = "EVENER_TEST_FAULTS"

#: A sitecustomize for helpers that are to fail before they can say that they are there.
SITE = f"""
import json, os, sys
folder = os.environ.get({FOLDER_VARIABLE!r})
if folder and "evener.process" in " ".join(sys.orig_argv):
    from pathlib import Path
    label = json.loads(sys.orig_argv[sys.orig_argv.index("-c") + 3])[-1]
    armed = Path(folder) / "armed"
    try:
        fault = json.loads(armed.read_text())
    except FileNotFoundError:
        fault = {{}}
    if fault.get("phase") == "start" and fault["device"] == label:
        armed.rename(Path(folder) / "fired")
        import signal
        if fault["kind"] == "exit":
            os._exit(3)
        os.kill(os.getpid(), getattr(signal, fault["kind"]))
"""


def _segfault() -> None:
    ctypes.string_at(0)


def _deadlock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def _out_of_memory() -> NoReturn:
    raise MemoryError("on purpose")


def _allocator() -> NoReturn:
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 byte")


#: What can be done to a helper, by name.
KINDS: dict[str, Callable[[], Any]] = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "SIGSEGV": _segfault,
    "exit": lambda: os._exit(3),
    "SIGSTOP": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "deadlock": _deadlock,
    "MemoryError": _out_of_memory,
    "allocator": _allocator,
}
#: Those that only the timeout ends.
HANGS = ("SIGSTOP", "deadlock")
#: Those that leave the helper as it is.
MEMORY = ("MemoryError", "allocator")
#: What the warning says of each.
CAUSES = {
    "SIGKILL": "was ended by SIGKILL",
    "SIGTERM": "was ended by SIGTERM",
    "SIGSEGV": "was ended by SIGSEGV",
    "exit": "ended with exit code 3",
    "SIGSTOP": "did not answer within",
    "deadlock": "did not answer within",
    "MemoryError": "had no memory",
    "allocator": "had no memory",
}

#: Where in a helper's work: the messages that it is done for, and before or after these.
PHASES = {
    "start": "before it is there",
    "load": "while it loads the replica",
    "idle": "after a reply",
    "forward before": "_forward",
    "forward": "in the user's forward",
    "forward after": "_forward",
    "output before": "_write",
    "output after": "_write",
    "backward before": "_backward",
    "backward": "in the user's backward",
    "backward after": "_backward",
    "exchange before": "_reduce",
    "exchange after": "_reduce",
}


class Injector:
    """Lets helpers fail.

    Args:
        folder: an empty one, for its files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if is_helper():
            _install(self)
            self.point("load")

    def fail_at(self, device: str, step: int, phase: str, kind: str, times: int = 1) -> None:
        """Let a helper fail.

        Args:
            device: its label.
            step: after so many forwards of it from now on.
            phase: where, one of ``PHASES``.
            kind: how, one of ``KINDS``.
            times: how many helpers of the device, one after the other.
        """
        assert phase in PHASES
        assert kind in KINDS
        fault = {"device": device, "step": step, "phase": phase, "kind": kind, "times": times}
        self.disarm()
        draft = Path(self._folder) / "draft"
        draft.write_text(json.dumps(fault))
        draft.rename(Path(self._folder) / "armed")

    @property
    def has_fired(self) -> bool:
        """Whether what was last asked for has happened."""
        return (Path(self._folder) / "fired").exists()

    def disarm(self) -> None:
        """Nothing fails any more."""
        for name in ("armed", "fired"):
            (Path(self._folder) / name).unlink(missing_ok=True)

    def point(self, phase: str) -> None:
        """Fail, if that is wanted here and now."""
        armed = Path(self._folder) / "armed"
        try:
            text = armed.read_text()
        except FileNotFoundError:
            return
        fault = json.loads(text)
        label = _label() if is_helper() else "cpu:0"
        if (fault["device"], fault["phase"]) != (label, phase):
            return
        if _forwards.get(text, 0) <= fault["step"] and phase not in ("load", "start"):
            return
        fault["times"] -= 1
        if fault["times"]:
            armed.write_text(json.dumps(fault | {"step": 0}))
        else:
            with suppress(FileNotFoundError):
                armed.rename(Path(self._folder) / "fired")
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.stdout.flush()
        KINDS[fault["kind"]]()

    def count(self) -> None:
        """Count a forward towards the step."""
        with suppress(FileNotFoundError):
            text = (Path(self._folder) / "armed").read_text()
            _forwards[text] = _forwards.get(text, 0) + 1


#: Forwards that this helper has begun since each fault was asked for.
_forwards: dict[str, int] = {}
_injector: list[Injector] = []
_answered: list[type] = []


def is_helper() -> bool:
    """Whether this process is a helper."""
    return os.environ.get(HELPER_VARIABLE) == str(os.getpid())


def _label() -> str:
    label: str = json.loads(sys.argv[2])[-1]
    return label


def _install(injector: Injector) -> None:
    """Put the points around a helper's work; once in a process."""
    is_first = not _injector
    _injector[:] = [injector]
    if not is_first:
        return
    for method, name in {
        "_forward": "forward",
        "_write": "output",
        "_backward": "backward",
        "_reduce": "exchange",
    }.items():
        _surround(method, name)
    send = Channel.send

    def send_and_idle(self: Channel, message: Any, timeout_s: float) -> None:
        send(self, message, timeout_s)
        if isinstance(message, Reply) and _answered:
            _answered.clear()
            _injector[0].point("idle")

    Channel.send = send_and_idle  # type: ignore[method-assign]


def _surround(method: str, name: str) -> None:
    original = getattr(Helper, method)

    @wraps(original)
    def surrounded(self: Helper, message: Any) -> Any:
        injector = _injector[0]
        if isinstance(message, Forward):
            injector.count()
        injector.point(f"{name} before")
        answer = original(self, message)
        injector.point(f"{name} after")
        if isinstance(message, (Forward, Backward)):
            _answered.append(type(message))
        return answer

    setattr(Helper, method, surrounded)


# ------------------------------------------------------------------ a module to try it on


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, injector: Injector) -> Tensor:
        ctx.injector = injector
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.injector.point("backward")
        return gradients[0], None


class Net(nn.Module):
    """A module with what recovery has to care for.

    Args:
        injector: lets it fail.
        is_random: whether with dropout and batch norm, whose numbers depend on the shares.
        width: makes the gradients large enough for the exchange among helpers.
    """

    def __init__(self, injector: Injector, *, is_random: bool = True, width: int = 96) -> None:
        super().__init__()
        self.injector = injector
        self.first = nn.Linear(8, width)
        self.norm = nn.BatchNorm1d(width) if is_random else nn.Identity()
        self.dropout = nn.Dropout(0.3 if is_random else 0.0)
        self.hidden = nn.Linear(width, 768)
        self.last = nn.Linear(768, 3)
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))
        self.size = 0

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.num_calls += 1
        self.size = len(x)
        y = self.dropout(self.norm(self.first(x)).relu())
        self.injector.point("forward")
        y = _InBackward.apply(y, self.injector)  # type: ignore[no-untyped-call]
        large = self.hidden(y).tanh()
        return {"large": large, "last": self.last(large), "mean": large.square().mean()}
