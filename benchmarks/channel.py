"""A worker's end of the harness: requests from standard input, answers to standard output."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

_PR_SET_PDEATHSIG = 1


class Channel:
    """Speaks to the harness, and takes care that the worker ends when the harness does.

    Whatever else is printed, by the contender or by the libraries it uses, goes to standard
    error, where it cannot be taken for an answer.
    """

    def __init__(self) -> None:
        # A worker in the middle of a turn would not notice that its standard input is closed.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def say(self, **answer: Any) -> None:
        self._answers.write(json.dumps(answer) + "\n")

    def requests(self) -> Iterator[dict[str, Any]]:
        """The requests, until the harness closes the pipe."""
        for line in sys.stdin:
            yield json.loads(line)
