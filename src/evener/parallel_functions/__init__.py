"""The functions of ``torch.nn.parallel``, on CPU devices too: the steps of one parallel call.

They work inside one process, each device a thread of its own::

    inputs ── scatter ──► one part for each device ───┐
                                                      ├── parallel_apply ──► outputs ── gather ──►
    module ── replicate ► one replica for each device ┘

:func:`evener.parallelize` is faster (Python runs one thread at a time) and cuts unequal shares.
These are for programs that take a call apart, and for second derivatives, which pass through here.
Names and arguments are torch's; on accelerators torch's own functions are called. What differs:

* Replicas have the parameters of the module itself, not copies that ``parameters()`` leaves out.
* Parts are near-equal, and there are no more of them than samples.
* Dataclasses, strings and numbers among inputs and outputs are known.
"""

from __future__ import annotations

from typing import Any

import torch.nn.parallel as torchs
from torch import nn

from evener.devices import DevicesSpec
from evener.parallel_functions.parts import gather, scatter, scatter_kwargs
from evener.parallel_functions.places import check_place, on_cpu, places_of, torch_devices
from evener.parallel_functions.replicas import replicate
from evener.parallel_functions.threads import parallel_apply

__all__ = ["data_parallel", "gather", "parallel_apply", "replicate", "scatter", "scatter_kwargs"]

_torchs_data_parallel = torchs.data_parallel  # as it is now: `evener run` puts ours in its place


def data_parallel(  # noqa: PLR0917 - torch's signature
    module: nn.Module,
    inputs: Any,
    device_ids: DevicesSpec | None = None,
    output_device: Any = None,
    dim: int = 0,
    module_kwargs: dict[str, Any] | None = None,
) -> Any:
    """Call a module in parallel, as ``torch.nn.parallel.data_parallel``.

    Args:
        module: any module; its parameters get the gradients.
        inputs: its positional arguments, a tuple; or its only argument; or None for none.
        device_ids: which devices, as in :func:`evener.devices`. Default: all.
        output_device: where outputs on accelerators go. Default: the first device.
        dim: the dimension of the batch in all tensors.
        module_kwargs: its keyword arguments.

    Returns:
        What the module returns, joined as by :func:`gather`: 0-dim tensors as a vector with one
        entry for each device that had a part.

    Raises:
        DeviceError: if a device is not there, or if CPU and accelerators are mixed.
        ModuleError: if the module is not on the first device, or cannot be replicated.
        BatchError: if inputs cannot be cut, or outputs cannot be joined.
        Exception: what the module raises, as in :func:`parallel_apply`.
    """
    places = places_of(device_ids)
    if not on_cpu(places):
        ids = torch_devices(places)
        return _torchs_data_parallel(module, inputs, ids, output_device, dim, module_kwargs)
    check_place(module, places[0])
    args = inputs if isinstance(inputs, tuple) else () if inputs is None else (inputs,)
    parts, kwargs = scatter_kwargs(args, module_kwargs, places, dim)
    if not parts:
        parts, kwargs = ((),), ({},)
    if len(places) == 1:
        return module(*parts[0], **kwargs[0])
    replicas = replicate(module, places[: len(parts)])
    outputs = parallel_apply(replicas, parts, kwargs, places[: len(parts)])
    return gather(outputs, output_device, dim)
