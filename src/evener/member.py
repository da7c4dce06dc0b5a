"""A member: one helper as the main process sees it, from its start to its end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from typing import Any, NamedTuple

from evener import allocator, lifelines, messages
from evener.channel import Channel, ChannelClosedError, ChannelTimeoutError
from evener.devices import Device
from evener.errors import HelperStartError
from evener.memory import KillCount
from evener.patience import Patience
from evener.printing import Printed

#: A helper imports torch, which takes about a second, and much longer on a cold disk.
START_TIMEOUT_S = 300.0
#: How long a helper that is told to end has before it is killed.
STOP_TIMEOUT_S = 1.0
#: How often to look in which control group a helper is.
_GROUP_EVERY_S = 1.0

#: Signals by which others end a process. All else, an exit or a hang may be its work's doing.
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)

#: How the end of a helper shows when it is spoken with.
LOST = (ChannelClosedError, ChannelTimeoutError)

#: The first lines are for who ends the main process, or presses Ctrl-C, while torch is imported.
#: See ``lifelines``; a pipe that was closed before it was asked to tell tells nothing.
_PROGRAM = """\
import fcntl, json, os, select, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
lifeline = int(sys.argv[4])
try:
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)
except OSError:
    pass
poll = select.poll()
poll.register(lifeline, 0)
if poll.poll(0):
    os._exit(0)
sys.path[:] = json.loads(sys.argv[1])
arguments = json.loads(sys.argv[2])
try:
    os.sched_setaffinity(0, arguments[3])  # what it imports is not to disturb the others' cores
except OSError:
    pass
from evener.process import main
main(*arguments, spin_s=float(sys.argv[3]), lifeline_fd=lifeline)
"""


class Cause(NamedTuple):
    """Why a helper is no more.

    Attributes:
        pid: its process.
        text: behind "the helper of cpu:1".
        is_own: whether what it did may be the reason, and would end another process too.
        is_memory: whether the system had no memory left for it.
        has_waited: whether an answer was waited for until it was too late.
    """

    pid: int
    text: str
    is_own: bool = False
    is_memory: bool = False
    has_waited: bool = False


class Member:
    """A helper that was started; its first answer says that it is there.

    Args:
        device: the device that it drives.
        arena_fd: the descriptor of the team's arena.
        spin_s: how long it looks before it sleeps, and so does who waits for it.
        timeout_s: how long one of its answers may take. Default: it follows what was measured.

    Attributes:
        pid: its process.
        pidfd: a descriptor of its process; -1 where the system has none.
        is_loaded: whether it has the replica that it should have.
        stage: ``"starting"``, ``"there"``, ``"rehearsing"`` or ``"seated"``; see ``roster``.
        num_pieces: how many pieces it was given since it was loaded.
        dropped: pieces that it may forget; told with the next request.

    Raises:
        HelperStartError: if there is no process.
    """

    def __init__(
        self, device: Device, arena_fd: int, spin_s: float, timeout_s: float | None
    ) -> None:
        self.device = device
        self.is_loaded = False
        self.stage = "starting"
        self.num_pieces = 0
        self.dropped: deque[int] = deque()
        self._patience = Patience(timeout_s)
        self._process, self.channel, self.pidfd, self._lifeline = _start(device, arena_fd, spin_s)
        self.pid = self._process.pid
        self._kill_count = KillCount(self.pid)
        self._looked_s = self.started_s = time.monotonic()
        self._limit_s = 0.0

    # -------------------------------------------------------------- speaking

    def send(self, message: Any, size: Any = None) -> None:
        """Send a request.

        Args:
            message: the request's message.
            size: what makes the work new to it; see :class:`Patience`.

        Raises:
            ChannelClosedError: if it has ended.
            ChannelTimeoutError: if it does not take the message.
        """
        limit_s = self._patience.limit_s(type(message).__name__, size)
        dropped = [self.dropped.popleft() for _ in range(len(self.dropped))]
        self._limit_s = limit_s
        self.channel.send(messages.Request(message, dropped), limit_s)

    def receive(self, message: Any, size: Any = None) -> messages.Reply:
        """Wait for the answer to a message.

        Raises:
            ChannelClosedError: if it has ended.
            ChannelTimeoutError: if it does not answer in time.
        """
        kind = type(message).__name__
        self._limit_s = self._patience.limit_s(kind, size)
        reply = self._hear(self._limit_s)
        self._patience.observe(kind, size, reply.end_s - reply.start_s)
        return reply

    def await_start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until it is there; with no time to wait: see whether it is.

        Raises:
            ChannelClosedError: if it has ended.
            ChannelTimeoutError: if it is not there in time.
        """
        self._limit_s = START_TIMEOUT_S
        self._hear(timeout_s)
        self.channel.torn = False
        self._kill_count.renew()

    def look(self) -> None:
        """Look now and then in which control group it is."""
        now_s = time.monotonic()
        if now_s > self._looked_s + _GROUP_EVERY_S:
            self._looked_s = now_s
            self._kill_count.renew()

    def _hear(self, timeout_s: float) -> messages.Reply:
        before = self.channel.torn
        while isinstance(reply := self.channel.receive(timeout_s), Printed):
            self.channel.torn = before
            reply.show()
        answer: messages.Reply = reply
        return answer

    # -------------------------------------------------------------- ending

    def dismiss(self) -> None:
        """Let it end by itself: it does when the channel closes."""
        self._show_rest()
        self.channel.close()

    def finish(self, seconds: float) -> None:
        """Wait until it has ended; after so many seconds kill it. See :meth:`dismiss`."""
        try:
            self._process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self.kill()
        self._lifeline.close()

    def kill(self) -> None:
        """End it now, whatever it does."""
        self._process.kill()
        self._process.wait()
        self._lifeline.close()

    def bury(self, error: Exception) -> Cause:
        """End what is left of it; afterwards it writes nowhere.

        Args:
            error: how its end was noticed.
        """
        try:
            if isinstance(error, ChannelTimeoutError):
                text = f"did not answer within {self._limit_s:g} s"
                return Cause(self.pid, text, is_own=True, has_waited=True)
            return self._cause()
        finally:
            self.kill()
            self.dismiss()

    def _cause(self) -> Cause:
        try:
            code = self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return Cause(self.pid, "closed its channel", is_own=True)
        if code >= 0:
            return Cause(self.pid, f"ended with exit code {code}", is_own=True)
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        if -code == signal.SIGKILL and self._kill_count.has_risen():
            text = f"was ended by {name}, by the system's out-of-memory killer"
            return Cause(self.pid, text, is_memory=True)
        hint = " (often the system's out-of-memory killer)" if -code == signal.SIGKILL else ""
        is_own = -code not in _FROM_OUTSIDE
        return Cause(self.pid, f"was ended by {name}{hint}", is_own)

    def _show_rest(self) -> None:
        """Show what it has printed so far, for nobody will ask it any more."""
        with suppress(ChannelClosedError, ChannelTimeoutError, OSError):
            while True:
                message = self.channel.receive(0)
                if isinstance(message, Printed):
                    message.show()


def _start(
    device: Device, arena_fd: int, spin_s: float
) -> tuple[subprocess.Popen[bytes], Channel, int, FileIO]:
    """Start a helper's process; gives channel, process descriptor, and our end of its lifeline."""
    if not sys.executable:
        raise HelperStartError("helpers need a Python interpreter; sys.executable is empty")
    if getattr(sys, "frozen", False):  # the "interpreter" would be this program once more
        raise HelperStartError(
            "helpers need a Python interpreter, and a frozen program has none; set sys.executable "
            "to one that can import torch and evener, and delete sys.frozen"
        )
    arguments = [arena_fd, os.getpid(), list(device.cores), device.label]
    process = None
    with ExitStack() as theirs, ExitStack() as ours:
        try:
            sock, its_sock = socket.socketpair()
            ours.callback(sock.close)
            theirs.callback(its_sock.close)
            lifeline, its_fd = lifelines.new()
            ours.callback(lifeline.close)
            theirs.callback(os.close, its_fd)
            with _without_interrupts():
                process = subprocess.Popen(  # noqa: S603 - our own interpreter, our own program
                    [
                        sys.executable,
                        *subprocess._args_from_interpreter_flags(),  # type: ignore[attr-defined]
                        "-c",
                        _PROGRAM,
                        json.dumps(sys.path),
                        json.dumps([its_sock.fileno(), *arguments]),
                        str(spin_s),
                        str(its_fd),
                    ],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(its_sock.fileno(), arena_fd, its_fd),
                    env={**os.environ, **_environment(device)},
                    cwd=_folder(),
                )
        except OSError as error:
            raise HelperStartError(
                f"the helper of {device.label} could not be started: {error}"
            ) from error
        except BaseException:  # an interrupt that has waited
            if process is not None:
                process.kill()
                process.wait()
            raise
        ours.pop_all()
    try:
        pidfd = os.pidfd_open(process.pid)
    except (AttributeError, OSError):
        pidfd = -1
    return process, Channel(sock, pidfd, spin_s), pidfd, lifeline


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Let Ctrl-C wait: it must not fall between a process and our knowing of it.

    The process inherits this, so that Ctrl-C in a terminal does not reach it before it has said
    that it is not concerned.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _folder() -> str:
    """Where a helper starts: here, unless that was deleted, where libraries do not load."""
    with suppress(OSError):
        return os.getcwd()
    return "/"


def _environment(device: Device) -> dict[str, str]:
    """What a helper's process needs to hear before its libraries are loaded."""
    threads = str(max(1, len(device.cores)))
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        **allocator.helper_environment(),
    }
