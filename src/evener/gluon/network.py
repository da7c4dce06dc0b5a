"""Network: putting a module on devices, in the words of Gluon.

A network is a parallel module (see :func:`evener.parallelize`) that knows shards. Initializing
puts it on its devices and gives it its first values; to initialize it again may put it on others.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from evener.devices import DevicesSpec
from evener.devices import devices as _devices
from evener.errors import ModuleError, SharesError
from evener.gluon.explicit import Explicit
from evener.gluon.initializer import Initializer
from evener.parallelize import parallelize, release
from evener.pickling import STATE_NAME

#: Stands for an :class:`Explicit` where there is one device: its calls are plain calls.
_NOBODY = object()

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def initialize(
    net: ModuleT,
    init: Initializer | Callable[[nn.Module], Any] | None = None,
    devices: DevicesSpec = "auto",
    *,
    force_reinit: bool = False,
    timeout_s: float | None = None,
    restarts: int = 3,
) -> ModuleT:
    """Put a network on devices, and give it its first values.

    From then on ``net(shard)``, with a shard from :func:`split_and_load`, is computed on the
    shard's own device, at the same time as its siblings. ``net(x)`` with a whole batch works as
    after :func:`evener.parallelize`. Helpers start at the first call.

    Args:
        net: any module. It is changed in place; :func:`evener.release` gives the plain one back.
        init: what its parameters begin with: ``Normal(sigma)``, ``Xavier()``; or a function of a
            submodule, as ``net.apply`` takes it. Default: as they are.
        devices: as for :func:`evener.devices`.
        force_reinit: whether a network that is initialized already is initialized again, on
            ``devices``, even if they are others. Default: it is left as it is, with a warning.
        timeout_s: as for :func:`evener.parallelize`.
        restarts: as for :func:`evener.parallelize`.

    Returns:
        The same object.

    Raises:
        DeviceError: as :func:`evener.parallelize`.
        ModuleError: if ``net`` cannot be made parallel, is parallel on other devices without
            ``force_reinit``, or with a batch in another dimension than the first, or has a
            parameter without a shape that ``init`` would need.
        ValueError: if ``init`` is none of the above.

    Source: ``Block.initialize`` of ``mxnet.gluon``, there with ``ctx`` or ``device``.

    Example:
        >>> net = initialize(nn.Linear(2, 1), lambda m: nn.init.ones_(m.weight), "cpu:0")
        >>> net.weight.tolist()
        [[1.0, 1.0]]
    """
    if isinstance(init, type) or not (init is None or callable(init)):
        raise ValueError(
            f"init={init!r}: expected None, an initializer such as Normal(0.01), or a function of "
            "a submodule"
        )
    found = _devices(devices)
    state = vars(net).get(STATE_NAME) if isinstance(net, nn.Module) else None
    if state is not None and not force_reinit:
        if state.explicit is not None:
            warnings.warn(
                f"this {type(net).__name__} is initialized already and was left as it is; give "
                "force_reinit=True to initialize it again",
                stacklevel=2,
            )
            return net
        if state.devices != found:
            there = ", ".join(device.label for device in state.devices)
            raise ModuleError(
                f"this {type(net).__name__} is parallel already, on {there}; give these devices, "
                "or force_reinit=True to put it on others"
            )
    if state is not None and state.way is not None and not state.way.dims.is_first:
        raise ModuleError(
            f"this {type(net).__name__} was made parallel with in_dims or out_dims, and shards "
            "are parts along the first dimension; evener.release(net) first, and move the batch "
            "there"
        )
    if state is not None and state.journal.grid is not None:
        raise ModuleError(
            f"this {type(net).__name__} was made parallel with grid={state.journal.grid}, and "
            "shards are cut by you; evener.release(net) first"
        )
    if state is not None and state.devices != found:
        release(net)
        state = None
    if state is None:
        parallelize(net, found, timeout_s=timeout_s, restarts=restarts)
        state = vars(net)[STATE_NAME]
    if state.explicit is None:
        labels = [device.label for device in found]
        state.explicit = Explicit(state.way, labels) if state.way is not None else _NOBODY
    if isinstance(init, Initializer):
        init(net)
    elif init is not None:
        net.apply(init)
    return net


def shares(net: nn.Module, batch_size: int) -> tuple[int, ...]:
    """Say how the devices would best share the next batch, by how fast each has been.

    They are what :func:`evener.parallelize` with measured shares would take. To use them, give
    them to :func:`split_and_load` for inputs and labels. Ask before each batch: what the devices
    then do with it is measured for the next answer, and now and then a device that has had
    nothing is tried again. To ask twice before a call gives the same answer.

    Training and inference are measured apart, so for an evaluation ask under ``torch.no_grad()``.

    Args:
        net: a network that was initialized.
        batch_size: samples of the next batch, zero or more.

    Returns:
        The samples of each device, in the order of the devices; zero is possible. Near-equal as
        long as nothing was measured.

    Raises:
        ModuleError: if ``net`` was not initialized.
        SharesError: if ``batch_size`` is negative.

    Example:
        >>> shares(initialize(nn.Linear(2, 1), devices="cpu*2"), 7)
        (4, 3)
    """
    state = vars(net).get(STATE_NAME)
    if state is None:
        raise ModuleError(
            f"this {type(net).__name__} is on no devices; evener.gluon.initialize(net, init, "
            "devices) puts it there"
        )
    if batch_size < 0:
        raise SharesError(f"batch_size={batch_size}: expected zero samples or more")
    if state.way is None:
        return (batch_size,)
    advice: tuple[int, ...] = state.way.advise(batch_size)
    return advice


def flush(net: nn.Module) -> None:
    """Let gradients that wait for those of other shards reach the parameters now."""
    state = vars(net).get(STATE_NAME)
    if state is not None and isinstance(state.explicit, Explicit):
        state.explicit.flush()
