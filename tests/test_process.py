"""The process of a helper: it serves, and ends with the channel or with the main process."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from evener import messages
from evener.arena import Arena
from evener.devices import Device
from evener.launch import launch
from evener.pickling import dumps

TIMEOUT_S = 100.0


class Served:
    """A helper, as it is started, without the member that looks after it."""

    def __init__(self) -> None:
        self.arena = Arena()
        device = Device("cpu", 1, (0,), 1, "test")
        started = launch(device, self.arena.fd, 0.0)
        self.process, self.channel, self.pidfd, self.lifeline = started

    def ask(self, message: Any) -> Any:
        self.channel.send(messages.Request(message, []), TIMEOUT_S)
        return self.channel.receive(TIMEOUT_S).message

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.channel.close()
        self.lifeline.close()
        self.arena.close()


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    try:
        assert isinstance(served.channel.receive(TIMEOUT_S).message, messages.Done)  # it is there
        yield served
    finally:
        served.end()


class NumThreads:
    """Is the number of torch's threads where it is unpickled."""

    def __reduce__(self) -> Any:
        return _fail_with_threads, ()


def _fail_with_threads() -> None:
    raise ValueError(f"{torch.get_num_threads()} threads")


def test_it_serves_until_the_channel_closes(served: Served) -> None:
    assert isinstance(served.ask(messages.Done()), messages.Failure)
    served.process.send_signal(signal.SIGINT)  # Ctrl-C is for the main process
    data, path = dumps(NumThreads()), list(sys.path)
    load = messages.Load(data, [], messages.Span(0, 0), [], [], [], path, None)
    assert served.ask(load).summary == "ValueError: 1 threads"

    served.channel.close()

    assert served.process.wait(TIMEOUT_S) == 0


@pytest.mark.parametrize("stopped", [True, False])
def test_it_ends_with_the_main_process_whatever_it_does(served: Served, *, stopped: bool) -> None:
    if stopped:
        os.kill(served.process.pid, signal.SIGSTOP)

    served.lifeline.close()  # as the system does

    assert served.process.wait(TIMEOUT_S) in (-signal.SIGKILL, 0)


class Fork:
    """Forks where it is unpickled; both processes then raise."""

    def __reduce__(self) -> Any:
        return _fork_and_fail, ()


def _fork_and_fail() -> None:
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
    raise ValueError("the helper" if pid else "the process that it has forked")


def test_a_process_that_the_module_forks_does_not_answer(served: Served) -> None:
    """It went on as the helper, and its answer was taken for that of the next request."""
    load = messages.Load(dumps(Fork()), [], messages.Span(0, 0), [], [], [], list(sys.path), None)

    assert served.ask(load).summary == "ValueError: the helper"
    assert served.ask(load).summary == "ValueError: the helper"
