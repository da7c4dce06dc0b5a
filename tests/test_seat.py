"""A seat: inputs of a piece stay as long as anybody may read them, and what is known who asked."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evener.arena import Arena, put
from evener.channel import ChannelClosedError
from evener.messages import Done, Reply
from evener.seat import Asked, Seat


class FakeMember:
    """Answers as it is told to."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.dropped: list[int] = []
        self.channel = SimpleNamespace(torn=True)

    def receive(self, message: Any, size: Any, _attend: Any) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer


@pytest.fixture
def seat() -> Iterator[Seat]:
    """A seat with a member, who holds piece 7."""
    arena = Arena()
    seat = Seat(1, [])
    seat.member = FakeMember()  # type: ignore[assignment]
    seat.works[7] = SimpleNamespace(holder=seat.member, size=(2, 8))  # type: ignore[assignment]
    _, seat.regions[7] = put(arena, [torch.ones(2)])
    yield seat
    seat.regions.clear()
    arena.close()


def test_inputs_are_free_when_the_piece_is_forgotten_and_the_helper_reads_them_no_more(
    seat: Seat,
) -> None:
    seat.forget(7)
    assert seat.member is not None
    assert list(seat.member.dropped) == [7]
    assert 7 in seat.regions  # the helper's graph may hold them

    seat.release(7)  # as it says with an answer
    assert not seat.regions


def test_inputs_stay_while_the_piece_may_be_done_again(seat: Seat) -> None:
    seat.release(7)
    assert 7 in seat.regions

    seat.forget(7)
    assert not seat.regions


def test_when_the_member_is_gone_its_pieces_wait_for_another(seat: Seat) -> None:
    seat.leave()

    assert seat.member is None
    assert seat.works[7].holder is None
    assert 7 in seat.regions
    seat.forget(7)
    assert not seat.regions


def test_an_answer_ends_what_was_asked(seat: Seat) -> None:
    member: Any = seat.member
    member.answers = [Reply("the answer", [7], 1.0, 2.0)]
    asked = Asked(Done(), member, 0.0)
    seat.asked.append(asked)

    assert seat.hear(asked, None) == "the answer"

    assert not seat.asked
    assert seat.worked == [(1, 1.0, 2.0)]
    assert seat.unread == {7}
    assert not member.channel.torn


@pytest.mark.parametrize(
    ("error", "is_open"), [(ChannelClosedError(), False), (KeyboardInterrupt(), True)]
)
def test_after_an_interrupt_the_answer_is_still_to_come_after_a_death_it_is_not(
    seat: Seat, error: BaseException, *, is_open: bool
) -> None:
    member: Any = seat.member
    member.answers = [error]
    asked = Asked(Done(), member, 0.0)
    seat.asked.append(asked)

    with pytest.raises(type(error)):
        seat.hear(asked, None)

    assert list(seat.asked) == ([asked] if is_open else [])


def test_what_could_not_be_sent_has_no_answer(seat: Seat) -> None:
    asked = Asked(Done(), seat.member, 0.0, error=ChannelClosedError())
    seat.asked.append(asked)

    with pytest.raises(ChannelClosedError):
        seat.hear(asked, None)

    assert not seat.asked
