"""The roster: who sits in a team's seats, from the first start to the last end.

A seat whose helper has died gets another one, a limited number of times. It starts in the
background and costs nobody time::

    starting ──► there ──► rehearsing ──► seated
     (imports    (has       (imports what   (is sent the module once more,
      torch)      said so)   the module      which is quick now, and works)
                             needs)
"""

from __future__ import annotations

import select
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from evener.arena import Arena
from evener.channel import ChannelClosedError, ChannelTimeoutError
from evener.devices import Device
from evener.errors import HelperStartError
from evener.faults import Faults
from evener.member import LOST, START_TIMEOUT_S, STOP_TIMEOUT_S, Cause, Member
from evener.seat import Seat

#: How long a wait looks before it sleeps. It bridges a user's optimizer step on a small model.
SPIN_S = 0.002
NOTHING_LOST = "nothing was lost"


class Roster:
    """Starts helpers, notices their end, and replaces them.

    Args:
        devices: the devices; the first is the main process's.
        arena: the team's.
        faults: is told of those that end by themselves.
        timeout_s: how long one answer may take. Default: it follows what was measured.
        worked: gets (device, start, end) of each answer.

    Attributes:
        seats: one for each device.
        spin_s: how long a wait looks before it sleeps.

    Raises:
        HelperStartError: if a helper does not start.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        arena: Arena,
        faults: Faults,
        timeout_s: float | None,
        worked: list[tuple[int, float, float]],
    ) -> None:
        self.seats = [Seat(i, worked) for i in range(len(devices))]
        self._devices = devices
        self._arena = arena
        self._faults = faults
        self._timeout_s = timeout_s
        used: list[int] = [core for device in devices for core in device.cores]
        # Who shares a core with another device must not keep it busy by looking.
        self.spin_s = SPIN_S if len(used) == len(set(used)) else 0.0
        self._deaths = select.poll()
        try:
            for seat in self.seats[1:]:
                seat.coming = self._start(seat)
            for seat in self.seats[1:]:
                self._await_first(seat)
        except BaseException:
            self.stop()
            raise

    def tend(self) -> None:
        """Look after the helpers between two calls: those that died, and those that come."""
        for fd, _ in self._deaths.poll(0):
            for seat in self.seats:
                if seat.member is not None and seat.member.pidfd == fd:
                    since_s = time.perf_counter()
                    self.note(seat, "idle", self.bury(seat, ChannelClosedError()), since_s)
        for seat in self.seats[1:]:
            if seat.member is not None and seat.member.is_extra:
                self.dismiss(seat)
            elif seat.member is not None:
                seat.member.look()
            elif seat.coming is not None:
                self._welcome(seat, seat.coming)
            else:
                self._start_again(seat)  # if an interrupt came before it was started

    def bury(self, seat: Seat, error: Exception) -> Cause:
        """End what is left of a helper, and let another one come.

        Args:
            seat: its seat.
            error: how its end was noticed.
        """
        member = seat.member
        assert member is not None  # noqa: S101 - it sat there
        self._leave(seat, member)
        cause = member.bury(error)
        self._replace(seat)
        return cause

    def dismiss(self, seat: Seat) -> None:
        """End a helper that can no longer be spoken with; it is no fault of its."""
        member = seat.member
        assert member is not None  # noqa: S101 - it sat there
        self._leave(seat, member)
        member.kill()
        member.dismiss()
        self._start_again(seat)

    def await_coming(self, seat: Seat) -> Member | None:
        """Wait for the helper that starts for a seat; None if none comes."""
        while seat.coming is not None:
            member = seat.coming
            try:
                if member.stage != "there":
                    member.await_start()
            except LOST as error:
                self._give_up(seat, member, error)
                continue
            return self._sit_down(seat, member)
        return None

    def summon(self, seat: Seat) -> bool:
        """See that a helper sits there now, for a call that cannot end without it.

        Where there were too many deaths, it gets one that ends with the call; see :meth:`tend`.

        Returns:
            Whether one does.
        """
        if seat.member is None and self.await_coming(seat) is None and self._arena.fd >= 0:
            with suppress(HelperStartError):
                seat.coming = self._start(seat)
            member = self.await_coming(seat)
            if member is not None:
                member.is_extra = seat.num_deaths > self._faults.restarts
        return seat.member is not None

    def settle(self, seat: Seat) -> list[Any]:
        """Receive what an interrupted call has left unanswered in a seat; gives the answers."""
        answers = []
        channel = None if seat.member is None else seat.member.channel
        if channel is not None and (channel.broken or channel.torn):
            self.dismiss(seat)  # a message was interrupted halfway
        while seat.asked:
            asked = seat.asked[0]
            if seat.member is None or asked.holder is not seat.member:
                seat.asked.popleft()
                continue
            try:
                answers.append(seat.hear(asked, None))
            except LOST as error:
                since_s = time.perf_counter()
                self.note(seat, "idle", self.bury(seat, error), since_s)
        return answers

    def who_is_there(self) -> list[Member]:
        """The helpers that have started, and do not know the module yet."""
        coming = [seat.coming for seat in self.seats if seat.coming is not None]
        return [member for member in coming if member.stage == "there"]

    def rehearse(self, members: Sequence[Member], message: Any) -> None:
        """Let helpers import what the module needs, which may take seconds, while others work."""
        for member in members:
            member.stage = "rehearsing"
            with suppress(*LOST):  # seen at the next call
                member.send(message)

    def note(
        self, seat: Seat, phase: str, cause: Cause, since_s: float, action: str = NOTHING_LOST
    ) -> None:
        """Note the end of a helper, and what becomes of its seat.

        Args:
            seat: its seat.
            phase: what it had to do.
            cause: what happened to it.
            since_s: when its cost began, in seconds of ``time.perf_counter``.
            action: what was done.
        """
        who = f"the helper of {self._devices[seat.number].label} (process {cause.pid})"
        num, most = seat.num_deaths, self._faults.restarts
        if seat.coming is not None or (seat.member is not None and not seat.member.is_extra):
            action += f"; a new helper starts (restart {num} of {most})"
        else:
            action += f"; the device gets no new helper (restarts={most}) and is left out"
        self._faults.note(seat.number, phase, cause.text, action, since_s=since_s, who=who)

    def stop(self) -> None:
        """End all helpers."""
        members = [each for s in self.seats for each in (s.member, s.coming) if each is not None]
        busy = {id(asked.holder) for seat in self.seats for asked in seat.asked}
        for member in members:
            member.dismiss()
        end_s = time.monotonic() + STOP_TIMEOUT_S
        for member in members:
            # One that computes, starts, or hangs, does not see that the channel is closed.
            is_idle = id(member) not in busy and member.stage == "seated"
            member.finish(end_s - time.monotonic() if is_idle else 0.0)

    # -------------------------------------------------------------- coming and going

    def _start(self, seat: Seat) -> Member:
        device = self._devices[seat.number]
        return Member(device, self._arena.fd, self.spin_s, self._timeout_s)

    def _await_first(self, seat: Seat) -> None:
        """Wait for a helper of a new team. One that a signal has ended gets another try."""
        member, since_s = seat.coming, time.perf_counter()
        assert member is not None  # noqa: S101 - it was started
        try:
            member.await_start()
        except LOST as error:
            cause = member.bury(error)
            seat.coming = None
            if not cause.is_signal:
                raise HelperStartError(
                    f"the helper of {member.device.label} did not start: it {cause.text}; what it "
                    "printed stands above"
                ) from None
            self._replace(seat)
            self.note(seat, "start", cause, since_s)
        else:
            self._sit_down(seat, member)

    def _welcome(self, seat: Seat, member: Member) -> None:
        """See how far a coming helper is."""
        if member.channel.broken:  # a message to it was interrupted halfway
            member.kill()
            member.dismiss()
            seat.coming = None
            self._start_again(seat)
        if seat.coming is not member or member.stage == "there":
            return
        try:
            member.await_start(0.0)
        except ChannelTimeoutError as error:
            if time.monotonic() > member.started_s + START_TIMEOUT_S:
                self._give_up(seat, member, error)
        except ChannelClosedError as error:
            self._give_up(seat, member, error)
        else:
            if member.stage == "rehearsing":
                self._sit_down(seat, member)
            else:
                member.stage = "there"

    def _give_up(self, seat: Seat, member: Member, error: Exception) -> None:
        """A helper that was to come did not."""
        since_s = time.perf_counter()
        cause = member.bury(error)
        seat.coming = None
        self._replace(seat)
        self.note(seat, "start", cause, since_s)

    def _replace(self, seat: Seat) -> None:
        """Let another helper come after a death."""
        seat.num_deaths += 1
        self._start_again(seat)

    def _start_again(self, seat: Seat) -> None:
        """Start a helper in the background, unless there were too many deaths."""
        while seat.num_deaths <= self._faults.restarts and self._arena.fd >= 0:
            try:
                seat.coming = self._start(seat)
            except HelperStartError as error:
                seat.num_deaths += 1
                since_s = time.perf_counter()
                self._faults.note(seat.number, "start", str(error), NOTHING_LOST, since_s=since_s)
            else:
                return

    def _sit_down(self, seat: Seat, member: Member) -> Member:
        seat.member, seat.coming = member, None
        seat.generation += 1
        member.stage = "seated"
        if member.pidfd >= 0:
            self._deaths.register(member.pidfd, select.POLLIN)
        return member

    def _leave(self, seat: Seat, member: Member) -> None:
        if member.pidfd >= 0:
            self._deaths.unregister(member.pidfd)
        seat.leave()
