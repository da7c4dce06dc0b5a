"""Channels: between two ends here, and between two processes."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from evener.channel import Channel, ChannelClosedError
from evener.channel import __file__ as channel_file

SPINS = [0.0, 0.002]
#: Long enough for any machine; no test waits for it.
LONG_S = 60.0


class Ends:
    """Two connected channels, and what is needed to speak past them."""

    def __init__(self, spin_s: float = 0.0) -> None:
        self.sockets = socket.socketpair()
        self.one, self.other = (Channel(sock, -1, spin_s) for sock in self.sockets)

    def close(self) -> None:
        self.one.close()
        self.other.close()


@pytest.fixture(params=SPINS)
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    made = Ends(request.param)
    yield made
    made.close()


def encoded(message: Any) -> bytes:
    data = pickle.dumps(message, protocol=5)
    return struct.pack("<Q", len(data)) + data


@contextlib.contextmanager
def meanwhile(function: Callable[[], Any]) -> Iterator[None]:
    """Run something in another thread for the time of a block."""
    thread = threading.Thread(target=function)
    thread.start()
    try:
        yield
    finally:
        thread.join()


# ------------------------------------------------------------------ two ends


@pytest.mark.parametrize(
    "message", [None, 0, "text", b"", [1, {"a": (2.5, None)}], b"x" * 100_000, ChannelClosedError]
)
def test_what_is_sent_arrives(ends: Ends, message: Any) -> None:
    ends.one.send(message, LONG_S)

    assert ends.other.receive(LONG_S) == message


def test_messages_arrive_in_order_and_whole(ends: Ends) -> None:
    messages = [[number] * number for number in range(100)]

    with meanwhile(lambda: [ends.one.send(message, LONG_S) for message in messages]):
        assert [ends.other.receive(LONG_S) for _ in messages] == messages


def test_both_directions_are_independent(ends: Ends) -> None:
    ends.one.send("to the other", LONG_S)
    ends.other.send("to the one", LONG_S)

    assert ends.one.receive(LONG_S) == "to the one"
    assert ends.other.receive(LONG_S) == "to the other"


def test_a_message_far_larger_than_the_sockets_buffer(ends: Ends) -> None:
    message = os.urandom(10_000_000)

    with meanwhile(lambda: ends.one.send(message, LONG_S)):
        received = ends.other.receive(LONG_S)

    assert received == message
    assert not ends.one.broken


def test_an_answer_may_come_at_once_after_a_large_message(ends: Ends) -> None:
    def answer() -> None:
        for _ in range(3):
            ends.other.send(len(ends.other.receive(LONG_S)), LONG_S)

    with meanwhile(answer):
        for size in (3_000_000, 1, 5_000_000):
            ends.one.send(b"x" * size, LONG_S)

            assert ends.one.receive(LONG_S) == size


def test_a_message_may_come_in_crumbs(ends: Ends) -> None:
    data = encoded("first") + encoded(["second"])

    def crumble() -> None:
        for i in range(len(data)):
            ends.sockets[0].sendall(data[i : i + 1])

    with meanwhile(crumble):
        assert ends.other.receive(LONG_S) == "first"
        assert ends.other.receive(LONG_S) == ["second"]


@pytest.mark.parametrize("timeout_s", [0.0, 0.02])
def test_no_message_in_time_is_a_timeout_and_nothing_is_lost(ends: Ends, timeout_s: float) -> None:
    data = encoded({"a": 1})
    ends.sockets[0].sendall(data[:11])

    for _ in range(3):
        with pytest.raises(TimeoutError):
            ends.other.receive(timeout_s)
    ends.sockets[0].sendall(data[11:])

    assert ends.other.receive(timeout_s) == {"a": 1}


def test_an_end_that_has_sent_can_still_time_out(ends: Ends) -> None:
    ends.one.send(1, LONG_S)

    with pytest.raises(TimeoutError):
        ends.one.receive(0.01)


def test_an_interrupted_receive_keeps_what_has_come(ends: Ends) -> None:
    """As Ctrl-C does: a signal whose handler raises."""
    data = encoded("interrupted")
    ends.sockets[0].sendall(data[:9])

    def handler(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            ends.other.receive(LONG_S)
        timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    ends.sockets[0].sendall(data[9:])

    assert ends.other.receive(LONG_S) == "interrupted"


def test_the_other_end_closed(ends: Ends) -> None:
    ends.other.close()

    with pytest.raises(ChannelClosedError):
        ends.one.receive(LONG_S)
    with pytest.raises(ChannelClosedError):
        ends.one.send("anybody?", LONG_S)


def test_what_was_sent_before_the_end_closed_is_still_received(ends: Ends) -> None:
    ends.other.send("last words", LONG_S)
    ends.other.send(b"x" * 50_000, LONG_S)
    ends.other.close()

    assert ends.one.receive(LONG_S) == "last words"
    assert ends.one.receive(LONG_S) == b"x" * 50_000
    with pytest.raises(ChannelClosedError):
        ends.one.receive(LONG_S)


def test_half_a_message_before_the_end_closed_is_no_message(ends: Ends) -> None:
    ends.sockets[1].sendall(encoded("half")[:-1])
    ends.other.close()

    with pytest.raises(ChannelClosedError):
        ends.one.receive(LONG_S)


def test_an_end_that_closed_with_unread_messages_has_closed(ends: Ends) -> None:
    """The system resets such a connection instead of ending it."""
    ends.one.send("never read", LONG_S)
    ends.other.close()

    with pytest.raises(ChannelClosedError):
        ends.one.receive(LONG_S)


def test_a_receive_that_waits_notices_that_the_other_end_closes(ends: Ends) -> None:
    with (
        meanwhile(lambda: (time.sleep(0.02), ends.other._socket.shutdown(socket.SHUT_RDWR))),
        pytest.raises(ChannelClosedError),
    ):
        ends.one.receive(LONG_S)


def test_who_does_not_take_a_message_in_time_breaks_the_channel(ends: Ends) -> None:
    assert not ends.one.broken

    with pytest.raises(TimeoutError):
        ends.one.send(b"x" * 10_000_000, 0.05)

    assert ends.one.broken


def test_an_interrupted_send_breaks_the_channel(ends: Ends) -> None:
    def handler(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            ends.one.send(b"x" * 10_000_000, LONG_S)
        timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert ends.one.broken


def test_what_cannot_be_pickled_is_not_sent_and_breaks_nothing(ends: Ends) -> None:
    with pytest.raises(Exception, match="pickle"):
        ends.one.send(threading.Lock(), LONG_S)
    ends.one.send("after", LONG_S)

    assert not ends.one.broken
    assert ends.other.receive(LONG_S) == "after"


class Unloadable:
    """One that can be sent and not be put together."""

    def __reduce__(self) -> Any:
        return (int, ("no number",))


def test_a_message_that_cannot_be_put_together_is_gone_and_the_next_one_comes(ends: Ends) -> None:
    ends.one.send(Unloadable(), LONG_S)
    ends.one.send("next", LONG_S)

    with pytest.raises(ValueError, match="no number"):
        ends.other.receive(LONG_S)
    assert ends.other.receive(LONG_S) == "next"


def test_closing_twice_closes_once() -> None:
    ends = Ends()
    read, write = os.pipe()
    channel = Channel(ends.sockets[0], read, 0.0)
    channel.close()
    with open(os.devnull) as other:  # may get the same number  # noqa: PTH123
        channel.close()

        assert other.read() == ""
    os.close(write)
    ends.close()


# ------------------------------------------------------------------ two processes

#: Answers each message with itself, or does what it says. Needs no torch, so it starts at once.
OTHER = """
import importlib.util, os, socket, subprocess, sys

spec = importlib.util.spec_from_file_location("channel", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
fd = int(sys.argv[2])
channel = module.Channel(socket.socket(fileno=fd), -1, 0.0)
try:
    while True:
        message = channel.receive(1e9)
        if message == "die":
            os._exit(3)
        if message == "leave a child":
            message = subprocess.Popen(
                ["sleep", "1000"], pass_fds=[fd], stdout=subprocess.DEVNULL
            ).pid
        channel.send((os.getpid(), message), 60)
except module.ChannelClosedError:
    print("closed")
"""


@pytest.fixture(params=SPINS)
def other(request: pytest.FixtureRequest) -> Iterator[tuple[Channel, subprocess.Popen[str]]]:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", OTHER, channel_file, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdout=subprocess.PIPE,
            text=True,
        )
    channel = Channel(ours, os.pidfd_open(process.pid), request.param)
    yield channel, process
    channel.close()
    process.communicate(timeout=LONG_S)


def test_another_process_answers(other: tuple[Channel, subprocess.Popen[str]]) -> None:
    channel, process = other

    for message in ("hello", b"x" * 1_000_000, None):
        channel.send(message, LONG_S)
        assert channel.receive(LONG_S) == (process.pid, message)
    channel.close()
    assert process.communicate(timeout=LONG_S)[0] == "closed\n"


def test_the_other_process_dies(other: tuple[Channel, subprocess.Popen[str]]) -> None:
    channel, process = other
    channel.send("die", LONG_S)

    with pytest.raises(ChannelClosedError):
        channel.receive(LONG_S)
    assert process.wait(LONG_S) == 3


def test_the_other_process_is_killed_while_it_waits(
    other: tuple[Channel, subprocess.Popen[str]],
) -> None:
    channel, process = other
    channel.send("hello", LONG_S)
    channel.receive(LONG_S)
    process.kill()

    with pytest.raises(ChannelClosedError):
        channel.receive(LONG_S)
    with pytest.raises(ChannelClosedError):
        channel.send("anybody?", LONG_S)


def test_a_death_is_noticed_although_a_child_of_it_still_holds_the_socket(
    other: tuple[Channel, subprocess.Popen[str]],
) -> None:
    """A worker that the user's module has started may live on for a while."""
    channel, _ = other
    channel.send("leave a child", LONG_S)
    _, child = channel.receive(LONG_S)
    channel.send("die", 3.0)

    try:
        with pytest.raises(ChannelClosedError):
            channel.receive(LONG_S)
    finally:
        os.kill(child, signal.SIGKILL)
