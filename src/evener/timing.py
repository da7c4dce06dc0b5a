"""The timing of a call: a stop watch for its phases, for the journal and the balance. No torch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from evener.journal import EXCHANGE, FORWARD, Journal, Phase, Stretch


class Timing:
    """Times one call: begin a phase, tell what is done in it, end it.

    A phase that fails is not ended, and not noted.

    Args:
        journal: gets each phase when it is over.
        call: the number of the call.
        shares: what each device has.

    Attributes:
        shares: what each device has.
        busy_s: seconds of forward and backward on each device.
        lags_s: seconds from the start of the phases to each device's own start, together.
        lasted_s: seconds of the phases.
        num_phases: how many are over.
        kind: of the phase that runs.
        num_faults: how many faults there were before it, for who wants to know.
        waited_s: seconds that the first device's piece has waited for other devices.
    """

    def __init__(self, journal: Journal, call: int, shares: Sequence[int]) -> None:
        self._journal = journal
        self._call = call
        self._start_s = 0.0
        self._stretches: list[Stretch] = []
        self._worked: list[tuple[int, float, float]] = []
        self.kind = FORWARD
        self.shares = tuple(shares)
        self.busy_s = [0.0] * len(self.shares)
        self.lags_s = [0.0] * len(self.shares)
        self.lasted_s = 0.0
        self.num_phases = 0
        self.num_faults = 0
        self.waited_s = 0.0

    def begin(self, kind: str, worked: list[tuple[int, float, float]]) -> None:
        """Begin a phase now.

        Args:
            kind: ``INFERENCE``, ``FORWARD`` or ``BACKWARD``.
            worked: where (device, start, end) of what helpers do will appear. It is emptied.
        """
        self.kind = kind
        self._stretches = []
        self._worked = worked
        worked.clear()
        self._start_s = time.perf_counter()

    def prepared(self, kind: str) -> None:
        """All is ready for the pieces: this is the kind of the phase, and no piece was run yet."""
        self.kind = kind
        self._worked.clear()  # a new replica, for example

    @contextmanager
    def own_piece(self) -> Iterator[None]:
        """The first device runs its piece; what it did before was to send the others theirs."""
        start_s = time.perf_counter()
        self._stretches.append(Stretch(0, EXCHANGE, self._start_s, start_s))
        self.waited_s = 0.0
        yield
        self._piece(0, start_s, time.perf_counter() - self.waited_s)

    def pieces(self) -> None:
        """What helpers have done was to run their pieces."""
        for device, start_s, end_s in self._worked:
            self._piece(device, start_s, end_s)
        self._worked.clear()

    @contextmanager
    def joining(self) -> Iterator[None]:
        """The first device joins what the others have sent, and they help with it."""
        self._worked.clear()
        start_s = time.perf_counter()
        yield
        self._stretches += [Stretch(device, EXCHANGE, *times) for device, *times in self._worked]
        self._stretches.append(Stretch(0, EXCHANGE, start_s, time.perf_counter()))

    def end(self) -> None:
        """End the phase now."""
        end_s = time.perf_counter()
        self.lasted_s += end_s - self._start_s
        self.num_phases += 1
        stretches = tuple(self._stretches)
        self._journal.add(
            Phase(self.kind, self._call, self.shares, self._start_s, end_s, stretches)
        )

    def _piece(self, device: int, start_s: float, end_s: float) -> None:
        self._stretches.append(Stretch(device, self.kind, start_s, end_s))
        self.busy_s[device] += end_s - start_s
        self.lags_s[device] += start_s - self._start_s
