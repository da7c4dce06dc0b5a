"""Hostile surroundings: each works, or gives an error that says what it is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import zipapp
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import evener
from bounds import LONG
from evener.errors import HelperStartError, ModuleError

OutputOf = Callable[..., str]

SOURCE = str(Path(evener.__file__).parents[1])

#: Prints "right", or what kind of error there was; the module works either way afterwards.
STEPS = """
plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).double()
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).double()
model.load_state_dict(plain.state_dict())
evener.parallelize(model, "cpu*2", shares="even")
x = torch.randn(8, 4, dtype=torch.float64)
def step():
    for each in (model, plain):
        each.zero_grad()
        each(x).sin().sum().backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad)
def steps():
    try:
        step()
        step()
        print("right")
    except evener.EvenerError as error:
        print(type(error).__name__, error)
        evener.release(model)
        step()
"""

PROGRAM = (
    """
import sys
sys.path.insert(0, SOURCE)
import gc, os, resource, time
import torch, evener
from torch import nn
""".replace("SOURCE", repr(SOURCE))
    + STEPS
)


def run(command: list[Any], **options: Any) -> str:
    """What a program prints that ends well, whatever the surroundings."""
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, **options
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(PROGRAM + "steps()\n")
    return path


# ------------------------------------------------------------------ the interpreter


@pytest.mark.parametrize(
    "flag",
    ["-I", *(pytest.param(flag, marks=LONG) for flag in ("-O", "-OO", "-S -I", "-E", "-s"))],
)
def test_flags_of_the_interpreter(script: Path, flag: str) -> None:
    flags = flag.split()
    if "-S" in flags:
        paths = repr([each for each in sys.path if each])
        script.write_text(f"import sys\nsys.path[:] = {paths}\n" + script.read_text())

    assert run([sys.executable, *flags, script]) == "right\n"


@LONG
def test_a_safe_path(script: Path) -> None:
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}

    assert run([sys.executable, script], env=environment) == "right\n"


def test_a_zipped_program(tmp_path: Path) -> None:
    folder = tmp_path / "app"
    folder.mkdir()
    (folder / "own.py").write_text("from torch import nn\nclass Net(nn.Linear):\n    pass\n")
    (folder / "__main__.py").write_text(
        PROGRAM + "import own\nmodel[0].inner = own.Net(1, 1)\nplain[0].inner = own.Net(1, 1)\n"
        "for each in (model, plain): each[0].inner.requires_grad_(False)\n"
        "model.zero_grad()\nmodel(x)\nprint('right')\n"
    )
    zipapp.create_archive(folder, tmp_path / "app.pyz")

    assert run([sys.executable, tmp_path / "app.pyz"], cwd=tmp_path) == "right\n"


def test_a_frozen_program_is_told_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    model = evener.parallelize(nn.Linear(2, 2), "cpu*2", shares="even")

    with pytest.raises(HelperStartError, match="a frozen program has none"):
        model(torch.ones(4, 2))

    evener.release(model)


# ------------------------------------------------------------------ the system


def test_few_file_descriptors(output_of: OutputOf) -> None:
    limited = "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\nsteps()\n"

    assert output_of(PROGRAM + limited) == "right\n"


def test_no_file_descriptor_left_is_an_error_and_leaves_none(output_of: OutputOf) -> None:
    """Whichever of them is the last one that there is."""
    program = (
        PROGRAM
        + """
step()  # some libraries open something once
evener.release(model)
gc.collect()
before = len(os.listdir("/proc/self/fd"))
kinds = set()
for room in range(14):
    evener.parallelize(model, "cpu*2", shares="even")
    resource.setrlimit(resource.RLIMIT_NOFILE, (before - 1 + room, 4096))
    try:
        model(x)
        kinds.add("right")
        break
    except evener.EvenerError as error:
        kinds.add(type(error).__name__)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
    evener.release(model)
    gc.collect()  # an error's traceback holds what it had in hand
    found = os.listdir("/proc/self/fd")
    assert len(found) == before, (room, kinds, found)
print(*sorted(kinds))
"""
    )

    assert output_of(program).split() == ["ArenaError", "HelperStartError", "right"]


@pytest.mark.parametrize("room_mb", [1, *(pytest.param(room, marks=LONG) for room in (100, 1000))])
def test_a_limit_on_memory(output_of: OutputOf, room_mb: int) -> None:
    limited = f"""
size = int(open("/proc/self/statm").read().split()[0]) * 4096 + ({room_mb} << 20)
resource.setrlimit(resource.RLIMIT_AS, (size, size))
steps()
"""
    word, *_ = output_of(PROGRAM + limited).split()

    assert word in ("right", "ArenaError", "HelperStartError")


def in_own_mounts(commands: str, script: Path) -> list[Any]:
    """A command that runs the script where some file systems are other than usual."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, "-m", "true"], check=False).returncode:
        pytest.skip("file systems cannot be changed here")
    return [unshare, "-m", "sh", "-ec", f'{commands}\nexec "$0" "$@"', sys.executable, script]


def test_a_full_dev_shm(script: Path) -> None:
    commands = (
        "mount -t tmpfs -o size=64k tmpfs /dev/shm\n"
        "dd if=/dev/zero of=/dev/shm/full bs=64k count=1 2>/dev/null"
    )

    assert run(in_own_mounts(commands, script)) == "right\n"


def test_no_dev_shm(script: Path) -> None:
    commands = (
        "mount -t tmpfs tmpfs /dev\nmknod /dev/null c 1 3\nmknod /dev/urandom c 1 9\n"
        "test ! -e /dev/shm"
    )

    assert run(in_own_mounts(commands, script)) == "right\n"


def test_a_working_directory_that_cannot_be_written_to(script: Path) -> None:
    assert run([sys.executable, script], cwd="/proc") == "right\n"


@pytest.mark.parametrize("when", [pytest.param("before", marks=LONG), "between"])
def test_a_deleted_working_directory(output_of: OutputOf, tmp_path: Path, when: str) -> None:
    (tmp_path / "gone").mkdir()
    before = "" if when == "before" else "step()\n"
    program = PROGRAM + f"{before}os.chdir(sys.argv[1])\nos.rmdir(sys.argv[1])\nsteps()\n"

    assert output_of(program, tmp_path / "gone") == "right\n"


def with_other_start(tmp_path: Path, source: str) -> dict[str, str]:
    """An environment in which each interpreter, also a helper's, first runs some lines."""
    (tmp_path / "sitecustomize.py").write_text(source)
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def test_cores_cannot_be_pinned(script: Path, tmp_path: Path) -> None:
    environment = with_other_start(
        tmp_path,
        """
import os
def refuse(*_):
    raise PermissionError(1, "not for you")
os.sched_setaffinity = refuse
""",
    )

    assert run([sys.executable, script], env=environment) == "right\n"


def test_cores_are_taken_away_while_running(output_of: OutputOf) -> None:
    program = (
        PROGRAM
        + """
import psutil
step()
core = min(os.sched_getaffinity(0))
for each in (psutil.Process(), *psutil.Process().children()):
    for thread in each.threads():
        os.sched_setaffinity(thread.id, {core})
step()
(helper,) = psutil.Process().children()
helper.kill()  # and the next one starts with these cores
steps()
"""
    )

    assert output_of(program) == "right\n"


def test_a_clock_that_jumps(script: Path, tmp_path: Path) -> None:
    environment = with_other_start(
        tmp_path,
        """
import random, time
time.time = lambda: random.uniform(-1e9, 1e10)
time.time_ns = lambda: random.randrange(-10**18, 10**19)
""",
    )

    assert run([sys.executable, script], env=environment) == "right\n"


def test_only_clocks_that_do_not_jump_are_read() -> None:
    jumping = re.compile(r"\btime\.time(_ns)?\(|datetime\.now\(")
    found = [
        path.name
        for path in Path(SOURCE, "evener").glob("*.py")
        if jumping.search(path.read_text())
    ]

    assert found == []


# ------------------------------------------------------------------ modules


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.extra: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        return y


@pytest.mark.parametrize("kind", ["lock", "file", "generator", "frame", "nested"])
def test_what_cannot_be_sent_is_named(kind: str, tmp_path: Path) -> None:
    with (tmp_path / "open").open("w") as file:
        things: dict[str, Any] = {
            "lock": threading.Lock(),
            "file": file,
            "generator": (i for i in range(3)),
            "frame": sys._getframe(),
            "nested": {"a": [1, threading.Lock()]},
        }
        model = nn.Sequential(nn.Linear(2, 2), Part())
        model[1].extra = things[kind]
        evener.parallelize(model, "cpu*2", shares="even")
        path = "1.extra['a'][1]" if kind == "nested" else "1.extra"

        with pytest.raises(ModuleError, match=r"cannot be sent to a helper") as caught:
            model(torch.ones(4, 2))

        said = str(caught.value)
        assert said.startswith(path + " cannot"), said
        assert "leave it out in __getstate__" in said
        kind_of_it = "lock" if kind == "nested" else type(things[kind]).__name__
        assert kind_of_it in said
        assert f"{kind_of_it}: cannot pickle" not in said  # it would be said twice
        evener.release(model)
        assert model(torch.ones(4, 2)).shape == (4, 2)
