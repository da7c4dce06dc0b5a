"""A meeting: one phase of a call in which the devices wait for each other.

Who waits for a device that has died, hangs or has failed would wait for ever, so somebody has to
look after them: the main process, while it waits itself, for a helper's answer or in a gather::

    one has ended                        ─► the meeting has failed: all stop waiting, and answer
    none gets on for as long as          ─► those that are behind count as dead; the meeting has
      such a phase may take                 failed

What a device did not do is then not done again by another, but by all of them: see ``together``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import nn

from evener import messages
from evener.arena import Arena, Region
from evener.batchnorm import over_all
from evener.channel import ChannelTimeoutError
from evener.exchange.gather import SPIN_S, Gather, Room, room_bytes
from evener.member import LOST, Cause
from evener.recovery import PHASES
from evener.roster import Roster

#: A longer gap between two looks: this process itself was stopped.
_LOOK_S = 2.0


class DisturbedError(Exception):
    """A device could not do its part, and so none could. Never seen by the user.

    Args:
        device: its number.
        failure: how its memory ended; None if its helper did.
    """

    def __init__(self, device: int, failure: messages.Failure | None = None) -> None:
        super().__init__(device)
        self.device = device
        self.failure = failure


class Loss(NamedTuple):
    """A helper that was lost in a meeting.

    Attributes:
        device: its device.
        cause: what happened to it.
        note: notes it, with what was done.
    """

    device: int
    cause: Cause
    note: Callable[[str], None]


class Meeting:
    """One phase of a call in which the devices wait for each other.

    Args:
        roster: the team's.
        room: where they meet.
        region: the room's.
        devices: those that take part, in order.

    Attributes:
        losses: the helpers that were lost in it.
    """

    def __init__(self, roster: Roster, room: Room, region: Region, devices: Sequence[int]) -> None:
        self._roster = roster
        self._room = room
        self._devices = list(devices)
        index = self._devices.index(0) if 0 in self._devices else -1
        self._gather = Gather(region, room, index, self.attend)
        self._gather.open()
        self._late: set[int] = set()
        self._progress: list[tuple[int, bool]] = []
        self._idle_s, self._looked_s = 0.0, time.monotonic()
        self.losses: list[Loss] = []

    @property
    def waited_s(self) -> float:
        """Seconds that the first device has waited."""
        return self._gather.waited_s

    def place_of(self, device: int) -> tuple[Room, int]:
        """What a device has to know to take part."""
        return self._room, self._devices.index(device)

    @contextmanager
    def held(self) -> Iterator[None]:
        """The time in which it is held; where that is cut short, nobody stays behind."""
        try:
            yield
        except BaseException:
            self._gather.fail()
            raise

    @contextmanager
    def attended_by(self, module: nn.Module) -> Iterator[None]:
        """The first device takes part in it, with the user's module."""
        with over_all(self._gather, list(module.modules())):
            yield

    def receive(self, device: int) -> Any:
        """Wait for a device's answer to the last request.

        Returns:
            The reply's message.

        Raises:
            DisturbedError: if its helper is lost, of which ``losses`` tells, or had no memory.
        """
        seat = self._roster.seats[device]
        asked = seat.asked[0]
        work = seat.works.get(asked.message.piece)
        answer = None
        try:
            if device in self._late:
                seat.asked.remove(asked)
                raise ChannelTimeoutError
            answer = seat.hear(asked, work, self.attend)
        except LOST as error:
            self._gather.fail()
            since_s = time.perf_counter()
            cause = self._roster.bury(seat, error.with_traceback(None))
            since_s = asked.since_s if cause.has_waited else since_s
            note = partial(self._roster.note, seat, PHASES[type(asked.message)], cause, since_s)
            self.losses.append(Loss(device, cause, note))
            lost = True
        else:
            lost = isinstance(answer, messages.Failure) and answer.is_memory
        if lost:
            raise DisturbedError(device, answer)
        return answer

    def attend(self) -> bool:
        """Look after the helpers.

        Returns:
            Whether one that has not answered may be waiting for others.
        """
        if self._gather.has_failed:
            return False
        members = {i: self._roster.seats[i].member for i in self._devices if i}
        if any(member is None or member.has_ended for member in members.values()):
            self._gather.fail()
            return False
        progress = self._gather.progress()
        if all(has_left for _, has_left in progress):
            return False
        now_s = time.monotonic()
        if progress != self._progress:
            self._progress, self._idle_s = progress, 0.0
        else:
            self._idle_s += min(now_s - self._looked_s, _LOOK_S)
        self._looked_s = now_s
        there = {
            device: count
            for device, (count, has_left) in zip(self._devices, progress, strict=True)
            if device and not has_left
        }
        behind = [device for device, count in there.items() if count == min(there.values())]
        limits_s = [member.limit_s for i in behind if (member := members[i]) is not None]
        if limits_s and self._idle_s > max(limits_s):
            self._late.update(behind)
            self._gather.fail()
            return False
        return True


class Meetings:
    """Holds one meeting after the other, in the same room.

    Args:
        roster: the team's.
        arena: the team's.
    """

    def __init__(self, roster: Roster, arena: Arena) -> None:
        self._roster = roster
        self._arena = arena
        self._region: Region | None = None

    def begin(self, devices: Sequence[int], labels: Sequence[str], capacity: int) -> Meeting:
        """Begin a meeting; nobody is in one.

        Args:
            devices: those that take part, in order.
            labels: what they are called.
            capacity: numbers that each of them gives at once.
        """
        num_bytes = room_bytes(len(devices), capacity)
        if self._region is None or self._region.num_bytes < num_bytes:
            if self._region is not None:
                self._region.close()
            self._region = self._arena.take(num_bytes)
        region = self._region
        spin_s = SPIN_S if self._roster.spin_s else 0.0
        room = Room(region.offset, region.num_bytes, capacity, tuple(labels), spin_s)
        return Meeting(self._roster, room, region, devices)
