"""Faults: what went wrong with the devices of a team, what was done, and who has to hear of it."""

from __future__ import annotations

import contextlib
import math
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from evener.devices import Device
from evener.errors import FaultWarning
from evener.journal import Fault, Journal

#: Files that are not the user's: ours, torch's, and what calls our context managers.
_NOT_THE_USERS = (
    str(Path(__file__).parent),
    str(Path(torch.__file__).parent),
    contextlib.__file__,
)

_WHEN = {"start": "while it started", "idle": "between two calls"}


class Faults:
    """The faults of one team.

    Args:
        devices: the devices.
        journal: gets each fault.
        restarts: how many times a device gets a new helper after a death.

    Attributes:
        restarts: the same.
        caps: for each device the most samples that it has memory for.
        num: how many there were.
        call: the number of the call that runs.
    """

    def __init__(self, devices: Sequence[Device], journal: Journal, restarts: int) -> None:
        self.restarts = restarts
        self.caps: list[float] = [math.inf] * len(devices)
        self.num = 0
        self.call = 0
        self._devices = devices
        self._journal = journal
        self._untold: list[str] = []

    def note(
        self, device: int, phase: str, cause: str, action: str, *, since_s: float, who: str = ""
    ) -> None:
        """Note a fault that is over.

        Args:
            device: its number.
            phase: what it had to do.
            cause: what happened, behind the name of who it happened to.
            action: what was done.
            since_s: when its cost began, in seconds of ``time.perf_counter``.
            who: to whom it happened. Default: the device's label.
        """
        now_s = time.perf_counter()
        self.num += 1
        fault = Fault(device, self.call, phase, cause, action, now_s - since_s, now_s)
        self._journal.fault(fault)
        when = _WHEN.get(phase, f"in the {phase} of call {self.call}")
        name = who or self.label(device)
        self._untold.append(f"{name} {cause} {when}; {action}")

    def label(self, device: int) -> str:
        """What a device is called."""
        return self._devices[device].label

    def limit(self, device: int, most: int) -> None:
        """Remember that a device has memory for so many samples only."""
        self.caps[device] = min(self.caps[device], most)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tell of faults afterwards: when all is in order again, for a warning may raise."""
        try:
            yield
        except BaseException:
            untold = list(self._untold)
            try:
                self.tell()
            except FaultWarning:  # warnings are errors: the other error goes first
                self._untold = untold
            raise
        self.tell()

    def tell(self) -> None:
        """Warn the user of what was not told yet."""
        while self._untold:
            warnings.warn(self._untold.pop(0), FaultWarning, stacklevel=_level())


def _level() -> int:
    """Where on the stack the user's line is, seen from the caller."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None:
        if not frame.f_code.co_filename.startswith(_NOT_THE_USERS):
            break
        level, frame = level + 1, frame.f_back
    return level
