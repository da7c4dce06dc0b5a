"""Printing: what the user's module prints in a helper appears where the user's program prints.

A helper inherits the terminal, and a print there would appear at any time, and in a notebook not
at all. So its ``sys.stdout`` and ``sys.stderr`` send each line through the channel, and the main
process writes it to its own, whatever they are at that time, while it waits for the answers: first
what the first device printed, then the second, and so on, each in its own order. Lines that were
printed before a helper died are in the channel and are written still. What writes to the file
descriptor itself, as a library in C does, goes where that leads.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, TextIO

from evener.channel import Channel, ChannelClosedError

#: So much of an unfinished line is kept before it is sent.
MAX_LINE = 1 << 13


class Printed(NamedTuple):
    """What a helper has printed; comes before the answer to a request."""

    stream: str  # "stdout" or "stderr"
    text: str

    def show(self) -> None:
        """Print it here."""
        stream = getattr(sys, self.stream)
        if stream is not None:
            stream.write(self.text)
            stream.flush()


class Printer(io.TextIOBase):
    """Stands for a helper's ``sys.stdout`` or ``sys.stderr``.

    Args:
        stream: which of the two.
        send: sends a message to the main process.
    """

    def __init__(self, stream: str, send: Callable[[Any], None]) -> None:
        super().__init__()
        self._stream = stream
        self._original: TextIO | None = getattr(sys, stream)
        self._send = send
        self._line = ""

    def write(self, text: str) -> int:
        """Take text; whole lines are sent."""
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        self._line += text
        if "\n" in text or "\r" in text or len(self._line) > MAX_LINE:
            self.flush()
        return len(text)

    def flush(self) -> None:
        """Send what was not sent."""
        text, self._line = self._line, ""
        if not text:
            return
        try:
            self._send(Printed(self._stream, text))
        except (ChannelClosedError, OSError):  # the main process has ended, or will not listen
            if self._original is not None:
                self._original.write(text)
                self._original.flush()

    def writable(self) -> bool:
        """Whether it can be written to: yes."""
        return True

    def fileno(self) -> int:
        """The descriptor of the original stream."""
        if self._original is None:
            raise io.UnsupportedOperation("fileno")
        return self._original.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """As that of the original stream."""
        return getattr(self._original, "encoding", None) or "utf-8"

    @property
    def errors(self) -> str:  # type: ignore[override]
        """As that of the original stream."""
        return getattr(self._original, "errors", None) or "strict"

    @property
    def buffer(self) -> Any:
        """The bytes of the original stream; what is written to it goes there at once."""
        return getattr(self._original, "buffer", None)


def redirect(channel: Channel, timeout_s: float) -> Callable[[], None]:
    """Let everything that this process prints go through a channel.

    Returns:
        A function that sends what was printed without an end of line.
    """

    def send(message: Any) -> None:
        channel.send(message, timeout_s)

    printers = [Printer("stdout", send), Printer("stderr", send)]
    sys.stdout, sys.stderr = printers

    def flush() -> None:
        for printer in printers:
            printer.flush()

    return flush
