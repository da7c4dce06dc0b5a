"""The team: the devices of one parallel module, and the helpers that drive all but the first.

::

    main process ── device 0        the user's own process
      │  channel ── helper ── device 1
      └─ channel ── helper ── device 2
           arena: one memory for all

A request is posted to a device and answered by one reply, whatever happens to its helper. If that
dies, hangs or has no memory left, what was asked is done again (see ``recovery``), and a new
helper starts in the background (see ``roster``)::

    post ──► helper ──✗
    receive ◄── the same answer ◄── the main process, or another helper

A call that is interrupted may leave requests unanswered; :meth:`Team.settle`, at the start of the
next call, waits for them and forgets the answers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from evener import messages
from evener.arena import Arena, Region
from evener.deputy import Deputy
from evener.devices import Device
from evener.faults import Faults
from evener.journal import Journal
from evener.meeting import DisturbedError, Meeting, Meetings
from evener.member import LOST, Member
from evener.recovery import Recovery
from evener.roster import Roster
from evener.seat import Asked
from evener.work import Work

#: The first pieces of a new helper take longer than usual.
WARM_PIECES = 2


class Team:
    """Starts helpers, and speaks with them.

    Args:
        devices: the devices, two or more; the first is the main process's.
        timeout_s: how long one answer may take. Default: it follows what was measured.
        faults: is told of those that fail. Default: nobody is.

    Attributes:
        devices: the devices.
        arena: the shared memory.
        is_running: false once the helpers have been stopped.
        worked: (device, start, end) of each answer, in seconds of ``time.perf_counter``, since
            the list was last cleared.
        faults: what is to be done, and told, about devices that fail.

    Raises:
        HelperStartError: if a helper does not start.
        ArenaError: if there is no shared memory.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        timeout_s: float | None = None,
        faults: Faults | None = None,
    ) -> None:
        self.devices = list(devices)
        self.is_running = True
        self.worked: list[tuple[int, float, float]] = []
        self.faults = faults or Faults(self.devices, Journal(len(devices)), restarts=0)
        self._main_pid = os.getpid()
        self.arena = Arena()
        try:
            self._roster = Roster(self.devices, self.arena, self.faults, timeout_s, self.worked)
        except BaseException:
            self.arena.close()
            raise
        self._seats = self._roster.seats
        self._recovery = Recovery(self._roster, self.faults, self.arena)
        self._meetings = Meetings(self._roster, self.arena)

    # -------------------------------------------------------------- speaking

    def post(
        self,
        device: int,
        message: Any,
        work: Work | None = None,
        meeting: Meeting | None = None,
    ) -> None:
        """Send a request to a device; every post is followed by one receive.

        Args:
            device: its number.
            message: the request's message.
            work: with a Forward, what it takes to have it done again.
            meeting: with a Forward or a Backward, where the device meets others: then nothing of
                it is done again, but reading the answer is an error. Default: nowhere.
        """
        seat = self._seats[device]
        holder: Any = seat.member if device else None
        if work is not None:
            seat.works[message.piece] = work
            work.holder = holder
            if seat.member is not None:
                seat.member.num_pieces += 1
        elif isinstance(message, (messages.Write, messages.Backward)):
            work = seat.works.get(message.piece)
            if work is not None:
                holder = work.holder
        if work is not None and isinstance(message, messages.Backward):
            work.backward = message
            if work.is_split:  # its forward is run with it, from the start
                holder = None
        if work is not None and meeting is not None:
            work.meeting = meeting
        asked = Asked(message, holder, time.perf_counter())
        if isinstance(holder, Member):
            seat.send(asked, work)
        else:
            seat.asked.append(asked)

    def receive(self, device: int) -> Any:
        """Wait for the answer to the last request to a device.

        Returns:
            The reply's message. A ``Failure`` is returned, not raised, so that the answers of the
            other devices can be received first; ``Lost`` where a sum was not finished.

        Raises:
            HelperDiedError: if the helper has died, and what was asked cannot be done again.
            DisturbedError: if the device could not do its part, and others wait for it.
        """
        seat = self._seats[device]
        asked = seat.asked[0]
        work = seat.works.get(getattr(asked.message, "piece", 0))
        if work is not None and work.meeting is not None:
            return work.meeting.receive(device)
        error: Exception | None = None
        answer: Any = None
        if asked.holder is not None and asked.holder is seat.member:
            try:
                answer = seat.hear(asked, work)
            except LOST as lost:
                # A frame that holds an error that holds the frame would hold the call, too.
                error = lost.with_traceback(None)
        else:
            seat.asked.popleft()
            if isinstance(asked.holder, Deputy):
                answer = asked.holder.ask(asked.message)
        if work is not None and isinstance(answer, messages.Outputs):
            work.is_dirty = answer.dirty
        if answer is None:
            return self._recovery.after_death(seat, asked, work, error)
        if isinstance(answer, messages.Failure) and answer.is_memory and work is not None:
            return self._recovery.without_memory(seat, asked, work, answer)
        return answer

    def meet(self, devices: Sequence[int], capacity: int) -> Meeting:
        """Begin a meeting of devices; see :meth:`Meetings.begin`."""
        return self._meetings.begin(devices, [self.devices[i].label for i in devices], capacity)

    def smaller(
        self, device: int, work: Work, message: Any, failure: messages.Failure | None
    ) -> Any:
        """The answer of the main process's own device, which has no memory for so much.

        Args:
            device: its number.
            work: the piece.
            message: the Forward or Backward that it failed in.
            failure: how it failed; None if it is known not to have the memory, and did not try.
        """
        seat = self._seats[device]
        seat.works[work.forward.piece] = work
        asked = Asked(message, None, time.perf_counter())
        if failure is None:
            answer = self._recovery.after_death(seat, asked, work, None)
            if not (isinstance(answer, messages.Failure) and answer.is_memory):
                return answer
            failure = answer
        return self._recovery.without_memory(seat, asked, work, failure)

    def collect(self, devices: Iterable[int]) -> dict[int, Any]:
        """Receive the answers of several devices of which nothing but success is expected.

        Returns:
            The answer of each.

        Raises:
            BaseException: what a helper answered with, the first one's, when all have answered.
        """
        answers = {device: self.receive(device) for device in devices}
        for device, answer in answers.items():
            if isinstance(answer, messages.Failure):
                raise self.error_of(device, answer)
        return answers

    def repeat_backward(self, device: int, piece: int, target: Region) -> None:
        """Run the last backward of a device's piece once more, here, for other memory.

        Args:
            device: its number.
            piece: that of the call.
            target: where the gradients of the shared tensors go.

        Raises:
            DisturbedError: if it cannot be run without others.
        """
        work = self._seats[device].works[piece]
        if work.meeting is not None:
            raise DisturbedError(device)
        assert work.backward is not None  # noqa: S101 - it has just been
        message = replace(work.backward, target=messages.Span(target.offset, target.num_bytes))
        answer = work.again(message, self._recovery.deputy(self._seats[device]).ask)
        if isinstance(answer, messages.Failure):
            raise self.error_of(device, answer)

    def settle(self) -> list[tuple[int, Any]]:
        """Receive what an interrupted call has left unanswered.

        Returns:
            (device, answer) for each.
        """
        seats = self._seats[1:]
        return [(seat.number, each) for seat in seats for each in self._roster.settle(seat)]

    def keep(self, device: int, piece: int, region: Region) -> None:
        """Keep the region of a piece's inputs until nobody reads them any more."""
        self._seats[device].regions[piece] = region

    def drop(self, devices: Iterable[int], piece: int) -> None:
        """Let devices forget a piece. May be called at any time, by the garbage collector too."""
        if self.is_running and os.getpid() == self._main_pid:
            for device in devices:
                self._seats[device].forget(piece)

    def error_of(self, device: int, failure: messages.Failure) -> BaseException:
        """The exception of a device, with the helper's traceback as its cause."""
        return failure.error(self.devices[device].label)

    # -------------------------------------------------------------- who is there

    @property
    def present(self) -> list[bool]:
        """Which devices can be given work."""
        return [seat.member is not None or not seat.number for seat in self._seats]

    @property
    def expected(self) -> list[bool]:
        """Which devices have a helper, or will have one."""
        seats = self._seats
        return [s.member is not None or s.coming is not None or not s.number for s in seats]

    @property
    def is_warming(self) -> bool:
        """Whether a helper has so little experience that its times do not tell how fast it is."""
        new = [seat.member for seat in self._seats if seat.num_deaths]
        return any(each is not None and each.num_pieces <= WARM_PIECES for each in new)

    def holds(self, device: int, piece: int) -> bool:
        """Whether a device's helper is the one that has run the forward of its piece."""
        seat = self._seats[device]
        work = seat.works.get(piece)
        return work is not None and seat.member is not None and work.holder is seat.member

    def summon(self, devices: Iterable[int]) -> bool:
        """See that devices have helpers now; tells whether they all do."""
        return all([self._roster.summon(self._seats[device]) for device in devices])  # noqa: C419 - each of them

    def unload(self) -> None:
        """Let all be sent the module anew: it is not what they have followed it to."""
        for seat in self._seats:
            if seat.member is not None:
                seat.member.is_loaded = False

    def generation(self, device: int) -> int:
        """How many helpers a device has had: what one was told the next does not know."""
        return self._seats[device].generation

    def tend(self) -> None:
        """Look after the helpers between two calls: those that died, and those that come."""
        self._roster.tend()

    def load(self, load: Callable[[], messages.Load], *, everybody: bool) -> None:
        """Send the module to helpers: to all, or to those that have no replica that is right.

        Args:
            load: makes the message.
            everybody: whether to all.

        Raises:
            BaseException: what a helper answered with.
        """
        seated = [(seat.number, seat.member) for seat in self._seats if seat.member is not None]
        to_load = [(i, each) for i, each in seated if everybody or not each.is_loaded]
        to_rehearse = self._roster.who_is_there()
        if not to_load and not to_rehearse:
            return
        message = load()
        self._roster.rehearse(to_rehearse, message)
        for device, _ in to_load:
            self.post(device, message)
        self.collect(device for device, _ in to_load)
        for _, member in to_load:
            member.is_loaded, member.num_pieces = True, 0

    def stop(self) -> None:
        """End all helpers. Does nothing where they have ended, or in a forked process."""
        if not self.is_running or os.getpid() != self._main_pid:
            return
        self.is_running = False
        self._roster.stop()
        self.arena.close()
