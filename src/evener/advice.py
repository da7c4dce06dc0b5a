"""Advice: shares that a caller was told before the call. No torch.

A caller who cuts a batch by itself first asks how, and then calls with what it was told. That call
is the one that the policy has chosen for: a measurement, or a trial, is not lost. To ask again
before it changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from evener.shares import Choice


class Advice:
    """What callers were told, each until a call of its kind."""

    def __init__(self) -> None:
        self._told: dict[Hashable, Choice] = {}

    def ask(self, kind: Hashable, choose: Callable[[], Choice]) -> tuple[int, ...]:
        """The shares for the next call of a kind.

        Args:
            kind: such as its batch size and whether a backward follows.
            choose: makes the choice, if there is none yet.
        """
        if kind not in self._told:
            self._told = {kind: choose()}  # whoever asks for another kind has gone on
        return self._told[kind].shares

    def follow(self, kind: Hashable, shares: Sequence[int]) -> Choice:
        """The choice for a call with these shares: the one that was told, if it is followed."""
        told = self._told.pop(kind, None)
        if told is not None and told.shares == tuple(shares):
            return told
        return Choice(tuple(shares), measured=False)
