"""Policies: who decides in training and in inference, and what becomes of absent devices."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import pytest

from evener.devices import Device
from evener.journal import Journal
from evener.policies import Policies
from evener.shares import Choice, FixedShares
from evener.timing import Timing

DEVICES = [Device("cpu", i, (i,), 1, "test") for i in range(2)]


class Told:
    """A policy that does what it is told, and notes what it hears."""

    def __init__(self, shares: tuple[int, ...], left_out: tuple[int, ...] = ()) -> None:
        self.shares = shares
        self.left_out = left_out
        self.num_observed = 0
        self.caps: list[list[float]] = []
        self.guesses = 0

    def limit(self, caps: Any) -> None:
        self.caps.append(list(caps))

    def choose(self, batch: int) -> Choice:
        return Choice(self.shares, left_out=self.left_out)

    def guess(self, batch: int) -> Choice:
        self.guesses += 1
        return self.choose(batch)

    def observe(self, *measured: Any) -> None:
        self.num_observed += 1


def both(*, left_out: tuple[int, ...] = ()) -> tuple[Policies, Told, Told]:
    training, inference = Told((3, 1), left_out), Told((2, 2))
    return Policies(DEVICES, training, inference), training, inference  # type: ignore[arg-type]


def test_training_and_inference_are_decided_apart() -> None:
    policies, training, inference = both()

    assert policies.choose(4, deque(), grad=False, level=1).shares == (2, 2)
    # Before anything was trained, what is known of inference is the best guess.
    assert policies.choose(4, deque(), grad=True, level=1).shares == (2, 2)
    assert inference.guesses == 1
    training.num_observed = 1
    assert policies.choose(4, deque(), grad=True, level=1).shares == (3, 1)
    assert policies.choose(0, deque(), grad=True, level=1).shares == (0, 0)


def test_a_forward_that_no_backward_followed_was_inference() -> None:
    policies, training, inference = both()
    timing = Timing(Journal(2), 1, (2, 2))

    policies.choose(4, deque([timing]), grad=True, level=1)

    assert (training.num_observed, inference.num_observed) == (0, 1)
    policies.learn(timing, grad=True)
    policies.learn_alone((4, 0), 0.5)
    assert (training.num_observed, inference.num_observed) == (1, 2)


def test_limits_are_told_when_they_change() -> None:
    policies, training, inference = both()
    for caps in ([math.inf, math.inf], [math.inf, math.inf], [math.inf, 0]):
        policies.limit(caps)

    assert training.caps == inference.caps == [[math.inf, math.inf], [math.inf, 0]]


def test_whom_it_leaves_out_is_told_at_the_users_line() -> None:
    policies, training, _ = both(left_out=(1,))
    training.num_observed = 1

    with pytest.warns(UserWarning, match="cpu:1 has no share of batches of 4 .* training") as told:
        policies.choose(4, deque(), grad=True, level=2)

    assert told[0].filename == __file__


def test_fixed_shares_are_the_same_but_for_who_is_not_there() -> None:
    fixed = FixedShares((3, 1))
    policies = Policies(DEVICES, fixed, fixed)
    assert policies.are_fixed
    assert not both()[0].are_fixed

    policies.limit([math.inf, math.inf])
    assert policies.choose(8, deque(), grad=True, level=1).shares == (6, 2)
    policies.limit([math.inf, 0])
    assert policies.choose(8, deque(), grad=True, level=1).shares == (8, 0)
    policies.limit([5, math.inf])
    assert policies.choose(8, deque(), grad=True, level=1).shares == (5, 3)
