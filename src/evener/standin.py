"""The stand-in: evener's DataParallel in torch's place, for the time in which a program runs.

A program finds it under torch's names, gives it the numbers of this run's devices, and saves it as
what it seems: a pickle of it names torch's class, so torch loads it where evener is not installed.
What a program made of it is kept for the end, when the modules themselves may be gone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from evener import dropin, parallel_functions
from evener.devices import Device
from evener.errors import DeviceError
from evener.journal import Journal
from evener.pickling import STATE_NAME
from evener.report import Report


class _Wrapper(NamedTuple):
    """What is kept of a parallel module after its end."""

    title: str
    devices: list[Device]
    journal: Journal


class StandIn:
    """Evener's DataParallel and functions for one run, and what the program makes of them.

    Args:
        places: the devices of this run.
        shares: how batches are cut, as in :func:`evener.parallelize`.
    """

    def __init__(self, places: list[Device], shares: str = "auto") -> None:
        self._places = places
        self.shares = shares
        self._wrappers: list[_Wrapper] = []
        self._num_calls_in_parts: dict[str, int] = {}

    @contextmanager
    def in_torchs_place(self) -> Iterator[None]:
        """Let torch's names mean evener's, for a block."""
        functions = {
            name: self._bound(getattr(parallel_functions, name), parameter)
            for name, parameter in (
                ("data_parallel", "device_ids"),
                ("scatter", "target_gpus"),
                ("scatter_kwargs", "target_gpus"),
                ("replicate", "devices"),
                ("parallel_apply", "devices"),
            )
        }
        ours = {"DataParallel": _class(self), "gather": parallel_functions.gather, **functions}
        package = "torch.nn.parallel"
        names = {
            "torch.nn": ("DataParallel",),
            package: tuple(name for name in ours if name != "scatter_kwargs"),
            f"{package}.data_parallel": ("DataParallel", "data_parallel"),
            f"{package}.scatter_gather": ("scatter", "scatter_kwargs", "gather"),
            f"{package}.replicate": ("replicate",),
            f"{package}.parallel_apply": ("parallel_apply",),
        }
        # By sys.modules: as attributes, functions hide some of the modules.
        found = [(vars(sys.modules[where]), name) for where in names for name in names[where]]
        before = [there[name] for there, name in found]
        for there, name in found:
            there[name] = ours[name]
        try:
            yield
        finally:
            for (there, name), value in zip(found, before, strict=True):
                there[name] = value

    def chosen(self, device_ids: Any) -> Any:
        """The devices of this run that a program means; what is no number is passed on."""
        if device_ids is None:
            return self._places
        if isinstance(device_ids, (str, torch.device, Device)):
            return device_ids
        return [
            self._numbered(i, device_ids) if isinstance(i, int) else i
            for i in ([device_ids] if isinstance(device_ids, int) else device_ids)
        ]

    def _numbered(self, number: int, device_ids: Any) -> Device:
        if 0 <= number < len(self._places):
            return self._places[number]
        labels = ", ".join(place.label for place in self._places)
        raise DeviceError(
            f"device_ids={device_ids!r}: there is no device number {number} in this run, which "
            f'has {labels}; start it with more, such as evener run --devices "cpu*{number + 1}"'
        )

    def _bound(self, function: Callable[..., Any], parameter: str) -> Callable[..., Any]:
        """A function whose devices are those of this run."""
        arguments = signature(function)

        @wraps(function)
        def bound(*args: Any, **kwargs: Any) -> Any:
            given = arguments.bind(*args, **kwargs).arguments
            if function is not parallel_functions.parallel_apply or given.get(parameter):
                given[parameter] = self.chosen(given.get(parameter))
            if function is parallel_functions.data_parallel:
                self.count_in_parts("torch.nn.parallel.data_parallel")
            return function(**given)

        return bound

    # -------------------------------------------------------------- what was done

    def note(self, wrapper: nn.DataParallel[Any]) -> None:
        """Keep what will tell what the devices did."""
        state = vars(wrapper.module)[STATE_NAME]
        self._wrappers.append(_Wrapper(_title(wrapper), state.devices, state.journal))

    def count_in_parts(self, title: str) -> None:
        """Count a call in threads of this process."""
        self._num_calls_in_parts[title] = self._num_calls_in_parts.get(title, 0) + 1

    def tell(self, main: ModuleType | None) -> None:
        """Print on stderr what the devices did.

        Args:
            main: the program, if it has come to its end.
        """
        lines: list[str] = []
        for title, places, journal in self._wrappers:
            if len(places) > 1 and not journal.num_calls:
                lines.append(f"evener: {title}: no call on its devices")
            else:
                lines += [f"evener: {title}", str(Report(places, journal.snapshot()))]
        for title, num_calls in self._num_calls_in_parts.items():
            labels = ", ".join(place.label for place in self._places)
            lines.append(
                f"evener: {title}: in threads of this process, for {labels}; calls: {num_calls}; "
                "what each device did is not recorded"
            )
        if not lines and main is not None:
            lines = ["evener: the program used no torch.nn.DataParallel", *_likely_reason(main)]
        with suppress(OSError, ValueError):  # a program may have closed it
            sys.stdout.flush()
            for line in lines:
                print(line, file=sys.stderr)  # noqa: T201


def _class(stand_in: StandIn) -> type:
    """Make the class that stands in torch's place during a run."""

    class DataParallel(dropin.DataParallel[dropin.ModuleT]):
        def __init__(
            self,
            module: dropin.ModuleT,
            device_ids: Any = None,
            output_device: Any = None,
            dim: int = 0,
        ) -> None:
            places, shares = stand_in.chosen(device_ids), stand_in.shares
            super().__init__(module, places, output_device, dim, shares=shares)

        def _make_parallel(self) -> None:
            super()._make_parallel()
            stand_in.note(self)

        def _forward_in_parts(self, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
            stand_in.count_in_parts(_title(self))
            return super()._forward_in_parts(args, given)

    # What the program saves with it is torch's, and is loaded with or without evener.
    DataParallel.__module__ = "torch.nn.parallel.data_parallel"
    DataParallel.__qualname__ = "DataParallel"
    DataParallel.__doc__ = dropin.DataParallel.__doc__
    return DataParallel


def _title(wrapper: nn.DataParallel[Any]) -> str:
    return f"{type(wrapper).__name__} of {type(wrapper.module).__name__}"


def _likely_reason(main: ModuleType) -> Iterator[str]:
    """The line of the program that wants two accelerators."""
    if torch.accelerator.is_available() and torch.accelerator.device_count() > 1:
        return
    with suppress(OSError, TypeError, UnicodeError):
        for number, line in enumerate(Path(str(main.__file__)).read_text().splitlines(), 1):
            if "device_count" in line:
                yield (
                    f"evener: likely because of line {number}: {line.strip()}\n"
                    "evener: this machine has no two accelerators; DataParallel of `evener run` "
                    "needs none: take the condition away"
                )
                return
