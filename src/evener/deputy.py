"""A deputy: the main process doing what a device cannot, as that device's helper would do it."""

from __future__ import annotations

from typing import Any

from evener import messages
from evener.arena import Arena
from evener.helper import Helper


class Deputy:
    """Does the work of one piece, in this process, with a replica of its own.

    The user's own module is not touched: it may be in the middle of its own piece.

    Args:
        arena: the team's.
        device: the device it stands in for.
        worked: gets (device, start, end) of what it does.
    """

    def __init__(self, arena: Arena, device: int, worked: list[tuple[int, float, float]]) -> None:
        self._helper = Helper(arena, is_guest=True)
        self._device = device
        self._worked = worked

    def ask(self, message: Any) -> Any:
        """Do what a message says; the answer is a ``Failure`` where the user's module raised."""
        reply = self._helper.answer(messages.Request(message, []))
        self._worked.append((self._device, reply.start_s, reply.end_s))
        return reply.message
