"""The team: the devices of one parallel module, and the helpers that drive all but the first.

::

    main process ── device 0        the user's own process
      │  channel ── helper ── device 1
      └─ channel ── helper ── device 2
           arena: one memory for all

A request is posted to a helper and answered by one reply. A call that is interrupted may leave
requests unanswered; :meth:`Team.settle`, at the start of the next call, waits for them and forgets
the answers. A helper that ends or stops answering ends the team: every helper is stopped, the
error says which device and why, and the next call starts a new team.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from evener import allocator, messages
from evener.arena import Arena, Region
from evener.channel import Channel, ChannelClosedError, ChannelTimeoutError
from evener.devices import Device
from evener.errors import HelperDiedError, HelperRaisedError, HelperStartError, RemoteTraceback
from evener.journal import Journal
from evener.printing import Printed

#: How long a wait looks before it sleeps. It bridges a user's optimizer step on a small model.
SPIN_S = 0.002
#: A helper imports torch, which takes about a second, and much longer on a cold disk.
START_TIMEOUT_S = 300.0
#: How long a helper that is told to end has before it is killed.
STOP_TIMEOUT_S = 1.0

_PROGRAM = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from evener.helper import main
main(*json.loads(sys.argv[2]), spin_s=float(sys.argv[3]))
"""


class _Member:
    """One helper, as the main process sees it."""

    def __init__(self, device: Device, process: subprocess.Popen[bytes], channel: Channel) -> None:
        self.device = device
        self.process = process
        self.channel = channel
        self.num_unanswered = 0
        #: The regions of the inputs of its pieces, until it says that nothing reads them.
        self.regions: dict[int, Region] = {}
        #: Pieces that it may forget; told with the next request.
        self.dropped: deque[int] = deque()


class Team:
    """Starts helpers, and speaks with them.

    Args:
        devices: the devices, two or more; the first is the main process's.
        timeout_s: how long one answer may take.
        journal: is told of lost helpers. Default: nobody is.

    Attributes:
        devices: the devices.
        arena: the shared memory.
        is_running: false once the helpers have been stopped.
        worked: (device, start, end) of each answer, in seconds of ``time.perf_counter``, since
            the list was last cleared.

    Raises:
        HelperStartError: if a helper does not start.
        ArenaError: if there is no shared memory.
    """

    def __init__(
        self, devices: Sequence[Device], timeout_s: float, journal: Journal | None = None
    ) -> None:
        self.devices = list(devices)
        self.is_running = True
        self.worked: list[tuple[int, float, float]] = []
        self._journal = journal
        self._timeout_s = timeout_s
        self._main_pid = os.getpid()
        self._members: list[_Member] = []
        used: list[int] = [core for device in devices for core in device.cores]
        # Who shares a core with another device must not keep it busy by looking.
        self._spin_s = SPIN_S if len(used) == len(set(used)) else 0.0
        self.arena = Arena()
        try:
            for device in devices[1:]:
                self._members.append(self._start(device))
            for i in range(1, len(devices)):
                self._members[i - 1].num_unanswered = 1
                self._await_start(i)
        except BaseException:
            self.stop()
            raise

    # -------------------------------------------------------------- speaking

    def post(self, device: int, message: Any) -> None:
        """Send a request to the helper of a device; every post is followed by one receive.

        Raises:
            HelperDiedError: if the helper has ended. The team is stopped.
        """
        member = self._members[device - 1]
        dropped = [member.dropped.popleft() for _ in range(len(member.dropped))]
        member.num_unanswered += 1
        try:
            member.channel.send(messages.Request(message, dropped), self._timeout_s)
        except (ChannelClosedError, ChannelTimeoutError) as error:
            self._lose(member, error)

    def receive(self, device: int) -> Any:
        """Wait for the answer to the last request to a device's helper.

        Returns:
            The reply's message; a ``Failure`` is returned, not raised, so that the answers of the
            other devices can be received first.

        Raises:
            HelperDiedError: if the helper ends, or does not answer in time. The team is stopped.
        """
        member = self._members[device - 1]
        end = time.monotonic() + self._timeout_s
        try:
            while isinstance(
                reply := member.channel.receive(max(0.0, end - time.monotonic())), Printed
            ):
                reply.show()
        except (ChannelClosedError, ChannelTimeoutError) as error:
            self._lose(member, error)
        member.num_unanswered -= 1
        self.worked.append((device, reply.start_s, reply.end_s))
        for piece in reply.freed:
            member.regions.pop(piece).close()
        return reply.message

    def collect(self, devices: Sequence[int]) -> None:
        """Receive the answers of several devices of which nothing but success is expected.

        Raises:
            HelperDiedError: as :meth:`receive`.
            BaseException: what a helper answered with, the first one's, when all have answered.
        """
        answers = [(device, self.receive(device)) for device in devices]
        for device, answer in answers:
            if isinstance(answer, messages.Failure):
                raise self.error_of(device, answer)

    def settle(self) -> list[tuple[int, Any]]:
        """Receive what an interrupted call has left unanswered.

        Returns:
            (device, answer) for each.
        """
        answers = []
        for i, member in enumerate(self._members, start=1):
            if member.channel.broken:
                self.stop()
                raise HelperDiedError(
                    f"a message to the helper of {member.device.label} was interrupted halfway; "
                    "the helpers were stopped, and the next call starts new ones"
                )
            while member.num_unanswered:
                answers.append((i, self.receive(i)))
        return answers

    def keep(self, device: int, piece: int, region: Region) -> None:
        """Keep the region of a piece's inputs until the helper no longer reads them."""
        self._members[device - 1].regions[piece] = region

    def drop(self, devices: Sequence[int], piece: int) -> None:
        """Let helpers forget a piece. May be called at any time, by the garbage collector too."""
        if self.is_running and os.getpid() == self._main_pid:
            for device in devices:
                self._members[device - 1].dropped.append(piece)

    def error_of(self, device: int, failure: messages.Failure) -> BaseException:
        """The exception of a helper, with the helper's traceback as its cause."""
        label = self.devices[device].label
        if failure.exception is None:
            error: BaseException = HelperRaisedError(f"on {label}: {failure.summary}")
        else:
            error = pickle.loads(failure.exception)  # noqa: S301 - from our own helper
        error.__cause__ = RemoteTraceback(label, failure.traceback)
        return error

    # -------------------------------------------------------------- starting

    def _start(self, device: Device) -> _Member:
        ours, theirs = socket.socketpair()
        arguments = [theirs.fileno(), self.arena.fd, self._main_pid, list(device.cores)]
        if not sys.executable:
            raise HelperStartError("helpers need a Python interpreter; sys.executable is empty")
        with theirs:
            try:
                process = subprocess.Popen(  # noqa: S603 - our own interpreter, our own program
                    [
                        sys.executable,
                        *subprocess._args_from_interpreter_flags(),  # type: ignore[attr-defined]
                        "-c",
                        _PROGRAM,
                        json.dumps(sys.path),
                        json.dumps(arguments),
                        str(self._spin_s),
                    ],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), self.arena.fd),
                    env={**os.environ, **_environment(device)},
                )
            except OSError as error:
                ours.close()
                raise HelperStartError(
                    f"the helper of {device.label} could not be started: {error}"
                ) from error
        try:
            pidfd = os.pidfd_open(process.pid)
        except (AttributeError, OSError):
            pidfd = -1
        return _Member(device, process, Channel(ours, pidfd, self._spin_s))

    def _await_start(self, device: int) -> None:
        member = self._members[device - 1]
        try:
            member.channel.receive(START_TIMEOUT_S)
        except (ChannelClosedError, ChannelTimeoutError) as error:
            cause = _cause_of_death(member.process, error, START_TIMEOUT_S)
            raise HelperStartError(
                f"the helper of {member.device.label} did not start: {cause}; what it printed "
                "stands above"
            ) from None
        member.num_unanswered = 0

    # -------------------------------------------------------------- ending

    def stop(self) -> None:
        """End all helpers. Does nothing where they have ended, or in a forked process."""
        if not self.is_running or os.getpid() != self._main_pid:
            return
        self.is_running = False
        for member in self._members:
            _show_rest(member.channel)
            member.channel.close()
        end = time.monotonic() + STOP_TIMEOUT_S
        for member in self._members:
            try:
                # One that computes, or hangs, does not see that the channel is closed.
                if member.num_unanswered:
                    member.process.kill()
                member.process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                member.process.kill()
                member.process.wait()
        self.arena.close()

    def _lose(self, member: _Member, error: Exception) -> None:
        cause = _cause_of_death(member.process, error, self._timeout_s)
        if self._journal is not None:
            self._journal.fault(self._members.index(member) + 1)
        self.stop()
        raise HelperDiedError(
            f"the helper of {member.device.label} (process {member.process.pid}) {cause}; the "
            "call is lost, the module and its parameters are not: the next call starts new helpers"
        ) from None


def _cause_of_death(process: subprocess.Popen[bytes], error: Exception, timeout_s: float) -> str:
    if isinstance(error, TimeoutError):
        return f"did not answer within {timeout_s:g} s"
    try:
        code = process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return "closed its channel"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = " (often the system's out-of-memory killer)" if -code == signal.SIGKILL else ""
    return f"was ended by {name}{hint}"


def _show_rest(channel: Channel) -> None:
    """Show what a helper has printed so far, for nobody will ask it any more."""
    with suppress(ChannelClosedError, ChannelTimeoutError, OSError):
        while True:
            message = channel.receive(0)
            if isinstance(message, Printed):
                message.show()


def _environment(device: Device) -> dict[str, str]:
    """What a helper's process needs to hear before its libraries are loaded."""
    threads = str(max(1, len(device.cores)))
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        **allocator.helper_environment(),
    }
