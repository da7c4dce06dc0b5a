"""The drop-in: ``torch.nn.DataParallel``, name for name, over evener's devices.

A call goes one of two ways::

    the usual one     the wrapped module is parallel in place, see parallelize: helper processes,
                      shares by speed, the outputs of one device
    in parts          scatter, replicate, parallel_apply, gather: threads of this process, where a
                      subclass has its own version of one of these, and on accelerators

In parts it is as torch has it, with what is told in :mod:`evener.parallel_functions`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any, TypeVar

import torch
from torch import nn

from evener import parallel_functions
from evener.devices import Device, DevicesSpec, devices
from evener.errors import DeviceError, ModuleError
from evener.helper import HELPER_VARIABLE
from evener.parallel_functions.places import check_place, on_cpu, places_of
from evener.parallelize import parallelize, release
from evener.pickling import STATE_NAME

ModuleT = TypeVar("ModuleT", bound=nn.Module)
_PARTS = ("scatter", "replicate", "parallel_apply", "gather")


class DataParallel(nn.DataParallel[ModuleT]):
    """Call a module on several devices, each with a share of the batch: torch's class by the name.

    It is a ``torch.nn.DataParallel`` to ``isinstance``, and its ``state_dict`` has the same names.
    Subclasses may replace :meth:`scatter`, :meth:`replicate`, :meth:`parallel_apply` and
    :meth:`gather`; then a call goes through these. Copies and pickles of it work as it does, with
    all devices of the machine where the same ones are not there.

    What differs from torch: the guide has a table. Above all a 0-dim output is one mean over the
    batch, not one number for each device; and ``create_graph=True`` is refused
    (:func:`evener.parallel_functions.data_parallel` allows it).

    Args:
        module: the module; it is made parallel in place, with :func:`evener.parallelize`. If it
            is parallel already, these devices replace the ones it had.
        device_ids: which devices, as in :func:`evener.devices`: numbers, words, ``torch.device``
            or ``Device``. Default: all.
        output_device: where outputs on accelerators go. CPU devices have one memory. Default:
            the first device.
        dim: the dimension of the batch in all inputs and outputs.
        shares: as in :func:`evener.parallelize`; ``"even"`` cuts batches into near-equal parts,
            as torch does.

    Attributes:
        module: the wrapped module.
        device_ids: the number of each device.
        output_device: the number of the output device; -1 is the CPU's memory.
        dim: as given.
        src_device_obj: where the module has to be, as ``torch.device``.

    Raises:
        DeviceError: if a device is not there or named twice, or if CPU and accelerators are mixed.
        SharesError: if ``shares`` is not one number a device.
        ModuleError: if the module cannot be made parallel; at a call, if it is elsewhere.

    Example:
        >>> net = DataParallel(nn.Linear(2, 1), ["cpu:0"])
        >>> list(net.state_dict()), net.device_ids
        (['module.weight', 'module.bias'], [0])
        >>> net(torch.zeros(3, 2)).shape
        torch.Size([3, 1])
    """

    def __init__(
        self,
        module: ModuleT,
        device_ids: DevicesSpec | None = None,
        output_device: Any = None,
        dim: int = 0,
        *,
        shares: str | Sequence[float] = "auto",
    ) -> None:
        if not isinstance(module, nn.Module):
            raise ModuleError(f"expected an nn.Module, not {type(module).__name__}")
        nn.Module.__init__(self)  # torch's own looks for accelerators
        self._place(devices("auto" if device_ids is None else device_ids))
        self.output_device = self._number(output_device)
        self.dim = dim
        self._shares = shares
        self.module = module
        if not self.goes_in_parts:
            if STATE_NAME in vars(module):
                release(module)
            self._make_parallel()
        elif len(self.device_ids) == 1:
            module.to(self.src_device_obj)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module on the devices.

        Args:
            inputs: its positional arguments, with the batch in dimension ``dim`` of each tensor.
            kwargs: its keyword arguments, likewise.

        Returns:
            What the module returns on one device.

        Raises:
            BatchError: if inputs cannot be cut, or outputs cannot be joined.
            ModuleError: if the module is not where the first device finds it.
            TeamError: if a helper could not do its part.
            Exception: what the module raises.
        """
        if self.goes_in_parts:
            return self._forward_in_parts(inputs, kwargs)
        if STATE_NAME not in vars(self.module) and not _is_in_helper():
            self._make_parallel()  # a copy, or another module was put into it
        return self.module(*inputs, **kwargs)

    @property
    def goes_in_parts(self) -> bool:
        """Whether a call goes through the four methods."""
        return not self._on_cpu or any(
            name in vars(self) or getattr(type(self), name) is not getattr(DataParallel, name)
            for name in _PARTS
        )

    def _make_parallel(self) -> None:
        check_place(self.module, self._places[0])
        parallelize(
            self.module,
            self._places,
            shares=self._shares,
            in_dims=self.dim,
            out_dims=self.dim,
        )

    # -------------------------------------------------------------- in parts

    def _forward_in_parts(self, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        check_place(self.module, self._places[0])
        inputs, kwargs = self.scatter(args, given, self.device_ids)
        if not inputs and not kwargs:
            inputs, kwargs = ((),), ({},)
        if len(self.device_ids) == 1:
            return self.module(*inputs[0], **kwargs[0])
        replicas = self.replicate(self.module, self.device_ids[: len(inputs)])
        outputs = self.parallel_apply(replicas, inputs, kwargs)
        return self.gather(outputs, self.output_device)

    def replicate(self, module: ModuleT, device_ids: Sequence[Any]) -> list[ModuleT]:
        """Make one replica for each device; :func:`evener.parallel_functions.replicate`."""
        places = self._chosen(device_ids)
        return parallel_functions.replicate(module, places, not torch.is_grad_enabled())

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, device_ids: Sequence[Any]
    ) -> Any:
        """Cut the inputs; :func:`evener.parallel_functions.scatter_kwargs`."""
        places = self._chosen(device_ids)
        return parallel_functions.scatter_kwargs(inputs, kwargs, places, self.dim)

    def parallel_apply(
        self, replicas: Sequence[ModuleT], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        """Call the replicas; :func:`evener.parallel_functions.parallel_apply`."""
        places = self._places[: len(replicas)]
        return parallel_functions.parallel_apply(replicas, inputs, kwargs, places)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        """Join the outputs; :func:`evener.parallel_functions.gather`."""
        return parallel_functions.gather(outputs, output_device, self.dim)

    # -------------------------------------------------------------- devices

    def _place(self, places: list[Device]) -> None:
        first = places[0]
        self._on_cpu = on_cpu(places)
        self._places = places
        self.device_ids = [place.index for place in places]
        self.src_device_obj = torch.device("cpu" if self._on_cpu else first.label)

    def _number(self, output_device: Any) -> int:
        if output_device is None:
            return self.device_ids[0]
        if isinstance(output_device, int) and output_device in (-1, *self.device_ids):
            return output_device
        if str(output_device) == "cpu":
            return -1
        return places_of(output_device)[0].index

    def _chosen(self, device_ids: Sequence[Any]) -> list[Device]:
        """The devices of some numbers: first ours, for they may be cut in another way."""
        by_number = {place.index: place for place in self._places}
        return places_of([by_number.get(i, i) if isinstance(i, int) else i for i in device_ids])

    # -------------------------------------------------------------- copies

    def __getstate__(self) -> dict[str, Any]:
        # Nothing of evener's: under `evener run` what is saved is torch's class, and where evener
        # is not installed torch shall load it.
        return {**vars(self), "_places": [astuple(place) for place in self._places]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        rest = dict(state)
        given = [Device(*place) for place in rest.pop("_places", [])]
        super().__setstate__(rest)  # type: ignore[no-untyped-call]
        try:
            # torch itself leaves out the numbers where it has no accelerator.
            self._place(devices(given or self.__dict__.get("device_ids") or "auto"))
        except DeviceError:  # saved on a machine that has others
            self._place(devices())
            rest |= {"output_device": self.device_ids[0], "_shares": "auto"}
        defaults = {"output_device": self.device_ids[0], "dim": 0, "_shares": "auto"}
        vars(self).update({name: rest.get(name, value) for name, value in defaults.items()})


def _is_in_helper() -> bool:
    return os.environ.get(HELPER_VARIABLE) == str(os.getpid())
