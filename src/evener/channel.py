"""A channel: messages between the main process and one helper.

A pair of connected sockets that only these two processes hold: no port, no name, nothing for
others to open. A message is a pickle behind its length in bytes. Waiting costs little, because it
begins with looking again and again (microseconds) before it sleeps (a wake-up takes 0.3 ms)::

    wait ─► look, look, look ... for spin_s ─► sleep until a message or a death

The other process's death is noticed by its process descriptor, not by the end of the stream
alone: a process that the user forked may hold a copy of our sockets.
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

_LENGTH = struct.Struct("<Q")
#: The most that is read at once; most messages are much smaller.
_CHUNK_BYTES = 1 << 16
#: The longest sleep of who waits for an answer in some time.
_LOOK_S = 1.0
#: The same where it looks after others.
_ATTEND_S = 0.01


class ChannelClosedError(Exception):
    """The other process has ended."""


class ChannelTimeoutError(TimeoutError):
    """The other process took too long. What a user's signal handler raises is another class."""


class Channel:
    """One end of a channel.

    Args:
        sock: the connected socket.
        other_pidfd: a process descriptor of the other process, or -1 where the system has none;
            it is closed with the channel.
        spin_s: how long a wait looks before it sleeps, in seconds; 0 where this process shares
            its core with another device.

    Attributes:
        broken: whether a send was interrupted, so that nothing more can be sent.
        torn: whether a message was taken, of which nobody has said that it has arrived where it
            belongs; who says so sets it to false. An interrupt may come between any two steps.
    """

    def __init__(self, sock: socket.socket, other_pidfd: int, spin_s: float) -> None:
        self._socket = sock
        self._pidfd = other_pidfd
        self._spin_s = spin_s
        self._received = bytearray()
        self._chunk = memoryview(bytearray(_CHUNK_BYTES))
        self._send_timeout_s: float | None = None
        self._sending = threading.RLock()  # a thread of the user's may print in a helper
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        if other_pidfd >= 0:
            self._poll.register(other_pidfd, select.POLLIN)
        self.broken = False
        self.torn = False

    def send(self, message: Any, timeout_s: float) -> None:
        """Send a message.

        Raises:
            ChannelClosedError: if the other process has ended.
            TimeoutError: if it does not take the message within ``timeout_s``.
        """
        data = pickle.dumps(message, protocol=5)
        with self._sending:
            self.broken = True  # if what follows is interrupted, the rest of it is missing
            try:
                if timeout_s != self._send_timeout_s:
                    self._socket.settimeout(timeout_s)
                    self._send_timeout_s = timeout_s
                self._socket.sendall(_LENGTH.pack(len(data)) + data)
            except (BrokenPipeError, ConnectionResetError) as error:
                raise ChannelClosedError from error
            except TimeoutError as error:
                raise ChannelTimeoutError from error
            self.broken = False

    def receive(self, timeout_s: float, attend: Callable[[], bool] | None = None) -> Any:
        """Wait for a message. May be interrupted and called again: what has come is kept.

        Args:
            timeout_s: how long, in seconds.
            attend: is called now and then; while it gives true, the other process itself waits
                for somebody, and its time does not count. Default: it counts.

        Raises:
            ChannelClosedError: if the other process has ended.
            TimeoutError: if no message came within ``timeout_s``.
        """
        left_s = timeout_s
        before = time.monotonic()
        spin_end = before + self._spin_s
        while True:
            message = self._take()
            if message is not None:
                return message[0]
            ready = self._poll.poll(0)
            if ready:
                # Only once the socket has no more is it believed that the other has ended: a last
                # message may have come between the two looks.
                socket_fd = self._socket.fileno()
                if all(fd != socket_fd for fd, _ in [*ready, *self._poll.poll(0)]):
                    raise ChannelClosedError
                self._read()
                continue
            now = time.monotonic()
            # Where this process itself was stopped (Ctrl-Z), the other one was, too.
            left_s -= min(now - before, 2 * _LOOK_S)
            before = now
            if now >= spin_end and attend is not None and attend():
                left_s = timeout_s
            if left_s <= 0:
                raise ChannelTimeoutError
            # While it looks it does not yield the core: with another program beside us, that would
            # give away a whole time slice, some milliseconds, to save some microseconds.
            if now >= spin_end:
                self._poll.poll(1000 * min(left_s, _LOOK_S if attend is None else _ATTEND_S))

    def close(self) -> None:
        """Close this end."""
        self._socket.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def _take(self) -> tuple[Any] | None:
        """The first whole message among what was received."""
        start = _LENGTH.size
        if len(self._received) < start:
            return None
        (length,) = _LENGTH.unpack_from(self._received)
        if len(self._received) < start + length:
            return None
        self.torn = True
        data = bytes(memoryview(self._received)[start : start + length])
        del self._received[: start + length]
        return (pickle.loads(data),)  # noqa: S301 - from a process of our own team

    def _read(self) -> None:
        """Take what the socket has."""
        before, self.torn = self.torn, True
        try:
            num_bytes = self._socket.recv_into(self._chunk)
        except ConnectionResetError as error:
            raise ChannelClosedError from error
        if not num_bytes:
            raise ChannelClosedError
        self._received += self._chunk[:num_bytes]
        self.torn = before
