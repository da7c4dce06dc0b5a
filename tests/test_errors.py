"""The exceptions: their family tree, and that they travel."""

from __future__ import annotations

import pickle
import re

import pytest

from evener import errors
from evener.errors import (
    ArenaError,
    BatchError,
    BranchError,
    DeviceError,
    EvenerError,
    GatherBrokenError,
    HelperDiedError,
    HelperRaisedError,
    HelperStartError,
    ModuleError,
    NotOnDeviceError,
    ProgramError,
    RemoteTraceback,
    SampleTooLargeError,
    SharesError,
    StaleGradientError,
    TeamError,
)

#: Each with what it also is, so that a program can catch it without knowing evener.
FAMILY = {
    DeviceError: (EvenerError, ValueError),
    SharesError: (EvenerError, ValueError),
    BatchError: (EvenerError, ValueError),
    ModuleError: (EvenerError, ValueError),
    ProgramError: (EvenerError, ValueError),
    ArenaError: (EvenerError, MemoryError),
    SampleTooLargeError: (EvenerError, MemoryError),
    BranchError: (EvenerError, RuntimeError),
    GatherBrokenError: (EvenerError, RuntimeError),
    NotOnDeviceError: (EvenerError, RuntimeError),
    StaleGradientError: (EvenerError, RuntimeError),
    TeamError: (EvenerError, RuntimeError),
    HelperStartError: (TeamError,),
    HelperDiedError: (TeamError,),
    HelperRaisedError: (TeamError,),
}


@pytest.mark.parametrize(("error", "bases"), FAMILY.items())
def test_each_error_is_of_evener_and_of_a_builtin_kind(
    error: type[EvenerError], bases: tuple[type, ...]
) -> None:
    assert error.__bases__ == bases


def test_the_table_above_is_complete() -> None:
    found = {
        value
        for value in vars(errors).values()
        if isinstance(value, type) and issubclass(value, EvenerError)
    }

    assert found == {*FAMILY, EvenerError}


def test_the_tree_in_the_docstring_is_the_true_one() -> None:
    tree = re.findall(r"[├└]── (\w+)(?: \((\w+)\))?", errors.__doc__ or "")

    assert [name for name, _ in tree] == [error.__name__ for error in FAMILY]
    for name, builtin in tree:
        if builtin:
            assert builtin in [base.__name__ for base in getattr(errors, name).__bases__]


@pytest.mark.parametrize("error", [*FAMILY, EvenerError])
def test_an_error_keeps_its_message_on_its_way_between_processes(
    error: type[EvenerError],
) -> None:
    arrived = pickle.loads(pickle.dumps(error("3 given, 2 expected")))

    assert type(arrived) is error
    assert str(arrived) == "3 given, 2 expected"


def test_a_remote_traceback_names_the_device_and_quotes_the_text() -> None:
    cause = RemoteTraceback("cpu:1", "Traceback ...\nValueError: seven\n")

    assert str(cause) == 'in the helper of cpu:1:\n"""\nTraceback ...\nValueError: seven\n"""'


def test_a_remote_traceback_travels() -> None:
    arrived = pickle.loads(pickle.dumps(RemoteTraceback("cpu:1", "text")))

    assert (arrived.device, arrived.text) == ("cpu:1", "text")
