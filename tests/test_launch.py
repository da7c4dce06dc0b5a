"""Launch: what the process of a helper inherits, and why there may be none."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from evener.arena import Arena
from evener.devices import Device
from evener.errors import HelperStartError
from evener.launch import launch

DEVICE = Device("cpu", 1, (0,), 1, "test")


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena()
    yield arena
    arena.close()


def test_it_inherits_three_descriptors_and_the_streams(arena: Arena, tmp_path: Path) -> None:
    with (tmp_path / "secret").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        process, channel, pidfd, lifeline = launch(DEVICE, arena.fd, 0.0)
        channel.receive(100.0)  # it is there

        opened = {file.path for file in psutil.Process(process.pid).open_files()}
        assert str(tmp_path / "secret") not in opened
        assert psutil.Process(process.pid).net_connections(kind="inet") == []
        assert psutil.Process(process.pid).cpu_affinity() == [0]
        channel.close()
        assert process.wait(100.0) == 0
        lifeline.close()
    assert pidfd >= 0


@pytest.mark.parametrize(
    ("executable", "frozen", "says"),
    [
        ("", False, r"sys\.executable is empty"),
        ("/no/such/python", False, "could not be started: .*No such file"),
        ("/bin/true", True, "a frozen program has none"),
    ],
)
def test_without_an_interpreter_there_is_an_error_and_nothing_is_left(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, executable: str, says: str, *, frozen: bool
) -> None:
    monkeypatch.setattr("sys.executable", executable)
    monkeypatch.setattr("sys.frozen", frozen, raising=False)

    with pytest.raises(HelperStartError, match=says):
        launch(DEVICE, arena.fd, 0.0)


def test_without_descriptors_there_is_an_error_and_nothing_is_left(arena: Arena) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = max(int(name) for name in os.listdir("/proc/self/fd")) + 2  # noqa: PTH208
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open, before[1]))
    try:
        with pytest.raises(HelperStartError, match="Too many open files"):
            launch(DEVICE, arena.fd, 0.0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
