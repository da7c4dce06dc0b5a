"""The process of a helper: it serves, and ends with the channel or with the main process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from evener import messages
from evener.arena import Arena
from evener.channel import Channel

TIMEOUT_S = 100.0


class Served:
    """A helper that was started by hand."""

    def __init__(self, main_pid: int) -> None:
        self.arena = Arena()
        ours, theirs = socket.socketpair()
        fds = theirs.fileno(), self.arena.fd
        arguments = [*fds, main_pid, [0], "cpu:1"]
        program = (
            "import json, sys; from evener.process import main;"
            "main(*json.loads(sys.argv[1]), spin_s=0.0)"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, json.dumps(arguments)], pass_fds=fds
        )
        theirs.close()
        self.channel = Channel(ours, -1, 0.0)

    def ask(self, message: Any) -> Any:
        self.channel.send(messages.Request(message, []), TIMEOUT_S)
        return self.channel.receive(TIMEOUT_S).message

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.channel.close()
        self.arena.close()


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served(os.getpid())
    try:
        assert isinstance(served.channel.receive(TIMEOUT_S).message, messages.Done)  # it is there
        yield served
    finally:
        served.end()


def test_it_serves_until_the_channel_closes(served: Served) -> None:
    assert isinstance(served.ask(messages.Done()), messages.Failure)
    assert isinstance(served.ask(messages.Done()), messages.Failure)

    served.channel.close()

    assert served.process.wait(TIMEOUT_S) == 0


def test_ctrl_c_is_for_the_main_process_and_it_computes_on_its_own_core(served: Served) -> None:
    served.process.send_signal(signal.SIGINT)

    assert isinstance(served.ask(messages.Done()), messages.Failure)
    assert psutil.Process(served.process.pid).cpu_affinity() == [0]


def test_one_whose_main_process_has_ended_already_does_not_begin() -> None:
    served = Served(psutil.Process().parent().pid)  # type: ignore[union-attr]
    try:
        assert served.process.wait(TIMEOUT_S) == 0
    finally:
        served.end()
