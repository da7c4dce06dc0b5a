"""Faults: what is noted, which samples a device has memory for, and who hears of it, once."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from evener import errors
from evener.devices import Device
from evener.errors import FaultWarning
from evener.faults import Faults
from evener.journal import Journal

DEVICES = [Device("cpu", i, (i,), 1, "test") for i in range(2)]


@pytest.fixture
def faults() -> Faults:
    return Faults(DEVICES, Journal(2), restarts=3)


def note(faults: Faults, phase: str = "forward") -> None:
    since_s = time.perf_counter() - 2.0
    faults.note(1, phase, "was ended", "it was done again", since_s=since_s, who="the helper")


def test_a_fault_is_in_the_journal_with_its_cost(faults: Faults) -> None:
    faults.call = 7
    note(faults)

    (fault,) = faults._journal.faults
    assert fault[:5] == (1, 7, "forward", "was ended", "it was done again")
    assert fault.cost_s >= 2.0
    assert faults.num == 1


@pytest.mark.parametrize(
    ("phase", "when"),
    [
        ("forward", "in the forward of call 7"),
        ("idle", "between two calls"),
        ("start", "while it started"),
    ],
)
def test_the_user_hears_of_each_once_at_their_own_line(
    faults: Faults, phase: str, when: str
) -> None:
    faults.call = 7
    with pytest.warns(FaultWarning) as told, faults.telling():
        note(faults, phase)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        faults.tell()

    (warning,) = told
    assert str(warning.message) == f"the helper was ended {when}; it was done again"
    assert warning.filename == __file__


def test_torch_between_the_user_and_us_is_not_the_users_line(faults: Faults) -> None:
    class Telling(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        # As in a backward of ours, which torch calls from C++.
        backward = staticmethod(telling(faults))

    note(faults)
    loss = Telling.apply(torch.ones(1, requires_grad=True)).sum()  # type: ignore[no-untyped-call]
    with pytest.warns(FaultWarning) as told:
        loss.backward()

    assert told[0].filename == __file__
    assert "loss.backward()" in Path(__file__).read_text().splitlines()[told[0].lineno - 1]


def telling(faults: Faults) -> Callable[..., torch.Tensor]:
    """A backward that stands in a file of evener's."""
    code = compile("lambda ctx, g: (faults.tell(), g)[1]", errors.__file__, "eval")
    function: Callable[..., torch.Tensor] = eval(code, {"faults": faults})  # noqa: S307
    return function


def test_an_error_goes_before_a_warning_that_is_an_error(faults: Faults) -> None:
    def fail() -> None:
        with faults.telling():
            note(faults)
            raise KeyError

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(KeyError):
            fail()


def test_a_limit_only_falls(faults: Faults) -> None:
    assert faults.caps == [math.inf, math.inf]
    faults.limit(1, 8)
    faults.limit(1, 20)

    assert faults.caps == [math.inf, 8]
