"""Parameter: one parameter of a network, as it stands on each device.

On CPU devices all replicas use the same memory, so that a step of the optimizer need not be sent
to anyone. That they do is not taken for granted here: what a parameter is on a device is asked
from the helper that drives it.

Source: ``Parameter`` and ``Block.collect_params`` of ``mxnet.gluon``.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from evener.devices import Device, DeviceSpec
from evener.devices import devices as _devices
from evener.errors import NotOnDeviceError
from evener.gluon.network import flush
from evener.pickling import STATE_NAME


class Parameter:
    """A view of a parameter; see :func:`collect_params`.

    Args:
        net: the network.
        name: what ``net.named_parameters()`` calls it.

    Attributes:
        net: the network.
        name: what it is called.
    """

    def __init__(self, net: nn.Module, name: str) -> None:
        self.net = net
        self.name = name

    @property
    def torch(self) -> nn.Parameter:
        """The parameter itself."""
        return self.net.get_parameter(self.name)

    def data(self, device: DeviceSpec | None = None) -> Tensor:
        """Read the values on one device.

        Args:
            device: one of the network's. May be left out where there is only one.

        Returns:
            A copy, of the parameter's shape and dtype.

        Raises:
            NotOnDeviceError: if it was never put on that device, or if there are several and none
                is named. A helper has its replica from the network's first call on.
        """
        devices = self.list_devices()
        place = self._place(device, devices)
        parameter = self.torch
        if is_lazy(parameter):
            raise NotOnDeviceError(
                f"parameter {self.name!r} has no shape before the first call; call the network "
                "with one batch"
            )
        if place == 0:
            return parameter.detach().clone()
        values: Tensor | None = self._state().way.read(place, self.name, parameter)
        if values is None:
            raise NotOnDeviceError(
                f"parameter {self.name!r} is not on {devices[place].label} yet: a helper gets "
                "its replica when the network is called; call it with one batch first"
            )
        return values

    def list_data(self) -> list[Tensor]:
        """Read the values on each device, in the order of :meth:`list_devices`."""
        return [self.data(device) for device in self.list_devices()]

    def list_devices(self) -> list[Device]:
        """The devices that it was put on.

        Raises:
            NotOnDeviceError: if the network was not initialized.
        """
        return list(self._state().devices)

    def grad(self, device: DeviceSpec | None = None) -> Tensor | None:
        """The gradient, summed over the devices; there is one for all of them.

        Args:
            device: one of the network's. Default: any.

        Returns:
            The parameter's ``.grad`` itself; None if there was no backward since the last step.

        Raises:
            NotOnDeviceError: if it was never put on that device.
        """
        if device is not None:
            self._place(device, self.list_devices())
        flush(self.net)
        return self.torch.grad

    def __repr__(self) -> str:
        parameter = self.torch
        shape = "no shape yet" if is_lazy(parameter) else tuple(parameter.shape)
        return f"Parameter({self.name!r}, {shape}, {parameter.dtype})"

    def _state(self) -> Any:
        state = vars(self.net).get(STATE_NAME)
        if state is None:
            raise NotOnDeviceError(
                f"parameter {self.name!r} has not been initialized; "
                "evener.gluon.initialize(net, init, devices) puts it on devices"
            )
        return state

    def _place(self, device: DeviceSpec | None, devices: list[Device]) -> int:
        labels = [there.label for there in devices]
        if device is None:
            if len(labels) == 1:
                return 0
            raise NotOnDeviceError(
                f"parameter {self.name!r} is on several devices, {', '.join(labels)}; name one"
            )
        label = _label(device)
        if label not in labels:
            raise NotOnDeviceError(
                f"parameter {self.name!r} was not initialized on {label}, only on "
                f"{', '.join(labels)}"
            )
        return labels.index(label)


def collect_params(net: nn.Module, select: str | None = None) -> dict[str, Parameter]:
    """The parameters of a network by name, in its order.

    Args:
        net: a module, initialized or not.
        select: a regular expression that the names have to begin with, such as ``"stem|head"``.
            Default: all.

    Returns:
        A parameter for each name of ``net.named_parameters()``.

    Example:
        >>> list(collect_params(nn.Linear(2, 1)))
        ['weight', 'bias']
    """
    return {
        name: Parameter(net, name)
        for name, _ in net.named_parameters()
        if select is None or re.match(select, name)
    }


def _label(device: DeviceSpec) -> str:
    if isinstance(device, Device):
        return device.label
    if isinstance(device, torch.device):
        return f"{device.type}:{device.index or 0}"
    # A number means what it means everywhere; a name need not be that of a device that is there.
    return _devices(device)[0].label if isinstance(device, int) else str(device).strip().lower()
