"""parallelize: the one line, and release, its opposite.

A parallel module is the user's own object with another class: a subclass, made for the purpose,
of the class it had, under the same name. Only ``forward`` differs, so attributes, methods,
``isinstance``, ``state_dict`` and hooks on the module stay what they are. (torch's ``fully_shard``
does the same.) A copy or a pickle of it is a plain module again.
"""

from __future__ import annotations

import copyreg
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn
from torch.jit import ScriptModule

from evener.balance import Balancer
from evener.compiling import Compiler, surrounding
from evener.data_parallel import DataWay
from evener.devices import Device, DevicesSpec, devices
from evener.dims import Dims
from evener.errors import DeviceError, ModuleError
from evener.grid_way import GridWay
from evener.helper import HELPER_VARIABLE
from evener.journal import Journal
from evener.pickling import COMPILE_NAME, STATE_NAME
from evener.policies import Policy
from evener.shares import FixedShares, weights_of

#: What ``batchnorm`` is where it is not given, and there is no grid.
BATCHNORM = "local"

ModuleT = TypeVar("ModuleT", bound=nn.Module)
_devices = devices  # the function: in `parallelize` that name is an argument


class _State:
    """What makes a module parallel; the module's attribute ``STATE_NAME``."""

    def __init__(
        self, plain: type[nn.Module], way: DataWay | None, devices: Sequence[Device]
    ) -> None:
        self.plain = plain
        self.way = way
        #: For :func:`evener.verify`: what parallelize was given.
        self.options: dict[str, Any] = {}
        #: For :func:`evener.report`.
        self.devices = list(devices)
        self.journal = Journal(len(devices)) if way is None else way.journal
        #: A forward that the user had set on the instance.
        self.own_forward: Callable[..., Any] | None = None
        self.compiler = Compiler()
        self.finalizer: weakref.finalize[Any, Any] | None = None
        #: For the explicit style: tells what to call in the place of ``way.call``.
        self.explicit: Any = None


def parallelize(
    module: ModuleT,
    devices: DevicesSpec = "auto",
    how: str = "data",
    *,
    shares: str | Sequence[float] = "auto",
    batchnorm: str | None = None,
    timeout_s: float | None = None,
    restarts: int = 3,
    in_dims: Any = 0,
    out_dims: Any = 0,
    grid: int | None = None,
) -> ModuleT:
    """Make a module run on several devices, in place.

    The training loop stays as it is: the batch is the whole batch, and outputs, gradients and
    buffers are those of one device up to rounding (for batch norm see ``batchnorm``).
    Helpers start at the first call, and end with :func:`release`, with the module or with the
    process.

    Args:
        module: any module; optimizers made before or after stay valid.
        devices: which devices, as in :func:`evener.devices`. The first one is driven by this
            process. With one device the call stays the plain call.
        how: the way of sharing the work: ``"data"``, each device a share of each batch.
        shares: ``"auto"``: how fast each device is, is measured while it works, and batches are
            cut so that all are done at the same time; a device that costs more than it brings
            gets nothing. Or ``"even"``, or one number a device such as ``(3, 1)``, in whose
            proportion batches are cut; zero lets a device rest.
        batchnorm: ``"local"``: each device takes mean and variance of its own share, as in DDP;
            running statistics are those of the first device that works. Or ``"exact"``: each
            batch norm layer in training takes one mean and variance over all devices, as on one
            device. Then code that was compiled runs as it is written in such calls. Default:
            ``"local"``; with a ``grid`` it is neither, but by cells, whatever the devices.
        timeout_s: how long a device may take for one forward or backward, in seconds, before its
            helper counts as dead. Default: fifty times what is usual, one minute at least; ten
            minutes for what it has not done before, such as the first call.
        restarts: how many times a device gets a new helper after a death; the next death leaves
            it out. What a helper that died had to do is done by others.
        in_dims: in which dimension of the inputs the batch lies, as in ``torch.vmap``: a number
            for all tensors (default 0), None for what every device gets as it is, a tuple with
            an entry for each positional argument, each again a number, None or a tree of them,
            or a dict with an entry for each argument of ``forward`` that differs from 0, by name.
        out_dims: the same for the outputs, as a number or a tree that begins like them. A tensor
            of floats without a batch (None; also each 0-dim tensor) is a mean over the batch.
        grid: a number of cells, such as 16: each batch is cut into so many, whatever the devices,
            which take whole cells and compute them one by one, and what comes out is added up in
            one order. Training then has the same bits for any number of devices of one kind, with
            any shares and faults; see the guide for what it costs. Default: no grid.

    Returns:
        The same object.

    Raises:
        DeviceError: if ``devices`` names what is not there, or several devices that are not CPU
            devices, which this version cannot drive; with ``grid``, also one such device, or
            devices with different numbers of cores.
        SharesError: if ``shares`` is not one number a device.
        ModuleError: if the module is parallel already, or cannot be made so.
        TypeError: if ``in_dims`` or ``out_dims`` holds anything but numbers and None.
        ValueError: if ``how`` or ``batchnorm`` is not known, or ``timeout_s`` is not above zero,
            or ``restarts`` is negative, or ``grid`` is not above zero, or is given together with
            ``batchnorm="exact"``.

    Example:
        >>> model = parallelize(nn.Linear(2, 1), "cpu:0")
        >>> type(model).__name__, isinstance(model, nn.Linear)
        ('Linear', True)
        >>> release(model)
        Linear(in_features=2, out_features=1, bias=True)
    """
    options = {name: value for name, value in locals().items() if name != "module"}
    if os.environ.get(HELPER_VARIABLE) == str(os.getpid()):
        raise ModuleError(
            "parallelize was called in a helper: a file that the module's class is imported from "
            'trains when it is imported; put its training under `if __name__ == "__main__":`'
        )
    if not isinstance(module, nn.Module):
        raise ModuleError(f"expected an nn.Module, not {type(module).__name__}")
    if STATE_NAME in vars(module):
        raise ModuleError(
            f"this {type(module).__name__} is parallel already; call evener.release(module) first "
            "to change its devices"
        )
    if isinstance(module, ScriptModule):
        raise ModuleError(
            "a TorchScript module cannot be sent to helpers; give the module that it was made from"
        )
    if how != "data":
        raise ValueError(f'how={how!r} is not known; this version has "data"')
    if batchnorm not in ("exact", "local", None):
        raise ValueError(f'batchnorm={batchnorm!r} is not known; give "exact" or "local"')
    _check_options(timeout_s, restarts, batchnorm, grid)
    found = _devices(devices)
    weights = weights_of(shares, len(found))
    dims = Dims(in_dims, out_dims)
    way: DataWay | None = None
    if len(found) > 1 or grid is not None:
        _check_drivable(found)
        policies = _policies(weights, len(found))
        if grid is None:
            is_exact = (batchnorm or BATCHNORM) == "exact"
            way = DataWay(found, policies, timeout_s, restarts, dims, is_exact=is_exact)
        else:
            way = GridWay(found, policies, timeout_s, restarts, dims=dims, grid=grid)
    plain = type(module)
    state = _State(plain, way, found)
    state.options = options
    if way is not None:
        state.own_forward = vars(module).pop("forward", None)
        state.finalizer = weakref.finalize(module, way.stop)
    vars(module)[STATE_NAME] = state  # not by setattr: torch.compile's modules pass that on
    module.__class__ = _parallel_class(plain, is_plain_call=way is None)  # type: ignore[assignment]
    return module


def release(module: ModuleT) -> ModuleT:
    """Stop the helpers of a parallel module and make it the plain module again.

    Args:
        module: a module that :func:`parallelize` returned.

    Returns:
        The same object, with its parameters in memory of their own.

    Raises:
        ModuleError: if the module is not parallel.
    """
    state = vars(module).get(STATE_NAME) if isinstance(module, nn.Module) else None
    if state is None:
        raise ModuleError(
            f"this {type(module).__name__} is not parallel; evener.parallelize(module) makes it so"
        )
    if state.finalizer is not None:
        state.finalizer()  # runs once, now instead of at the end
    del vars(module)[STATE_NAME]
    vars(module).pop(COMPILE_NAME, None)
    module.__class__ = state.plain
    if state.own_forward is not None:
        vars(module)["forward"] = state.own_forward
    return module


def _check_options(
    timeout_s: float | None, restarts: int, batchnorm: str | None, grid: int | None
) -> None:
    if timeout_s is not None and not timeout_s > 0:
        raise ValueError(f"timeout_s={timeout_s!r}: expected seconds above zero, or None")
    if not isinstance(restarts, int) or restarts < 0:
        raise ValueError(f"restarts={restarts!r}: expected a whole number, zero or more")
    if grid is not None and (not isinstance(grid, int) or isinstance(grid, bool) or grid < 1):
        raise ValueError(f"grid={grid!r}: expected a whole number above zero, or None")
    if grid is not None and batchnorm == "exact":
        raise ValueError(
            f'grid={grid} and batchnorm="exact": with a grid batch norm takes mean and variance '
            "of each cell, not of the whole batch; leave one of the two out"
        )


def _policies(weights: Sequence[float] | None, num_devices: int) -> tuple[Policy, Policy]:
    if weights is None:
        return Balancer(num_devices), Balancer(num_devices)
    fixed = FixedShares(weights)
    return fixed, fixed


def _check_drivable(found: Sequence[Device]) -> None:
    others = [device.label for device in found if device.kind != "cpu"]
    if others:
        raise DeviceError(
            f"{', '.join(others)}: this version shares work among CPU devices only; "
            'give devices="cpu", or one device alone'
        )
    if not sys.platform.startswith("linux"):
        raise DeviceError(f"more than one device needs Linux, not {sys.platform}")


def _call(
    module: nn.Module,
    parallel: type[nn.Module],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    is_compiled: bool = True,
) -> Any:
    """Call a parallel module of a made class."""
    state: _State = vars(module)[STATE_NAME]
    if type(module) is not parallel:  # a lazy module becomes another class in its first call
        state.plain = type(module)
        module.__class__ = _parallel_class(state.plain, is_plain_call=False)
    own = state.own_forward or state.plain.forward.__get__(module)
    assert state.way is not None  # noqa: S101 - see is_plain_call
    if is_compiled:
        context = surrounding()
        if vars(module).get(COMPILE_NAME) is not context:
            vars(module)[COMPILE_NAME] = context
        own = state.compiler.forward(module, own)
    call = state.explicit.call_for(args, kwargs) if state.explicit else state.way.call
    return call(module, own, args, kwargs)


def _parallel_class(plain: type[nn.Module], *, is_plain_call: bool) -> type[nn.Module]:
    """A subclass of a module's class whose forward goes through the module's devices."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # torch.compile around the module; not for our own code
            return torch.compiler.disable(_call)(self, parallel, args, kwargs)  # type: ignore[no-untyped-call]
        if COMPILE_NAME in vars(self):
            del vars(self)[COMPILE_NAME]
        return _call(self, parallel, args, kwargs, is_compiled=False)

    def reduce_ex(self: nn.Module, protocol: Any) -> Any:
        """Pickle and copy as a plain module."""
        state: _State = vars(self)[STATE_NAME]
        parts = super(parallel, self).__reduce_ex__(protocol)
        if isinstance(parts, str):
            return parts
        function, arguments, *rest = parts
        function = plain if function is parallel else function
        arguments = tuple(plain if argument is parallel else argument for argument in arguments)
        if function is copyreg.__newobj__:  # type: ignore[attr-defined]
            function = plain.__new__  # the same, without pickle's check against the class
        if rest and isinstance(rest[0], dict):
            # A forward that was set later wraps this one: it is for the whole call, and ours.
            private = (STATE_NAME, COMPILE_NAME, "forward")
            kept = {name: value for name, value in rest[0].items() if name not in private}
            if state.own_forward is not None:
                kept["forward"] = state.own_forward
            rest[0] = kept
        return (function, arguments, *rest)

    # torch's compiler counts by code: each class has its own.
    forward.__code__ = forward.__code__.replace()
    body: dict[str, Any] = {
        "__module__": plain.__module__,
        "__qualname__": plain.__qualname__,
        "__doc__": plain.__doc__,
        "__reduce_ex__": reduce_ex,
    }
    if not is_plain_call:
        body["forward"] = forward
    parallel: type[nn.Module] = type(plain.__name__, (plain,), body)
    return parallel
