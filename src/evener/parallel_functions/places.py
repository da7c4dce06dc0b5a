"""Places: on which devices the functions of ``torch.nn.parallel`` work, and who does it.

Numbers, words and records all mean what they mean for :func:`evener.devices`, but a device may be
given twice. CPU devices are ours; for accelerators torch's own functions are called.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import nn

from evener.devices import Device, DevicesSpec, devices
from evener.errors import DeviceError, ModuleError


def places_of(spec: DevicesSpec | None) -> list[Device]:
    """Say which devices are meant.

    Args:
        spec: as for :func:`evener.devices`; a device may be given twice. Default: all.

    Raises:
        DeviceError: if one is not there, or none is given.
    """
    if spec is None:
        return devices()
    if isinstance(spec, (str, int, torch.device, Device)) or not spec:
        return devices(spec)
    return [device for item in spec for device in devices(item)]


def on_cpu(places: Sequence[Device]) -> bool:
    """Whether these are CPU devices; else they are accelerators.

    Raises:
        DeviceError: if there are both.
    """
    kinds = {place.kind for place in places}
    if len(kinds) > 1:
        labels = ", ".join(place.label for place in places)
        raise DeviceError(f"{labels}: expected devices of one kind; give only one of {kinds}")
    return kinds == {"cpu"}


def torch_devices(places: Sequence[Device]) -> list[torch.device]:
    """The same devices for torch."""
    return [torch.device(place.label) for place in places]


def check_place(module: nn.Module, place: Device) -> None:
    """Check that a module is where the first device finds it.

    Raises:
        ModuleError: if a parameter or buffer is elsewhere.
    """
    expected = torch.device("cpu") if place.kind == "cpu" else torch.device(place.label)
    for tensor in chain(module.parameters(), module.buffers()):
        if tensor.device != expected:
            raise ModuleError(
                f"module must have its parameters and buffers on device {expected}, that of "
                f"{place.label}, the first one given, but found one of them on device: "
                f"{tensor.device}; move it there with module.to({str(expected)!r})"
            )
