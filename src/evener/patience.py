"""Patience: how long to wait for a device before it counts as dead. No torch.

A device that computes and one that hangs look alike from outside. What tells them apart is what
the same work has taken so far: many times the usual is a hang. Work of a kind or size that was not
done yet may take much longer, for torch chooses algorithms, and compiles, at the first time::

    first time     FIRST_S                                 ten minutes
    later          FACTOR x the longest of the last, but   fifty times
                   not below FLOOR_S                       one minute
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable

#: Seconds for what was not done before: the code may be compiled in it, or read from a slow disk.
FIRST_S = 600.0
#: Seconds below which nothing counts as a hang: a machine may swap, or be stopped for a while.
FLOOR_S = 60.0
#: So many times as long as usual is a hang.
FACTOR = 50.0
#: Of how many of the latest answers the longest is the usual.
WINDOW = 32
#: So many kinds of work are remembered, the latest.
NUM_KINDS = 256


class Patience:
    """The limits of one device.

    Args:
        timeout_s: the limit for everything. Default: it follows what was measured.
    """

    def __init__(self, timeout_s: float | None = None) -> None:
        self._timeout_s = timeout_s
        self._known: OrderedDict[tuple[str, Hashable], None] = OrderedDict()
        self._last_s: dict[str, deque[float]] = {}

    def limit_s(self, kind: str, size: Hashable = None) -> float:
        """How long the answer may take, in seconds.

        Args:
            kind: of the work, such as ``"forward"``.
            size: what makes it new to the device, such as the shape of its inputs.
        """
        if self._timeout_s is not None:
            return self._timeout_s
        last_s = self._last_s.get(kind)
        if not last_s or (kind, size) not in self._known:
            return FIRST_S
        return max(FLOOR_S, FACTOR * max(last_s))

    def observe(self, kind: str, size: Hashable, seconds: float) -> None:
        """Learn from an answer.

        The first one of its kind and size is not the usual.
        """
        key = kind, size
        if key in self._known:
            self._known.move_to_end(key)
            self._last_s.setdefault(kind, deque(maxlen=WINDOW)).append(seconds)
            return
        self._known[key] = None
        if len(self._known) > NUM_KINDS:
            self._known.popitem(last=False)
