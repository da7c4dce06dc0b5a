"""The user's thread: what a call changes in it is given back."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from evener.thread import Mark, on_cores, restored, seeded


def test_a_seeded_block_draws_the_same_and_changes_nothing_outside() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)

    with seeded(7):
        first = torch.rand(4)
    with seeded(7):
        second = torch.rand(4)

    assert torch.equal(first, second)
    assert torch.equal(torch.rand(3), expected)
    assert torch.initial_seed() == 5


def test_a_seeded_block_changes_nothing_outside_even_if_it_fails_or_seeds() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()

    def fail() -> None:
        torch.manual_seed(99)
        raise KeyError

    with pytest.raises(KeyError), seeded(7):
        fail()

    assert torch.equal(torch.get_rng_state(), state)


def test_a_thread_stays_on_the_cores_of_a_device_for_a_while() -> None:
    before = os.sched_getaffinity(0)
    first = min(before)

    with on_cores([first]):
        assert os.sched_getaffinity(0) == {first}
    with on_cores([100_000]):  # which is not there: it is slower, not wrong
        assert os.sched_getaffinity(0) == before

    assert os.sched_getaffinity(0) == before


def test_a_mark_is_where_its_thread_is_inside() -> None:
    mark = Mark()
    elsewhere: list[bool] = []

    with mark.marked():
        assert mark.is_here
        other = threading.Thread(target=lambda: elsewhere.append(mark.is_here))
        other.start()
        other.join()
        with mark.marked():
            assert mark.is_here
        assert mark.is_here

    assert not mark.is_here
    assert elsewhere == [False]


def test_what_an_interrupt_leaves_behind_is_given_back() -> None:
    mark, cores = Mark(), os.sched_getaffinity(0)

    def interrupted() -> None:
        torch._C._set_grad_enabled(False)
        os.sched_setaffinity(0, {min(cores)})
        mark.thread = threading.get_ident()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), restored(mark):
        interrupted()

    assert torch.is_grad_enabled()
    assert os.sched_getaffinity(0) == cores
    assert not mark.is_here
