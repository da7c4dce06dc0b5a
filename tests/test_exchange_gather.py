"""The gather: threads of one process stand for the devices."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from evener.arena import Arena, Region
from evener.errors import BranchError, GatherBrokenError
from evener.exchange.gather import Gather, Room, room_bytes


@pytest.fixture
def gathers() -> Iterator[Callable[..., list[Gather]]]:
    arena = Arena()
    made: list[Region] = []

    def make(num: int, capacity: int = 4, attend: Any = None) -> list[Gather]:
        region = arena.take(room_bytes(num, capacity))
        made.append(region)
        labels = tuple(f"cpu:{i}" for i in range(num))
        room = Room(region.offset, region.num_bytes, capacity, labels, 0.001)
        found = [Gather(region, room, i, attend) for i in range(num)]
        found[0].open()
        return found

    yield make
    made.clear()
    arena.close()


def together(*tasks: Callable[[], Any]) -> list[Any]:
    """What each gives, or raises, all at the same time."""
    results: list[Any] = [None] * len(tasks)

    def run(i: int) -> None:
        try:
            results[i] = tasks[i]()
        except Exception as error:  # noqa: BLE001 - is looked at
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_each_gets_the_values_of_all_in_order_round_after_round(
    gathers: Callable[..., list[Gather]],
) -> None:
    found = gathers(3)

    def rounds(i: int) -> list[list[float]]:
        return [
            found[i].all(r, torch.full((2,), 10.0 * r + i).double())[:, 0].tolist()
            for r in range(200)
        ]

    expected = [[10.0 * r, 10.0 * r + 1, 10.0 * r + 2] for r in range(200)]
    assert together(*[lambda i=i: rounds(i) for i in range(3)]) == [expected] * 3


def test_more_values_than_there_is_room_for_come_in_parts(
    gathers: Callable[..., list[Gather]],
) -> None:
    one, other = gathers(2, 4)
    values = torch.arange(11.0).double()

    for found in together(lambda: one.all(0, values), lambda: other.all(0, -values)):
        assert torch.equal(found, torch.stack([values, -values]))


def test_other_labels_and_sizes_are_an_error_on_both(gathers: Callable[..., list[Gather]]) -> None:
    one, other = gathers(2)
    two = torch.zeros(2).double()

    for error in together(lambda: one.all(1, two), lambda: other.all(2, two)):
        assert isinstance(error, BranchError)
    for error in together(lambda: one.all(1, two), lambda: other.all(1, two[:1])):
        assert isinstance(error, BranchError)
        assert "instead of" in str(error)


def test_who_waits_for_one_that_has_left_is_told(gathers: Callable[..., list[Gather]]) -> None:
    one, other = gathers(2)
    other.leave()

    with pytest.raises(BranchError, match="cpu:0 is in 7, and cpu:1 is done without it"):
        one.all(7, torch.zeros(1).double())


def test_a_failure_ends_all_waits_and_opening_forgets_it(
    gathers: Callable[..., list[Gather]],
) -> None:
    calls: list[Gather] = []
    found = gathers(2, attend=lambda: calls.append(found[1]) or found[1].fail())

    with pytest.raises(GatherBrokenError):
        found[0].all(0, torch.zeros(1).double())

    assert calls
    assert found[0].has_failed
    found[0].open()
    assert not found[0].has_failed
    assert found[0].progress() == [(0, False), (0, False)]
