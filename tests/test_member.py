"""A member: how a helper starts, how it ends, and what its end is taken for."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from evener import messages
from evener.arena import Arena
from evener.channel import ChannelClosedError, ChannelTimeoutError
from evener.devices import Device
from evener.errors import HelperStartError
from evener.member import Member
from evener.pickling import dumps

DEVICE = Device("cpu", 1, (0,), 1, "test")


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena()
    yield arena
    arena.close()


@contextmanager
def started(arena: Arena, timeout_s: float | None = None) -> Iterator[Member]:
    member = Member(DEVICE, arena.fd, 0.0, timeout_s)
    try:
        member.await_start()
        yield member
    finally:
        member.kill()
        member.dismiss()


class Deed:
    """Calls something where it is unpickled, which is in the helper."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.what = function, args

    def __reduce__(self) -> Any:
        return self.what


def load(function: Any, *args: Any) -> messages.Load:
    data = dumps(Deed(function, *args))
    return messages.Load(data, [], messages.Span(0, 0), [], [], [], [], None)


def test_it_answers_and_hears_with_a_request_what_it_may_forget(arena: Arena) -> None:
    with started(arena) as member:
        member.dropped.extend([3, 4])

        member.send(messages.Done())
        assert not member.dropped
        answer = member.receive(messages.Done())

        assert isinstance(answer.message, messages.Failure)  # nobody asks for that
        assert answer.end_s >= answer.start_s > 0


@pytest.mark.parametrize(
    ("number", "text", "is_own"),
    [
        (signal.SIGKILL, "was ended by SIGKILL (often", False),
        (signal.SIGSEGV, "was ended by SIGSEGV", True),
        (signal.SIGRTMIN + 1, "was ended by ", True),
    ],
)
def test_a_signal_is_its_cause(arena: Arena, number: int, text: str, *, is_own: bool) -> None:
    """From outside, or a crash that its work may have caused and would cause elsewhere."""
    with started(arena) as member:
        os.kill(member.pid, number)
        with pytest.raises(ChannelClosedError):
            member.receive(messages.Done())

        cause = member.bury(ChannelClosedError())

        assert cause.text.startswith(text)
        assert (cause.pid, cause.is_own, cause.has_waited) == (member.pid, is_own, False)
        assert not cause.is_memory
        assert not os.path.exists(f"/proc/{member.pid}")  # noqa: PTH110


def test_an_exit_is_its_own_doing(arena: Arena) -> None:
    with started(arena) as member:
        member.send(load(os._exit, 9))
        with pytest.raises(ChannelClosedError):
            member.receive(messages.Done())

        cause = member.bury(ChannelClosedError())

        assert (cause.text, cause.is_own) == ("ended with exit code 9", True)


def test_an_end_that_somebody_else_has_waited_for_is_not_called_an_exit(arena: Arena) -> None:
    """As where the user's program ignores SIGCHLD: the system then tells nobody."""
    with started(arena) as member:
        os.kill(member.pid, signal.SIGKILL)
        os.waitpid(member.pid, 0)

        cause = member.bury(ChannelClosedError())

        assert cause.text.startswith("ended with exit code 0, or in a way that was not seen")
        assert cause.is_own


def test_one_that_does_not_answer_in_time(arena: Arena) -> None:
    with started(arena, timeout_s=0.5) as member:
        os.kill(member.pid, signal.SIGSTOP)
        member.send(messages.Done())
        with pytest.raises(ChannelTimeoutError):
            member.receive(messages.Done())

        cause = member.bury(ChannelTimeoutError())

        assert cause.text == "did not answer within 0.5 s"
        assert cause.is_own
        assert cause.has_waited


def test_what_it_prints_is_shown_and_so_is_the_rest_when_it_ends(
    arena: Arena, capsys: pytest.CaptureFixture[str]
) -> None:
    with started(arena) as member:
        member.send(load(print, "in an answer"))
        member.receive(messages.Done())
        assert capsys.readouterr().out == "in an answer\n"

        member.send(load(print, "nobody has asked for it"))
        select.select([member.channel._socket], [], [])
    assert capsys.readouterr().out == "nobody has asked for it\n"


def test_one_that_is_idle_ends_by_itself(arena: Arena) -> None:
    with started(arena) as member:
        member.dismiss()
        member.finish(100.0)

        assert not os.path.exists(f"/proc/{member.pid}")  # noqa: PTH110


def test_one_that_is_busy_is_killed(arena: Arena) -> None:
    with started(arena) as member:
        os.kill(member.pid, signal.SIGSTOP)
        member.dismiss()

        member.finish(0.0)

        assert not os.path.exists(f"/proc/{member.pid}")  # noqa: PTH110


def test_without_an_interpreter_there_is_none(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "")

    with pytest.raises(HelperStartError, match=r"sys\.executable is empty"):
        Member(DEVICE, arena.fd, 0.0, None)
