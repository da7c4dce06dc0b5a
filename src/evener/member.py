"""A member: one helper as the main process sees it, from its start to its end."""

from __future__ import annotations

import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from evener import messages
from evener.channel import ChannelClosedError, ChannelTimeoutError
from evener.devices import Device
from evener.launch import launch
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


class Cause(NamedTuple):
    """Why a helper is no more.

    Attributes:
        pid: its process.
        text: behind "the helper of cpu:1".
        is_own: whether what it did may be the reason, and would end another process too.
        is_memory: whether the system had no memory left for it.
        has_waited: whether an answer was waited for until it was too late.
        is_signal: whether a signal has ended it: a crash, or somebody else.
    """

    pid: int
    text: str
    is_own: bool = False
    is_memory: bool = False
    has_waited: bool = False
    is_signal: bool = False


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
        limit_s: how long its answer may take, in seconds.
        is_extra: whether it came for a single call; see :meth:`Roster.summon`.

    Raises:
        HelperStartError: if there is no process.
    """

    def __init__(
        self, device: Device, arena_fd: int, spin_s: float, timeout_s: float | None
    ) -> None:
        self.device = device
        self.is_loaded = False
        self.is_extra = False
        self.stage = "starting"
        self.num_pieces = 0
        self.dropped: deque[int] = deque()
        self._patience = Patience(timeout_s)
        self._process, self.channel, self.pidfd, self._lifeline = launch(device, arena_fd, spin_s)
        self.pid = self._process.pid
        self._looked_s = self.started_s = time.monotonic()
        self.limit_s = 0.0
        try:
            self._kill_count = KillCount(self.pid)
        except BaseException:  # an interrupt
            self.kill()
            self.channel.close()
            raise

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
        self.limit_s = limit_s
        self.channel.send(messages.Request(message, dropped), limit_s)

    def receive(
        self, message: Any, size: Any = None, attend: Callable[[], bool] | None = None
    ) -> messages.Reply:
        """Wait for the answer to a message.

        Args:
            message: the message.
            size: as for :meth:`send`.
            attend: as for :meth:`Channel.receive`.

        Raises:
            ChannelClosedError: if it has ended.
            ChannelTimeoutError: if it does not answer in time.
        """
        kind = type(message).__name__
        self.limit_s = self._patience.limit_s(kind, size)
        reply = self._hear(self.limit_s, attend)
        self._patience.observe(kind, size, reply.end_s - reply.start_s)
        return reply

    def await_start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until it is there; with no time to wait: see whether it is.

        Raises:
            ChannelClosedError: if it has ended.
            ChannelTimeoutError: if it is not there in time.
        """
        self.limit_s = START_TIMEOUT_S
        self._hear(timeout_s)
        self.channel.torn = False
        self._kill_count.renew()

    def look(self) -> None:
        """Look now and then in which control group it is."""
        now_s = time.monotonic()
        if now_s > self._looked_s + _GROUP_EVERY_S:
            self._looked_s = now_s
            self._kill_count.renew()

    @property
    def has_ended(self) -> bool:
        """Whether its process is no more."""
        return self._process.poll() is not None

    def _hear(self, timeout_s: float, attend: Callable[[], bool] | None = None) -> messages.Reply:
        before = self.channel.torn
        while isinstance(reply := self.channel.receive(timeout_s, attend), Printed):
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
                text = f"did not answer within {self.limit_s:g} s"
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
        if code == 0:  # also what is left to see where somebody else has waited for it
            text = (
                "ended with exit code 0, or in a way that was not seen, for this program ignores "
                "SIGCHLD or waits for any process"
            )
            return Cause(self.pid, text, is_own=True)
        if code > 0:
            return Cause(self.pid, f"ended with exit code {code}", is_own=True)
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        if -code == signal.SIGKILL and self._kill_count.has_risen():
            text = f"was ended by {name}, by the system's out-of-memory killer"
            return Cause(self.pid, text, is_memory=True, is_signal=True)
        hint = " (often the system's out-of-memory killer)" if -code == signal.SIGKILL else ""
        is_own = -code not in _FROM_OUTSIDE
        return Cause(self.pid, f"was ended by {name}{hint}", is_own, is_signal=True)

    def _show_rest(self) -> None:
        """Show what it has printed so far, for nobody will ask it any more."""
        with suppress(ChannelClosedError, ChannelTimeoutError, OSError):
            while True:
                message = self.channel.receive(0)
                if isinstance(message, Printed):
                    message.show()
