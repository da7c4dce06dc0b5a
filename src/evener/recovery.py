"""Recovery: what a device was asked and did not do, is done again.

::

    died, and its piece may be the reason    a new helper does it; a piece that ends two of them
      (a crash, an exit, a hang)             is an error: it would end the main process, too
    died of something else                   the main process does it, at once
    no memory for so many samples            the same device does it in portions; the device is
                                             not given so many again
    no memory for one sample                 the main process does it; the device is left out
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from evener import messages
from evener.arena import Arena
from evener.deputy import Deputy
from evener.errors import HelperDiedError, SampleTooLargeError
from evener.faults import Faults
from evener.member import LOST, Cause, Member
from evener.roster import NOTHING_LOST, Roster
from evener.seat import Asked, Seat
from evener.work import Ask, Work

#: What a device does for each message, for whoever reads of it.
PHASES = {
    messages.Load: "load",
    messages.Follow: "load",
    messages.Forward: "forward",
    messages.Write: "output",
    messages.Backward: "backward",
    messages.Reduce: "exchange",
    messages.Read: "read",
}


class Recovery:
    """Has things done again.

    Args:
        roster: the team's.
        faults: the team's.
        arena: the team's.
    """

    def __init__(self, roster: Roster, faults: Faults, arena: Arena) -> None:
        self._roster = roster
        self._faults = faults
        self._arena = arena

    def deputy(self, seat: Seat) -> Deputy:
        """Somebody here who works for the device of a seat."""
        return Deputy(self._arena, seat.number, seat.worked)

    def after_death(
        self, seat: Seat, asked: Asked, work: Work | None, error: Exception | None
    ) -> Any:
        """Give the answer that a helper owes.

        Args:
            seat: its seat.
            asked: what it was asked.
            work: the piece that it was asked about.
            error: how its end was noticed just now; None if it has been known.

        Raises:
            HelperDiedError: if it cannot be done again.
            SampleTooLargeError: if there is no memory for one sample.
        """
        phase = PHASES[type(asked.message)]
        while True:
            cause = None
            if error is not None:
                since_s = time.perf_counter()
                cause = self._roster.bury(seat, error)
                since_s = asked.since_s if cause.has_waited else since_s
                note = partial(self._roster.note, seat, phase, cause, since_s)
            try:
                answer, action = self._again(seat, asked, work, cause)
            except LOST as another:
                error = another.with_traceback(None)
                if cause is not None:
                    note(NOTHING_LOST)
                continue
            except HelperDiedError:
                if cause is not None:
                    note("the call is lost")
                raise
            if cause is not None:
                note(action)
            return answer

    def without_memory(
        self, seat: Seat, asked: Asked, work: Work, failure: messages.Failure
    ) -> Any:
        """Give the answer of a device that has no memory for so much.

        Args:
            seat: its seat.
            asked: what it was asked.
            work: the piece that it was asked about.
            failure: what it answered.

        Raises:
            HelperDiedError: if it dies, and it cannot be done again.
            SampleTooLargeError: if there is no memory for one sample.
        """
        since_s = time.perf_counter()
        member = seat.member
        ask = (
            self._delegate(seat, work).ask if member is None else self._speaker(seat, member, work)
        )
        try:
            answer = self._smaller(seat, asked, work, failure, ask)
        except LOST as error:
            return self.after_death(seat, asked, work, error)
        if member is not None:
            member.is_loaded = False  # it has followed the module back to that call
        cap = self._faults.caps[seat.number]
        who = "the main process" if isinstance(work.holder, Deputy) and seat.number else "it"
        self._faults.note(
            seat.number,
            PHASES[type(asked.message)],
            f"had no memory for {work.split.size} samples ({failure.summary})",
            f"{who} computed them{_portions(work)}; "
            + (f"it gets no more than {cap} from now on" if cap else "it is left out"),
            since_s=since_s,
        )
        return answer

    def _again(
        self, seat: Seat, asked: Asked, work: Work | None, cause: Cause | None
    ) -> tuple[Any, str]:
        """The answer, and what was done for it."""
        message = asked.message
        label = self._faults.label(seat.number)
        if isinstance(message, (messages.Load, messages.Follow)):
            return messages.Done(), NOTHING_LOST
        if isinstance(message, messages.Reduce):
            return messages.Lost(), "the sum was finished without it"
        if work is None:
            raise HelperDiedError(
                f"the helper of {label} has died, and what it was asked "
                f"({type(message).__name__}) cannot be done by others"
            )
        if cause is not None and cause.is_memory:
            work.halve()
            self._faults.limit(seat.number, work.split.most)
        ask, who = self._choose(seat, work, cause)
        answer = work.again(message, ask)
        if isinstance(answer, messages.Failure) and answer.is_memory:
            answer = self._smaller(seat, asked, work, answer, ask)
        return answer, f"its {work.split.size} samples were computed by {who}{_portions(work)}"

    def _choose(self, seat: Seat, work: Work, cause: Cause | None) -> tuple[Ask, str]:
        """Who does a work again."""
        if cause is None and seat.member is not None and work.holder is seat.member:
            seat.member.is_loaded = False  # it follows the module back to that call
            return self._speaker(seat, seat.member, work), "the same helper"
        if cause is not None and cause.is_own:
            work.num_deaths += 1
            if work.num_deaths > 1:
                raise HelperDiedError(
                    f"a piece of {work.split.size} samples has ended two helpers of "
                    f"{self._faults.label(seat.number)}, and would end this process: the second "
                    f"{cause.text}; the module works on, with gradients as before the call"
                )
            member = self._roster.await_coming(seat)
            if member is not None:
                work.holder = member
                return self._speaker(seat, member, work), "a new helper"
        return self._delegate(seat, work).ask, "the main process"

    def _smaller(
        self, seat: Seat, asked: Asked, work: Work, failure: messages.Failure, ask: Ask
    ) -> Any:
        """The answer of a device that has too little memory, in smaller and smaller portions."""
        while failure.is_memory:
            number = 0 if isinstance(work.holder, Deputy) else seat.number
            if work.split.most > 1:
                work.halve()
                self._faults.limit(number, work.split.most)
            elif number:
                # Its outputs do not fit, or not even one sample: then it is of no use.
                self._faults.limit(number, min(1, work.split.size - 1))
                work.make_whole()
                ask = self._delegate(seat, work).ask
            else:
                label = self._faults.label(0)
                raise SampleTooLargeError(
                    f"one sample does not fit in the memory of {label}: {failure.summary}; make "
                    "the model or the sample smaller"
                ) from failure.error(label)
            answer = work.again(asked.message, ask)
            if not isinstance(answer, messages.Failure):
                return answer
            failure = answer
        return failure

    def _delegate(self, seat: Seat, work: Work) -> Deputy:
        deputy = work.holder = self.deputy(seat)
        return deputy

    def _speaker(self, seat: Seat, member: Member, work: Work) -> Ask:
        def ask(message: Any) -> Any:
            asked = Asked(message, member, time.perf_counter())
            seat.send(asked, work, is_next=True)
            return seat.hear(asked, work)

        return ask


def _portions(work: Work) -> str:
    return f" in portions of {work.split.most}" if work.is_split else ""
