"""A failure: what a helper answers if it could not do what it was asked."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from evener.errors import GatherBrokenError, HelperRaisedError, RemoteTraceback
from evener.memory import is_memory_error
from evener.pickling import dumps


@dataclass
class Failure:
    """The user's module raised an exception, or the helper itself did.

    Attributes:
        exception: its bytes; None if it cannot be sent.
        summary: its type and message as text.
        traceback: the helper's traceback as text.
        is_memory: whether the device had no memory left.
    """

    exception: bytes | None
    summary: str
    traceback: str
    is_memory: bool = False

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """The failure that an exception is."""
        summary = "".join(traceback.format_exception_only(error)).strip()
        text = "".join(traceback.format_exception(error))
        try:
            data = dumps(error)
            pickle.loads(data)  # noqa: S301 - some exceptions can be sent and not be put together
        except Exception:  # noqa: BLE001 - whatever a user's exception does
            data = None
        return cls(data, summary, text, is_memory_error(error))

    def error(self, label: str) -> BaseException:
        """The exception, with its traceback as its cause.

        Args:
            label: that of the device.
        """
        if self.exception is None:
            error: BaseException = HelperRaisedError(f"on {label}: {self.summary}")
        else:
            error = pickle.loads(self.exception)  # noqa: S301 - from a process of our own team
        error.__cause__ = RemoteTraceback(label, self.traceback)
        return error


@contextmanager
def collected(errors: list[BaseException]) -> Iterator[None]:
    """Keep an error until the other devices have answered; an interrupt does not wait."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - raised when the others have answered
        errors.append(error)


def first_of(errors: Sequence[BaseException]) -> BaseException:
    """The first error, in the order of the devices, that is not the consequence of another."""
    for error in errors:
        if isinstance(error, GatherBrokenError):  # nobody sees it; its frames would hold the graph
            error.__traceback__ = error.__context__ = None
    return next((e for e in errors if not isinstance(e, GatherBrokenError)), errors[0])
