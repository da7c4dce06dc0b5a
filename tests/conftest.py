"""What every test is held to: it leaves nothing behind.

A test that leaves a process, a thread, a file descriptor, the mapping of an arena, an environment
variable, a setting of torch or a file in the working directory fails, and is told what it left.
What ends by itself has a little time to do so. (After the fixtures of Lightning Fabric's tests.)
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Container, Generator, Iterator, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis
import psutil
import pytest
import torch

import evener

pytest_plugins = ["pytester"]

#: How long what a test started may take to end, after the garbage was collected.
GRACE_S = 2.0
#: Processes inherit it; so one whose parent has ended is still known as ours.
MARK = "EVENER_TEST_SESSION"

# The same examples in each run, however slow the machine: a test that fails once fails always.
hypothesis.settings.register_profile("evener", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("evener")


def pytest_report_header() -> str:
    try:
        devices = "; ".join(map(str, evener.devices("all")))
    except Exception as error:  # noqa: BLE001 - the tests will say more
        devices = f"devices that cannot be told: {error!r}"
    return f"torch {torch.__version__} on {devices}"


def pytest_collection_finish() -> None:
    # What was imported stays: to look through it after each test would take longer than the tests.
    gc.collect()
    gc.freeze()


# ------------------------------------------------------------------ what may be left behind

_mark = str(os.getpid())


def pytest_configure() -> None:
    os.environ[MARK] = _mark
    # A shell without job control gives its background programs a SIGINT that is ignored, and so
    # do these to the programs they start; here some are interrupted.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure() -> None:
    os.environ.pop(MARK, None)


def _processes(old: Container[int]) -> dict[int, str]:
    """Our children and theirs, also those whose parents have ended."""
    main = psutil.Process()
    found = {}
    for pid in psutil.pids():
        if pid in old:
            continue
        with contextlib.suppress(psutil.Error, OSError):  # another user's, or it has just ended
            process = psutil.Process(pid)
            if main in process.parents() or process.environ().get(MARK) == _mark:
                status = process.status()
                is_zombie = status == psutil.STATUS_ZOMBIE  # of which only the name is left
                command = process.name() if is_zombie else " ".join(process.cmdline())
                # The standard library's own is started once and ends with the interpreter.
                if "multiprocessing.resource_tracker" not in command:
                    found[pid] = f"process {pid} ({status}): {command}"
    return found


def _threads(old: Container[threading.Thread]) -> dict[threading.Thread, str]:
    # A dummy stands for a thread that a C++ library started, and stays when that ends.
    return {
        thread: f"thread {thread.name!r}{' (daemon)' if thread.daemon else ''}"
        for thread in threading.enumerate()
        if thread not in old and not isinstance(thread, threading._DummyThread)
    }


#: Opened once by Python, torch or a driver and never closed; files of code while they are loaded.
_STAYS_OPEN = re.compile(r"/dev/u?random|/dev/nvidia.*|/dev/dri/.*|.*\.(so[.\d]*|py|pyc)|/proc/.*")


def _descriptors(old: Container[tuple[str, int]]) -> dict[tuple[str, int], str]:
    """Counted by what they lead to: the same number may lead elsewhere later."""
    tracker_fd = getattr(resource_tracker._resource_tracker, "_fd", None)
    counts: Counter[str] = Counter()
    for link in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):  # that of the list itself
            target = str(link.readlink())
            if not _STAYS_OPEN.fullmatch(target) and int(link.name) != tracker_fd:
                counts[target] += 1
    return {
        (target, i): f"file descriptor of {target}"
        for target, count in counts.items()
        for i in range(count)
        if (target, i) not in old
    }


def _mappings(old: Container[str]) -> dict[str, str]:
    with Path("/proc/self/maps").open() as lines:
        inodes = {line.split()[4] for line in lines if "/memfd:evener" in line}
    return {inode: f"mapping of an arena (inode {inode})" for inode in inodes if inode not in old}


def _files(folder: Path, old: Container[str]) -> dict[str, str]:
    # What begins with a dot are caches of tools, and what an editor leaves.
    return {
        path.name: f"file {path.name!r} in the working directory"
        for path in folder.iterdir()
        if path.name not in old and not path.name.startswith(".") and path.name != "__pycache__"
    }


#: What each of these says before a test it says afterwards; if not, it is set back.
_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "working directory": (Path.cwd, os.chdir),
    "torch thread count": (torch.get_num_threads, torch.set_num_threads),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "deterministic algorithms": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
}


#: Set for each test by pytest; set once by torch when it loads its compiler.
_SET_BY_OTHERS = re.compile(r"PYTEST_CURRENT_TEST|TORCHINDUCTOR_\w+|TRITON_\w+")


def _environment() -> dict[str, str]:
    return {n: value for n, value in os.environ.items() if not _SET_BY_OTHERS.fullmatch(n)}


class Scene:
    """How things are before a test."""

    def __init__(self) -> None:
        self._pids = frozenset(psutil.pids())
        self._threads = _threads(())
        self._descriptors = _descriptors(())
        self._mappings = _mappings(())
        self._settings = {name: get() for name, (get, _) in _SETTINGS.items()}
        self._folder = Path.cwd()
        self._files = _files(self._folder, ())
        self._environment = _environment()

    def left(self) -> list[str]:
        """What is there that was not, and may still end by itself."""
        return [
            *_processes(self._pids).values(),
            *_threads(self._threads).values(),
            *_descriptors(self._descriptors).values(),
            *_mappings(self._mappings).values(),
        ]

    def left_after_a_while(self) -> list[str]:
        left = self.left()
        if left:
            gc.collect()
            end = time.monotonic() + GRACE_S
            while (left := self.left()) and time.monotonic() < end:
                time.sleep(0.02)
        return left

    def changed(self) -> list[str]:
        """What was changed."""
        settings = [
            f"{name}: {get()}, was {self._settings[name]}"
            for name, (get, _) in _SETTINGS.items()
            if get() != self._settings[name]
        ]
        old, new = self._environment, _environment()
        environment = [
            f"environment: {name}={new.get(name)!r}, was {old.get(name)!r}"
            for name in sorted(old.keys() | new.keys())
            if old.get(name) != new.get(name)
        ]
        return [*settings, *environment, *_files(self._folder, self._files).values()]

    def restore(self) -> None:
        """End what was started, and set back what was changed, for the sake of the next test."""
        for pid in _processes(self._pids):
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                process.kill()
                process.wait(GRACE_S)
        for name, (_, put) in _SETTINGS.items():
            put(self._settings[name])
        for name in _environment().keys() - self._environment.keys():
            del os.environ[name]
        os.environ.update(self._environment)


# ------------------------------------------------------------------ the fixtures

_has_failed = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    if call.excinfo is not None:  # also where that is expected
        item.stash[_has_failed] = True
    return (yield)


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    scene = Scene()

    yield

    if request.node.stash.get(_has_failed, False):
        scene.restore()  # no second complaint: its traceback still holds what it had in hand
        return
    request.node.funcargs.clear()  # so does pytest, what the other fixtures gave
    left = [*scene.left_after_a_while(), *scene.changed()]
    if left:
        scene.restore()
        pytest.fail("left behind: " + "; ".join(left), pytrace=False)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    random.seed(0)


# ------------------------------------------------------------------ another interpreter


@pytest.fixture
def run_python() -> Callable[..., str]:
    """Runs a program in a fresh interpreter that finds evener; gives what it printed."""
    source = str(Path(evener.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source}

    def run(program: str, *arguments: object, pass_fds: Sequence[int] = ()) -> str:
        result = subprocess.run(
            [sys.executable, "-c", program, *map(str, arguments)],
            env=environment,
            pass_fds=pass_fds,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run


@pytest.fixture
def made_module(tmp_path: Path) -> Iterator[Callable[[str], ModuleType]]:
    """Makes a module of the user's that no other interpreter can import: loaded from its path."""
    name = "a_file_of_the_users"

    def make(source: str) -> ModuleType:
        path = tmp_path / "own.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    yield make
    sys.modules.pop(name, None)
