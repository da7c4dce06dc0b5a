"""A seat: the place of a device in a team, whoever sits there, and what was given to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from evener.arena import Region
from evener.member import LOST, Member
from evener.work import Work


@dataclass(eq=False)
class Asked:
    """A message that was posted and not answered yet."""

    message: Any
    holder: Any  # a member, a deputy, or None
    since_s: float
    error: Exception | None = None  # why it could not be sent


@dataclass
class Seat:
    """The place of a device in a team, whoever sits there.

    Attributes:
        number: the device's.
        member: its helper; None while there is none.
        coming: a helper that starts in the background.
        num_deaths: how many helpers it has lost.
        generation: how many helpers have sat here.
        works: the pieces that were given to it and are not over, by the number of the call.
        worked: gets (device, start, end) of each answer.
        regions: those of the pieces' inputs.
        unread: pieces whose inputs no helper reads any more.
    """

    number: int
    worked: list[tuple[int, float, float]]
    member: Member | None = None
    coming: Member | None = None
    num_deaths: int = 0
    generation: int = 0
    works: dict[int, Work] = field(default_factory=dict)
    regions: dict[int, Region] = field(default_factory=dict)
    unread: set[int] = field(default_factory=set)
    asked: deque[Asked] = field(default_factory=deque)

    def send(self, asked: Asked, work: Work | None, *, is_next: bool = False) -> None:
        """Send a message to the member; if that is lost, it is known when the answer is heard.

        Args:
            asked: the message.
            work: the piece that it is about, if any.
            is_next: whether its answer is heard before those of messages that were sent before,
                to a member that has died. Default: no.
        """
        member: Member = asked.holder
        # Until it is sent, no answer comes to what is noted here; an interrupt may come between.
        member.channel.torn = True
        (self.asked.appendleft if is_next else self.asked.append)(asked)
        try:
            member.send(asked.message, None if work is None else work.size)
        except LOST as error:
            asked.error = error.with_traceback(None)  # nor what its frames hold
        member.channel.torn = False

    def hear(
        self, asked: Asked, work: Work | None, attend: Callable[[], bool] | None = None
    ) -> Any:
        """The answer of the member. Until it has come, or will not, it stays what was asked.

        Args:
            asked: what was asked.
            work: the piece that it is about, if any.
            attend: as for :meth:`Channel.receive`.

        Raises:
            ChannelClosedError: if the member has ended.
            ChannelTimeoutError: if it does not answer in time.
        """
        member: Member = asked.holder
        try:
            if asked.error is not None:
                raise asked.error
            reply = member.receive(asked.message, None if work is None else work.size, attend)
        except LOST:
            self.asked.remove(asked)
            raise
        self.asked.remove(asked)
        member.channel.torn = False
        self.worked.append((self.number, reply.start_s, reply.end_s - reply.waited_s))
        for piece in reply.freed:
            self.release(piece)
        return reply.message

    def forget(self, piece: int) -> None:
        """Forget a piece. May be called at any time, by the garbage collector too."""
        work = self.works.pop(piece, None)
        if self.member is not None and work is not None and work.holder is self.member:
            self.member.dropped.append(piece)
        if self.member is None or piece in self.unread:
            self.release(piece)

    def leave(self) -> None:
        """Nobody sits here any more; pieces that are not over wait for who does them again."""
        for work in list(self.works.values()):
            if work.holder is self.member:
                work.holder = None
        self.member = None
        for piece in list(self.regions):
            self.release(piece)

    def release(self, piece: int) -> None:
        """Let the memory of a piece's inputs be used again, unless it may be done again."""
        if piece in self.works:
            self.unread.add(piece)
            return
        self.unread.discard(piece)
        region = self.regions.pop(piece, None)
        if region is not None:
            region.close()
