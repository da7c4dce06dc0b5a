"""Nobody else gets in: helpers speak over inherited descriptors alone."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

import evener

#: What torch and drivers open for themselves.
OTHERS = ("/dev/urandom", "/dev/random", "/dev/nvidia", "/dev/dri", "/proc/", "/sys/")


def links(pid: int) -> dict[int, str]:
    """The open descriptors of a process."""
    found = {}
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found[int(link.name)] = str(link.readlink())
        except FileNotFoundError:  # that of the list itself
            continue
    return {fd: target for fd, target in found.items() if not target.startswith(OTHERS)}


def kind(target: str) -> str:
    return (
        target.split(":", maxsplit=1)[0]
        if not target.startswith("/")
        else target.split(" ", maxsplit=1)[0]
    )


@pytest.fixture
def helper() -> Iterator[psutil.Process]:
    """The helper of a module that has done a step."""
    model = evener.parallelize(nn.Linear(2, 2), "cpu*2", shares="even")
    model(torch.ones(4, 2)).sum().backward()
    (process,) = psutil.Process().children()
    yield process
    evener.release(model)


def test_a_helper_has_open_what_it_needs_and_nothing_else(helper: psutil.Process) -> None:
    found = links(helper.pid)
    own = {fd: target for fd, target in found.items() if fd > 2}

    assert found[0] == "/dev/null"
    assert Counter(map(kind, own.values())) == {
        "socket": 1,  # the channel
        "/memfd:evener": 2,  # the arena, and its mapping's own
        "pipe": 1,  # the lifeline
        "anon_inode": 1,  # the process descriptor of the main process
    }, found


def test_a_helper_has_none_of_the_users_files(tmp_path: Path) -> None:
    secret = (tmp_path / "secret").open("w")
    os.set_inheritable(secret.fileno(), True)
    model = evener.parallelize(nn.Linear(2, 2), "cpu*2", shares="even")
    model(torch.ones(4, 2))
    (process,) = psutil.Process().children()

    assert str(tmp_path / "secret") not in links(process.pid).values()

    evener.release(model)
    secret.close()


def test_there_is_no_port_and_no_named_socket(helper: psutil.Process) -> None:
    for process in (helper, psutil.Process()):
        assert process.net_connections("inet") == []

    inodes = {
        target.partition("[")[2].rstrip("]")
        for target in links(helper.pid).values()
        if target.startswith("socket:")
    }
    lines = [line.split() for line in Path(f"/proc/{helper.pid}/net/unix").read_text().split("\n")]
    ours = [line for line in lines if len(line) > 6 and line[6] in inodes]

    assert len(inodes) == len(ours) == 1
    assert len(ours[0]) == 7  # what has a name has it in the eighth column
    assert ours[0][3] == "00000000"  # it does not listen
    assert ours[0][5] == "03"  # it is connected: one of a pair


def arenas_of(pid: int) -> list[Path]:
    found = [fd for fd, target in links(pid).items() if target.startswith("/memfd:evener")]
    return [Path(f"/proc/{pid}/fd/{fd}") for fd in found]


def test_the_arena_has_no_name_and_is_its_owners_alone(helper: psutil.Process) -> None:
    for path in arenas_of(helper.pid):
        seen = path.stat()
        assert str(path.readlink()).endswith("(deleted)")
        assert seen.st_nlink == 0
        assert seen.st_uid == os.getuid()
        assert stat.S_IMODE(seen.st_mode) == 0o600

    folder = Path("/dev/shm")  # noqa: S108 - where it must not be
    assert not folder.exists() or not any("evener" in each.name for each in folder.iterdir())


def opened() -> set[str]:
    """What this process has open, each by its name and its number."""
    found = set()
    for fd, target in links(os.getpid()).items():
        with contextlib.suppress(OSError):  # that of the list itself
            found.add(f"{target} {os.fstat(fd).st_ino}")
    return found


def test_programs_that_the_user_starts_inherit_nothing_of_ours() -> None:
    before = opened()
    model = evener.parallelize(nn.Linear(2, 2), "cpu*2", shares="even")
    model(torch.ones(4, 2))
    listing = (
        "import os\n"
        "for n in os.listdir('/proc/self/fd'):\n"
        "    try: print(os.readlink('/proc/self/fd/' + n), os.fstat(int(n)).st_ino)\n"
        "    except OSError: pass\n"
    )
    ours = opened() - before

    # Also not where a program hands on to its children all that can be inherited.
    command = [sys.executable, "-c", listing]
    result = subprocess.run(
        command, close_fds=False, stdout=subprocess.PIPE, stderr=None, text=True, check=True
    )

    assert any(target.startswith("/memfd:evener") for target in ours)
    assert ours.isdisjoint(result.stdout.split("\n"))

    evener.release(model)


def test_two_teams_do_not_hold_each_others_channels() -> None:
    models = [evener.parallelize(nn.Linear(2, 2), "cpu*2", shares="even") for _ in range(2)]
    for model in models:
        model(torch.ones(4, 2))
    first, second = (links(each.pid) for each in psutil.Process().children())

    def own(found: dict[int, str]) -> set[str]:
        return {target for fd, target in found.items() if fd > 2 and target.startswith("socket:")}

    assert own(first).isdisjoint(own(second))

    for model in models:
        evener.release(model)


def test_no_socket_is_ever_bound_or_listened_on(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    me = threading.get_ident()
    is_on = [True]

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if is_on[0] and threading.get_ident() == me and event.startswith("socket."):
            family = arguments[1] if event == "socket.__new__" else None
            if event in ("socket.bind", "socket.connect") or family == socket.AF_INET:
                events.append(event)

    sys.addaudithook(hook)  # for good, so it can be turned off
    model = evener.parallelize(nn.Linear(2, 2), "cpu*2", shares="even")
    model(torch.ones(4, 2)).sum().backward()
    evener.release(model)
    is_on[0] = False

    assert events == []
