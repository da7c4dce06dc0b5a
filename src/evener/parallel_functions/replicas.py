"""Replicas inside one process: a module several times over the same parameters."""

from __future__ import annotations

import warnings
from typing import TypeVar, cast

import torch.nn.parallel as torchs
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.nn.parameter import is_lazy

from evener.devices import DevicesSpec
from evener.errors import ModuleError
from evener.parallel_functions.places import on_cpu, places_of, torch_devices
from evener.pickling import COMPILE_NAME, STATE_NAME

ModuleT = TypeVar("ModuleT", bound=nn.Module)
#: Where a module keeps what its own ``compile()`` made.
COMPILED_NAME = "_compiled_call_impl"
_torchs_replicate = torchs.replicate  # as it is now: `evener run` puts ours in its place


def replicate(
    network: ModuleT,
    devices: DevicesSpec,
    detach: bool = False,  # noqa: FBT001, FBT002 - torch's signature
) -> list[ModuleT]:
    """Make one replica of a module for each device, all of them over the same parameters.

    On CPU devices each replica has the module's own ``Parameter`` objects: gradients add up in
    their ``.grad``, and what a replica changes in place in a parameter is changed for all. The
    first replica has the module's own buffers too, so what it changes in place there is kept; the
    others have copies, apart from buffers that require a gradient. New values of attributes are
    lost with the replica. ``zero_grad`` of a replica warns and does nothing.

    Args:
        network: the module; a parallel one is replicated as the plain one that it was.
        devices: the devices, as in :func:`evener.devices`; one may be given twice.
        detach: whether to leave the replicas' parameters out of the autograd graph.

    Returns:
        The replicas, in the order of the devices.

    Raises:
        DeviceError: if a device is not there, or if CPU and accelerators are mixed.
        ModuleError: if a part of it is a TorchScript module or is not initialised yet.
    """
    places = places_of(devices)
    if not on_cpu(places):
        return _torchs_replicate(network, torch_devices(places), detach)
    for name, module in network.named_modules():
        if isinstance(module, ScriptModule):
            raise ModuleError(
                f"{name or 'the module'} is a TorchScript module, which cannot be replicated; "
                "give the module that it was made from"
            )
    if any(map(is_lazy, [*network.parameters(), *network.buffers()])):
        raise ModuleError(
            "the module has parameters that are not initialised yet; call it once before"
        )
    return [_replica(network, is_first=not i, detach=detach) for i in range(len(places))]


def _replica(network: ModuleT, *, is_first: bool, detach: bool) -> ModuleT:
    copies = {module: _without_tensors(module) for module in network.modules()}
    tensors: dict[int, Tensor] = {}  # tied ones stay tied

    def own(tensor: Tensor, *, is_buffer: bool) -> Tensor:
        if id(tensor) not in tensors:
            if is_buffer and not tensor.requires_grad:
                found = tensor if is_first else tensor.detach().clone()
            elif not detach:
                found = tensor
            elif is_buffer:
                found = tensor.detach()
            else:
                found = nn.Parameter(tensor.detach(), requires_grad=False)
            tensors[id(tensor)] = found
        return tensors[id(tensor)]

    for module, replica in copies.items():
        vars(replica).update(
            _modules={n: child and copies[child] for n, child in module._modules.items()},
            _parameters={
                n: t if t is None else own(t, is_buffer=False)
                for n, t in module._parameters.items()
            },
            _buffers={
                n: t if t is None else own(t, is_buffer=True) for n, t in module._buffers.items()
            },
            zero_grad=_zero_no_grad,
        )
        if isinstance(replica, nn.RNNBase):  # which keeps its parameters in a list as well
            names = replica._flat_weights_names
            vars(replica)["_flat_weights"] = [getattr(replica, name, None) for name in names]
    return cast("ModuleT", copies[network])


def _without_tensors(module: nn.Module) -> nn.Module:
    replica: nn.Module = module._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
    # What torch.compile made in place is bound to the module itself.
    state, *_ = (vars(replica).pop(n, None) for n in (STATE_NAME, COMPILE_NAME, COMPILED_NAME))
    if state is not None:
        replica.__class__ = state.plain
        if state.own_forward is not None:
            vars(replica)["forward"] = state.own_forward
    return replica


def _zero_no_grad(set_to_none: bool = True) -> None:  # noqa: ARG001, FBT001, FBT002 - torch's
    """What ``zero_grad`` of a replica does: its gradients are the module's."""
    warnings.warn(
        "Calling .zero_grad() from a module created with nn.DataParallel() has no effect. Its "
        "parameters are the module's own; call zero_grad of the module, before or after",
        stacklevel=2,
    )
