"""Advice: what a caller was told is what the call then is."""

from __future__ import annotations

from evener.advice import Advice
from evener.shares import Choice


def test_to_ask_again_before_the_call_gives_the_same_answer() -> None:
    choices = [Choice((3, 1)), Choice((2, 2))]
    advice = Advice()

    answers = [advice.ask(4, lambda: choices.pop(0)) for _ in range(3)]

    assert answers == [(3, 1)] * 3
    assert len(choices) == 1


def test_a_call_that_follows_is_the_one_that_was_chosen_for() -> None:
    told = Choice((4, 0), measured=True, left_out=(1,))
    advice = Advice()
    advice.ask("training", lambda: told)

    assert advice.follow("training", [4, 0]) is told
    assert advice.follow("training", [4, 0]) == Choice((4, 0), measured=False)


def test_who_does_not_follow_is_not_measured_and_may_ask_anew() -> None:
    advice = Advice()
    advice.ask(4, lambda: Choice((3, 1)))

    assert advice.follow(4, (2, 2)) == Choice((2, 2), measured=False)
    assert advice.ask(4, lambda: Choice((1, 3))) == (1, 3)


def test_only_the_last_kind_that_was_asked_for_is_remembered() -> None:
    advice = Advice()
    advice.ask(4, lambda: Choice((3, 1)))
    advice.ask(8, lambda: Choice((6, 2)))

    assert advice.ask(4, lambda: Choice((1, 3))) == (1, 3)
