"""Patience: many times the usual is a hang; what is new may take long."""

from __future__ import annotations

from evener.patience import FACTOR, FIRST_S, FLOOR_S, NUM_KINDS, WINDOW, Patience


def test_what_was_not_done_yet_may_take_long() -> None:
    patience = Patience()
    patience.observe("forward", 8, 50.0)

    assert patience.limit_s("forward", 8) == FIRST_S  # the first does not tell what is usual
    patience.observe("forward", 8, 2.0)
    assert patience.limit_s("forward", 8) == 2.0 * FACTOR
    assert patience.limit_s("forward", 9) == FIRST_S
    assert patience.limit_s("backward", 8) == FIRST_S


def test_there_is_a_floor() -> None:
    patience = Patience()
    for _ in range(2):
        patience.observe("write", None, 0.001)

    assert patience.limit_s("write") == FLOOR_S


def test_the_longest_of_the_latest_is_the_usual() -> None:
    patience = Patience()
    for seconds in (9.0, 9.0, *[2.0] * (WINDOW - 1)):
        patience.observe("forward", 8, seconds)
    assert patience.limit_s("forward", 8) == 9.0 * FACTOR

    patience.observe("forward", 8, 2.0)

    assert patience.limit_s("forward", 8) == 2.0 * FACTOR


def test_what_the_user_says_holds_for_everything() -> None:
    patience = Patience(3.0)
    patience.observe("forward", 8, 500.0)
    patience.observe("forward", 8, 500.0)

    assert patience.limit_s("forward", 8) == patience.limit_s("load", 1) == 3.0


def test_memory_is_bounded() -> None:
    patience = Patience()
    for size in range(3 * NUM_KINDS):
        patience.observe("forward", size, 1.0)
        patience.observe("forward", size, 1.0)

    assert len(patience._known) == NUM_KINDS
    assert patience.limit_s("forward", 0) == FIRST_S
