"""Meetings: who is looked after, and how; see also tests/faults/test_matrix.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from evener.arena import Arena
from evener.meeting import Meetings


class FakeRoster:
    def __init__(self) -> None:
        self.spin_s = 0.0
        self.members = [SimpleNamespace(has_ended=False, limit_s=0.0) for _ in range(3)]
        self.seats: list[Any] = [SimpleNamespace(member=member) for member in self.members]


@pytest.fixture
def arena() -> Any:
    arena = Arena()
    yield arena
    arena.close()


def test_one_that_ends_makes_it_fail_and_one_that_leaves_does_not(arena: Arena) -> None:
    roster: Any = FakeRoster()
    roster.members[1].limit_s = roster.members[2].limit_s = 100.0
    meeting = Meetings(roster, arena).begin([0, 1, 2], ["a", "b", "c"], 4)

    assert meeting.attend()
    roster.members[2].has_ended = True
    assert not meeting.attend()
    assert meeting._gather.has_failed


def test_those_that_are_behind_for_too_long_are_late(arena: Arena) -> None:
    roster: Any = FakeRoster()
    meetings = Meetings(roster, arena)
    meeting = meetings.begin([1, 2], ["b", "c"], 4)
    gather = meeting._gather
    gather._words[gather._counts[0]] = 1  # the first is one round ahead

    assert meeting.attend()
    assert not meeting.attend()
    assert meeting._late == {2}
    assert gather.has_failed
    assert not meetings.begin([1, 2], ["b", "c"], 4)._gather.has_failed
