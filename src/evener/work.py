"""Work: a piece as it was given out, which is enough to have it done again.

Whoever does it again, a new helper, the same helper in portions, or the main process, is sent the
same messages as the first time. Inputs still lie in the arena, the seed is the same, so the same
numbers come out, bit for bit, and go to the same places::

    (inputs   once more into the arena, if a forward may have changed them in place)
    Load      a replica as the module was before the call
    Forward   as the first time                               ──► outputs, if these were lost
    Write, or Backward, as the first time                     ──► the answer that did not come
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from evener import messages
from evener.portions import Split
from evener.trees import Structure, structure_to_bytes
from evener.update import Update

#: Sends a message to whoever is to do the work, and gives the answer.
Ask: TypeAlias = Callable[[Any], Any]


@dataclass
class Work:
    """A piece that a device was given.

    Attributes:
        forward: its message.
        structure: the structure of its inputs.
        split: how it is split; into one portion at first.
        load: makes what the replica has to be told first; see :meth:`Mirror.load`.
        renew: puts the inputs into the arena anew; told whether the call's forward is over.
        is_dirty: whether a forward has changed the inputs in the arena; it may, until it has
            answered.
        holder: who has run its forward; None if nobody has it any more.
        backward: the message of its last backward.
        num_deaths: how many helpers it may have ended.
        meeting: where its device meets others; None if it is a device's own affair.
    """

    forward: messages.Forward
    structure: Structure
    split: Split
    load: Callable[[], tuple[messages.Load, Update]]
    renew: Callable[..., None]
    is_dirty: bool = True
    holder: Any = None
    backward: messages.Backward | None = None
    num_deaths: int = 0
    meeting: Any = None

    @property
    def is_split(self) -> bool:
        """Whether it is too large for its device."""
        return self.split.most < self.split.size

    @property
    def size(self) -> tuple[int, int]:
        """What makes the work new to a device: samples, and bytes of the inputs."""
        return self.split.size, self.forward.span.num_bytes

    def halve(self) -> None:
        """Run it in portions half as large."""
        self.split = replace(self.split, most=-(-self.split.most // 2))

    def make_whole(self) -> None:
        """Run it as one piece."""
        self.split = replace(self.split, most=self.split.size)

    def again(self, message: Any, ask: Ask) -> Any:
        """Have it done again.

        Args:
            message: what was asked last: its Forward, Write or Backward.
            ask: speaks with whoever does it.

        Returns:
            The answer to ``message``; a ``Failure`` if anything before it failed.
        """
        load, update = self.load()
        if self.is_dirty:
            self.renew(is_over=isinstance(message, messages.Backward))
        self.is_dirty = True
        answer = ask(replace(load, keeps_pieces=True))
        is_forward = isinstance(message, messages.Forward)
        if not isinstance(answer, messages.Failure):
            answer = ask(
                replace(
                    self.forward,
                    update=update,
                    structure=structure_to_bytes(self.structure),
                    lead=self.forward.lead and is_forward,
                    split=self.split if self.is_split else None,
                    deferred=self.is_split and isinstance(message, messages.Backward),
                )
            )
        if isinstance(answer, messages.Outputs):
            self.is_dirty = answer.dirty
        if is_forward or isinstance(answer, messages.Failure):
            return answer
        return ask(message)
