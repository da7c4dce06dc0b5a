"""The journal: what each device of a team did, and when. No torch.

A call has one phase in its forward, and one in each backward. A phase says from when to when it
lasted, who had how many samples, and the stretches of time in which each device did something;
what a device with a share does not account for is waiting, and a device without one rests::

    phase        ├───────────────────────────────────────────────┤
    device 0     ├exchange┤├─── forward ───┤    waiting   ├exchange┤
    device 1       waiting ├────────── forward ──────────┤ waiting

All times are those of :func:`time.perf_counter`, which on Linux is one clock for all processes.
Memory is bounded: totals are numbers, the latest phases are a ring, and of the whole past a
thinned series of calls is kept.
"""

from __future__ import annotations

import operator
import statistics
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple, TypeAlias

#: How many of the latest phases are kept in full.
NUM_PHASES = 1024
#: How many calls of the whole past are kept at most; when there are more, every second one goes.
NUM_MOMENTS = 1024
#: How many faults are kept in full.
NUM_FAULTS = 256

INFERENCE = "inference"  # a forward that no backward can follow
FORWARD = "forward"
BACKWARD = "backward"
EXCHANGE = "exchange"  # moving tensors among devices

#: Beside calls, a program is seldom busy for more than so many usual intervals, but in a pause.
PAUSE = 10
#: If more than one interval in so many is that long, it is no pause: it is how the program goes.
PAUSE_RARITY = 20


class Stretch(NamedTuple):
    """A stretch of time in which a device did one thing."""

    device: int
    kind: str  # INFERENCE, FORWARD, BACKWARD or EXCHANGE
    start_s: float
    end_s: float


class Phase(NamedTuple):
    """One forward or one backward of a call on all devices."""

    kind: str  # INFERENCE, FORWARD or BACKWARD
    call: int
    shares: tuple[int, ...]
    start_s: float
    end_s: float
    stretches: tuple[Stretch, ...]


class Fault(NamedTuple):
    """A device failed."""

    device: int
    call: int  # 0 before the first
    phase: str  # FORWARD, BACKWARD, EXCHANGE, "start", "idle", "load", "output" or "read"
    cause: str  # what happened to it
    action: str  # what was done
    cost_s: float  # until its work was done: waiting in vain, and doing it again
    at_s: float  # when it was over


class Moment(NamedTuple):
    """One call among those kept of the whole past: its shares, and each device's busy seconds."""

    call: int
    kind: str  # INFERENCE, or BACKWARD for a forward with its backward
    start_s: float
    shares: tuple[int, ...]
    busy_s: tuple[float, ...]
    lasted_s: float


@dataclass(slots=True)
class Total:
    """What one device did since its team began.

    Attributes:
        busy_s: seconds of forward and backward.
        exchange_s: seconds of moving tensors.
        waiting_s: seconds of the phases in which it had a share and did neither.
        num_calls: calls in which it had a share.
        num_samples: samples that it had in them.
        num_faults: how often it failed.
    """

    busy_s: float = 0.0
    exchange_s: float = 0.0
    waiting_s: float = 0.0
    num_calls: int = 0
    num_samples: int = 0
    num_faults: int = 0


#: What a moment needs of a phase: its start, how long it lasted, each device's busy seconds.
_Part: TypeAlias = tuple[float, float, list[float]]


@dataclass(slots=True)
class _Series:
    """The calls of one kind among the moments."""

    every: int = 1  # of how many calls one is kept
    num_calls: int = 0
    num_kept: int = 0


@dataclass
class Journal:
    """What the devices of a team did.

    Attributes:
        num_devices: how many there are.
        totals: one for each device.
        num_calls: calls of the module.
        lasted_s: seconds of all phases together.
        phases: the latest phases, the oldest first.
        moments: calls of the whole past, the oldest first, thinned.
        faults: the latest faults, the oldest first.
        grid: into how many cells a batch is cut; None where it has no grid.
    """

    num_devices: int
    totals: list[Total] = field(init=False)
    num_calls: int = 0
    lasted_s: float = 0.0
    phases: deque[Phase] = field(default_factory=lambda: deque(maxlen=NUM_PHASES))
    moments: list[Moment] = field(default_factory=list)
    faults: deque[Fault] = field(default_factory=lambda: deque(maxlen=NUM_FAULTS))
    grid: int | None = None

    def __post_init__(self) -> None:
        self.totals = [Total() for _ in range(self.num_devices)]
        self._series = {INFERENCE: _Series(), BACKWARD: _Series()}
        self._forwards: dict[int, _Part] = {}  # of calls without a backward so far
        self._lock = threading.Lock()

    def add(self, phase: Phase) -> None:
        """Note a phase that is over.

        It takes 2.5 µs with 2 devices and 8 µs with 16, twice in each training step.
        """
        kind, _, shares, start_s, end_s, stretches = phase
        lasted_s = end_s - start_s
        is_call = kind != BACKWARD
        busy_s = [0.0] * self.num_devices
        exchange_s = [0.0] * self.num_devices
        for device, what, since_s, until_s in stretches:
            if what == EXCHANGE:
                exchange_s[device] += until_s - since_s
            else:
                busy_s[device] += until_s - since_s
        with self._lock:
            self.phases.append(phase)
            self.lasted_s += lasted_s
            self.num_calls += is_call
            for total, share, busy, exchange in zip(
                self.totals, shares, busy_s, exchange_s, strict=True
            ):
                total.busy_s += busy
                total.exchange_s += exchange
                if share:  # without one it rests, also between helping the others to exchange
                    total.waiting_s += lasted_s - busy - exchange
                    if is_call:
                        total.num_calls += 1
                        total.num_samples += share
            self._keep(phase, (start_s, lasted_s, busy_s))

    def fault(self, fault: Fault) -> None:
        """Note a fault."""
        with self._lock:
            self.totals[fault.device].num_faults += 1
            self.faults.append(fault)

    def snapshot(self) -> Journal:
        """Give a copy that later calls do not change."""
        with self._lock:
            copy = Journal(self.num_devices, self.num_calls, self.lasted_s)
            copy.totals = [replace(total) for total in self.totals]
            copy.phases = self.phases.copy()
            copy.moments = self.moments.copy()
            copy.faults, copy.grid = self.faults.copy(), self.grid
        return copy

    def _keep(self, phase: Phase, part: _Part) -> None:
        """Keep a call that is over among those of the whole past, if its turn has come."""
        kind, call = phase.kind, phase.call
        if kind == FORWARD:
            self._forwards[call] = part
            if len(self._forwards) > NUM_PHASES:  # of most of these no backward will come
                del self._forwards[next(iter(self._forwards))]
            return
        forward = None
        if kind == BACKWARD:
            forward = self._forwards.pop(call, None)
            if forward is None:  # a second backward
                return
        series = self._series[kind]
        series.num_calls += 1
        if (series.num_calls - 1) % series.every:
            return
        start_s, lasted_s, busy_s = part
        if forward is not None:
            start_s = forward[0]
            lasted_s += forward[1]
            busy_s = list(map(operator.add, forward[2], busy_s))
        self.moments.append(Moment(call, kind, start_s, phase.shares, tuple(busy_s), lasted_s))
        series.num_kept += 1
        if len(self.moments) > NUM_MOMENTS:
            self._thin()

    def _thin(self) -> None:
        """Drop every second one of the kind of calls of which most are kept.

        Each kind is thinned by its own count: where a program trains and infers by turns, every
        second call would be calls of one kind only.
        """
        kind, series = max(self._series.items(), key=lambda item: item[1].num_kept)
        kept, number = [], 0
        for moment in self.moments:
            if moment.kind == kind:
                number += 1
                if number % 2 == 0:
                    continue
            kept.append(moment)
        self.moments = kept
        series.every *= 2
        series.num_kept = (series.num_kept + 1) // 2


# ------------------------------------------------------------------ reading the phases


class Call(NamedTuple):
    """A call that is over, from its phases."""

    number: int
    start_s: float
    shares: tuple[int, ...]
    busy_s: tuple[float, ...]


def calls_of(phases: Iterable[Phase]) -> list[Call]:
    """Give the calls of one kind that are over: those of training, or of inference if none is.

    A call of training is over with its first backward; further ones add to its seconds.
    """
    parts: dict[int, list[Phase]] = {}
    for phase in phases:
        if phase.kind != BACKWARD:
            parts[phase.call] = [phase]
        elif phase.call in parts:  # else its forward is no longer among the latest phases
            parts[phase.call].append(phase)
    trained = [own for own in parts.values() if len(own) > 1]
    inferred = [own for own in parts.values() if own[0].kind == INFERENCE]
    calls = []
    for own in trained or inferred:
        busy_s = [0.0] * len(own[0].shares)
        for phase in own:
            for device, kind, start_s, end_s in phase.stretches:
                if kind != EXCHANGE:
                    busy_s[device] += end_s - start_s
        calls.append(Call(own[0].call, own[0].start_s, own[0].shares, tuple(busy_s)))
    return calls


def intervals_s(calls: Sequence[Call], phases: Iterable[Phase]) -> list[float]:
    """Give the seconds from the start of each call to that of the next, without pauses.

    The calls' own phases always count. What is beside them, the user's code, is a pause if it is
    seldom that long, or if the module was called in another way there: then it counts as what is
    usual.

    Args:
        calls: calls of one kind, the oldest first.
        phases: those of these calls, and any others.
    """
    numbers = {call.number for call in calls}
    starts = [call.start_s for call in calls]
    whole = [end_s - start_s for start_s, end_s in pairwise(starts)]
    if not whole:
        return []
    own = [0.0] * len(whole)
    is_mixed = [False] * len(whole)
    for phase in phases:
        i = bisect_right(starts, phase.start_s) - 1
        if 0 <= i < len(whole):
            if phase.call in numbers:
                own[i] += phase.end_s - phase.start_s
            else:
                is_mixed[i] = True
    rest = [interval_s - own_s for interval_s, own_s in zip(whole, own, strict=True)]
    usual_s = statistics.median(rest)
    long_s = PAUSE * statistics.median(whole)
    # What happens often is no pause: a program that infers before each step of training, or a
    # loader of data that is slow for every eighth batch.
    if 2 * sum(is_mixed) >= len(rest):
        is_mixed = [False] * len(rest)
    is_long = [r > long_s and not mixed for r, mixed in zip(rest, is_mixed, strict=True)]
    if sum(is_long) > max(1, len(rest) // PAUSE_RARITY):
        is_long = [False] * len(rest)
    return [
        own[i] + (min(rest_s, usual_s) if is_long[i] or is_mixed[i] else rest_s)
        for i, rest_s in enumerate(rest)
    ]
