"""Work: the messages that have a piece done again, by whoever answers them."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from evener import messages
from evener.dims import Dims
from evener.piece import Settings
from evener.portions import Split
from evener.trees import flatten
from evener.update import Update
from evener.work import Work

THEN = Update(removed=[(0, "as before the call")])
SETTINGS = Settings.current()
SPAN = messages.Span(0, 64)
FORWARD = messages.Forward(7, Update(), None, [], SPAN, 3, SETTINGS, lead=True)
BACKWARD = messages.Backward(7, [], SPAN, [], keep_graph=False, settings=SETTINGS)
WRITE = messages.Write(7, [])
FAILURE = messages.Failure(None, "ValueError: x", "Traceback ...")


class Somebody:
    """Answers each message with its own name, or one of a kind with a failure."""

    def __init__(self, fails: type | None = None) -> None:
        self.asked: list[Any] = []
        self.fails = fails

    def ask(self, message: Any) -> Any:
        self.asked.append(message)
        return FAILURE if type(message) is self.fails else type(message).__name__


@pytest.fixture
def work() -> Work:
    _, structure = flatten(((torch.ones(8),), {}))
    load = messages.Load(b"", [], SPAN, [], [], [], [], None)
    return Work(FORWARD, structure, Split(8, 8, [0], Dims()), lambda: (load, THEN), Mock())


@pytest.mark.parametrize("message", [FORWARD, WRITE, BACKWARD])
def test_whoever_does_it_is_told_all_from_the_start(work: Work, message: Any) -> None:
    other = Somebody()

    answer = work.again(message, other.ask)

    assert answer == type(message).__name__
    load, forward, *rest = other.asked
    assert load.keeps_pieces  # those of other calls may be waiting for their backward
    assert forward.update is THEN
    assert forward.structure is not None
    assert forward.seed == FORWARD.seed
    # Where its forward was right, attributes and buffers were taken from it already.
    assert forward.lead == (message is FORWARD)
    assert rest == ([] if message is FORWARD else [message])


@pytest.mark.parametrize("fails", [messages.Load, messages.Forward, messages.Backward])
def test_the_first_failure_is_the_answer(work: Work, fails: type) -> None:
    other = Somebody(fails)

    assert work.again(BACKWARD, other.ask) is FAILURE
    assert type(other.asked[-1]) is fails


def test_it_is_halved_until_single_samples_and_made_whole(work: Work) -> None:
    sizes = []
    while work.split.most > 1:
        work.halve()
        sizes.append(work.split.most)
    assert sizes == [4, 2, 1]
    assert work.is_split

    other = Somebody()
    work.again(BACKWARD, other.ask)
    assert other.asked[1].split == work.split
    assert other.asked[1].deferred  # its backward runs the forward of each portion itself
    work.again(WRITE, other.ask)
    assert not other.asked[4].deferred

    work.make_whole()
    assert not work.is_split
    assert work.size == (8, 64)


def test_inputs_are_put_into_the_arena_anew_unless_a_forward_has_left_them_as_they_were(
    work: Work,
) -> None:
    def ask(message: Any) -> Any:
        return messages.Outputs(None, [], dirty=False)

    work.again(FORWARD, ask)  # it died in the middle of one, for all that is known
    work.again(BACKWARD, ask)
    assert [call.kwargs for call in work.renew.call_args_list] == [{"is_over": False}]  # type: ignore[attr-defined]

    work.is_dirty = True
    work.again(BACKWARD, ask)
    assert work.renew.call_args.kwargs == {"is_over": True}  # type: ignore[attr-defined]
