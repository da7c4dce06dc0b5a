"""The stop watch of a call."""

from __future__ import annotations

import time

import pytest

from evener.journal import BACKWARD, EXCHANGE, FORWARD, Journal
from evener.timing import Timing


def test_it_times_the_phases_of_a_call() -> None:
    journal = Journal(2)
    timing = Timing(journal, 3, [4, 2])
    worked: list[tuple[int, float, float]] = [(1, 0.0, 99.0)]  # of an earlier call

    for kind in (FORWARD, BACKWARD):
        timing.begin(kind, worked)
        assert worked == []
        with timing.own_piece():
            now = time.perf_counter()
            worked.append((1, now, now + 1.0))
        timing.pieces()
        with timing.joining():
            worked.append((1, now + 1.0, now + 1.5))
        timing.end()

    assert timing.num_phases == 2
    assert timing.busy_s[1] == pytest.approx(2.0)
    assert timing.busy_s[0] > 0
    assert [phase.kind for phase in journal.phases] == [FORWARD, BACKWARD]
    for phase in journal.phases:
        assert (phase.call, phase.shares) == (3, (4, 2))
        assert [(stretch.device, stretch.kind) for stretch in phase.stretches] == [
            (0, EXCHANGE),
            (0, phase.kind),
            (1, phase.kind),
            (1, EXCHANGE),
            (0, EXCHANGE),
        ]
    assert timing.lasted_s == pytest.approx(journal.lasted_s)


def test_a_phase_that_fails_is_not_noted() -> None:
    journal = Journal(1)
    timing = Timing(journal, 1, [4])
    timing.begin(FORWARD, [])

    with pytest.raises(ZeroDivisionError), timing.own_piece():
        1 / 0  # noqa: B018
    timing.begin(FORWARD, [])
    with timing.own_piece():
        pass
    timing.end()

    assert timing.num_phases == 1
    assert len(journal.phases[0].stretches) == 2
