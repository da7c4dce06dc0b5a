"""A failure: an exception on its way to the main process."""

from __future__ import annotations

from evener.errors import HelperRaisedError, RemoteTraceback
from evener.failure import Failure


class UnsendableError(Exception):
    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


def test_an_exception_keeps_its_type_and_has_the_traceback_as_its_cause() -> None:
    error = Failure.of(KeyError("a")).error("cpu:1")
    assert isinstance(error, KeyError)
    assert isinstance(error.__cause__, RemoteTraceback)
    assert "cpu:1" in str(error.__cause__)


def test_one_that_cannot_be_sent_is_told() -> None:
    error = Failure.of(UnsendableError(1, 2)).error("cpu:1")
    assert isinstance(error, HelperRaisedError)
    assert "1 and 2" in str(error)


def test_the_end_of_memory_is_known() -> None:
    assert Failure.of(MemoryError("x")).is_memory
    assert not Failure.of(KeyError("x")).is_memory
