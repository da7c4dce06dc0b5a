"""The gather: each device of a call gives some numbers, and gets those of all, in one order.

It is for devices that must know of each other in the middle of their work (see ``batchnorm``). All
is in one region of the arena, the room; no message is sent, and nobody is in the middle::

    failed │ of each device: count, has left │ slot 0: label, size, values │ slot 1: the same

A device writes its values into its place of a slot, raises its count, and waits for the counts of
the others. Rounds take the slots in turns: who is in the round after the next has told that it has
read this one. Who fails says so, and all who wait stop waiting; who ends says so, too, and those
who still wait for it know that the devices have gone different ways.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from evener.arena import Place, Region
from evener.errors import BranchError, GatherBrokenError

#: How long a wait looks before it sleeps: about as long as devices differ at a layer.
SPIN_S = 0.002
#: The sleep between two looks.
_SLEEP_S = 0.0002
#: How often who waits looks after the others.
_ATTEND_S = 0.005
#: Words of a device: on a line of the cache of its own.
_STEP = 8


class Room(NamedTuple):
    """Where devices meet: plain numbers, the same for each process.

    Attributes:
        offset: of its region in the arena, in bytes.
        num_bytes: the region's size.
        capacity: numbers that a device can give at once.
        labels: what each device is called that takes part, in order.
        spin_s: how long a wait looks before it sleeps.
    """

    offset: int
    num_bytes: int
    capacity: int
    labels: tuple[str, ...]
    spin_s: float


def room_bytes(num: int, capacity: int) -> int:
    """The size of a room.

    Example:
        >>> room_bytes(2, 6)
        448
    """
    return 8 * (_STEP * (1 + num) + 2 * num * _width(capacity))


def _width(capacity: int) -> int:
    """Words of one place in a slot: label, size, values."""
    return -(-(2 + capacity) // _STEP) * _STEP


class Gather:
    """One device's side of a room.

    Args:
        region: the room's.
        room: what is known of it.
        index: the number of this device among those that take part; -1 for who only looks on.
        attend: looks after the others while this one waits. Default: nobody does.

    Attributes:
        waited_s: seconds that this device has waited for others.
    """

    def __init__(
        self,
        region: Region,
        room: Room,
        index: int = -1,
        attend: Callable[[], object] | None = None,
    ) -> None:
        num, width = len(room.labels), _width(room.capacity)
        self._words = region.words
        self._room = room
        self._index = index
        self._attend = attend
        self._round = 0
        self._counts = [_STEP * (1 + i) for i in range(num)]
        starts = [_STEP * (1 + num) + slot * num * width for slot in range(2)]
        self._heads = [[start + i * width for i in range(num)] for start in starts]
        self._values = [
            region.tensor(
                Place(
                    region.offset + 8 * (start + 2),
                    torch.float64,
                    (num, room.capacity),
                    (width, 1),
                )
            )
            for start in starts
        ]
        self._lock = threading.Lock()
        self.waited_s = 0.0

    def open(self) -> None:
        """Make it as if nobody had been here; nobody may be."""
        self._words[0] = 0
        for place in self._counts:
            self._words[place] = self._words[place + 1] = 0
        self._fence()

    def all(self, label: int, values: Tensor, name: Callable[[int], str] = str) -> Tensor:
        """Give values, and get those of all devices.

        Args:
            label: what they are, the same on all devices.
            values: float64, (length,), the same length on all devices.
            name: how to call a label in an error. Default: its number.

        Returns:
            float64, (devices, length), to be used before this is called again.

        Raises:
            BranchError: if another device has given something else, or has ended.
            GatherBrokenError: if another device has failed.
        """
        parts = torch.split(values, self._room.capacity)
        if len(parts) == 1:
            return self._some(label, len(values), values, name)
        return torch.cat([self._some(label, len(values), part, name).clone() for part in parts], 1)

    def leave(self) -> None:
        """This device needs no more from the others, and gives no more."""
        self._fence()
        self._words[self._counts[self._index] + 1] = 1

    def fail(self) -> None:
        """Let all who wait stop waiting."""
        self._words[0] = 1

    @property
    def has_failed(self) -> bool:
        """Whether somebody has failed."""
        return bool(self._words[0])

    def progress(self) -> list[tuple[int, bool]]:
        """For each device its rounds, and whether it has left."""
        return [(self._words[place], bool(self._words[place + 1])) for place in self._counts]

    def _some(self, label: int, size: int, values: Tensor, name: Callable[[int], str]) -> Tensor:
        slot, length = self._round % 2, len(values)
        heads, words = self._heads[slot], self._words
        words[heads[self._index]], words[heads[self._index] + 1] = label, size
        self._values[slot][self._index, :length] = values
        self._fence()
        self._round += 1
        words[self._counts[self._index]] = self._round
        self._await(label, name)
        self._fence()
        for i, head in enumerate(heads):
            if words[head] != label:
                raise self._branched(label, name, i, f"in {name(words[head])}")
            if words[head + 1] != size:
                what = f"there with {words[head + 1]} numbers instead of {size}"
                raise self._branched(label, name, i, what)
        return self._values[slot][:, :length]

    def _await(self, label: int, name: Callable[[int], str]) -> None:
        words, number = self._words, self._round
        missing = [place for place in self._counts if words[place] < number]
        if not missing:
            return
        start_s = now_s = time.perf_counter()
        attend_s = start_s + _ATTEND_S
        while missing:
            if words[0]:
                raise GatherBrokenError("another device has failed")
            for place in missing:
                # In this order: who has left counts no more.
                if words[place + 1] and words[place] < number:
                    what = "done without it"
                    raise self._branched(label, name, self._counts.index(place), what)
            if now_s > attend_s and self._attend is not None:
                self._attend()
                attend_s = now_s + _ATTEND_S
            if now_s > start_s + self._room.spin_s:
                time.sleep(_SLEEP_S)
            missing = [place for place in missing if words[place] < number]
            now_s = time.perf_counter()
        self.waited_s += now_s - start_s

    def _branched(
        self, label: int, name: Callable[[int], str], other: int, what: str
    ) -> BranchError:
        labels: Sequence[str] = self._room.labels
        return BranchError(
            f"the devices have gone different ways: {labels[self._index]} is in {name(label)}, "
            f"and {labels[other]} is {what}. One mean over all devices needs the same layers in "
            'the same order on each; give parallelize batchnorm="local" if that cannot be'
        )

    def _fence(self) -> None:
        """What was written before is seen before what is written afterwards, on any processor."""
        for _ in range(2):
            with self._lock:
                pass
