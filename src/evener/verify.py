"""verify: whether a module trains on a team as on one device, tried on one step.

Copies of the module do the step (see :mod:`evener.experiment`). The user's module is never run, so
it stays as it is, bit for bit, whatever happens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
from torch import nn

from evener.devices import DevicesSpec, devices
from evener.errors import DeviceError, ModuleError
from evener.experiment import Experiment
from evener.parallelize import parallelize
from evener.pickling import STATE_NAME
from evener.step import Step
from evener.verification import Verification

_devices = devices  # the function: in `verify` that name is an argument


def verify(
    module: nn.Module,
    *inputs: Any,
    loss: Callable[[Any], Any] | None = None,
    devices: DevicesSpec | None = None,
    shares: str | Sequence[float] | None = None,
    **more: Any,
) -> Verification:
    """Check that a module trains on several devices as on one, on one step; print a table.

    Copies of the module run, on copies of the inputs: the module stays as it is, bit for bit, and
    so do the generators of random numbers, also after an error. What hooks, or ``forward`` itself,
    change outside of the module is changed. It takes two seconds or so for each team that starts
    (one; two or four where something differs), and the memory of some copies of the module.

    Args:
        module: any module, parallel or not; the modes of its submodules are taken as they are. If
            it is parallel, its devices and options are the defaults for what is not given here.
        inputs: what it is called with, of the size of a real batch.
        loss: the loss as a function of the output, such as
            ``lambda output: nn.functional.cross_entropy(output, target)``. Default: the output
            itself if it is one number, else the sum of all outputs with random weights. Under
            ``torch.no_grad()``, and where nothing requires a gradient, there is no backward.
        devices: the team, as in :func:`evener.devices`, two or more, or one with a ``grid``.
            Default: those of the module if it is parallel, else ``"auto"``.
        shares: as in :func:`evener.parallelize`. Default: those of the module if they are fixed,
            else ``"even"``.
        more: what :func:`evener.parallelize` knows (``in_dims=``, ...) goes there; all else are
            keyword arguments of the module.

    Returns:
        The rows of the table, the causes that were found, and the verdict. True if nothing differs
        by more than rounding and random numbers.

    Raises:
        DeviceError: if there is only one device, and no grid.
        ModuleError: if the module cannot be copied, or not be made parallel.
        ValueError: if ``loss`` does not return one number.
        Exception: what the module raises on one device; then what it raises on the team, where
            evener's errors say what cannot be shared.

    Example:
        >>> model = nn.Linear(2, 3)
        >>> bool(verify(model, torch.randn(5, 2), devices="cpu*2"))  # doctest: +ELLIPSIS
        One step on one device, and on cpu:0 (3 samples), cpu:1 (2 samples), from the same state.
        ...
        True
    """
    if not isinstance(module, nn.Module):
        raise ModuleError(f"expected an nn.Module, not {type(module).__name__}")
    module, options = _unwrapped(module)
    known = signature(parallelize).parameters
    kwargs = {name: value for name, value in more.items() if name not in known}
    options |= {name: value for name, value in more.items() if name in known}
    if devices is not None:
        options["devices"] = devices
        if shares is None and not isinstance(options.get("shares"), str):
            options.pop("shares", None)  # they are one for each of the devices that it has
    if shares is not None:
        options["shares"] = shares
    if options.get("shares", "auto") == "auto":
        options["shares"] = "even"
    found = _devices(options.get("devices", "auto"))
    if len(found) < 2 and options.get("grid") is None:  # noqa: PLR2004 - a team
        raise DeviceError(
            f"{found[0].label} is one device, on which a call is the plain call: there is nothing "
            'to verify; give two or more, such as devices="cpu*2"'
        )
    grad = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
    step = Step(module, inputs, kwargs, loss, torch.initial_seed() % 2**32, grad)
    result = Experiment(step, found, options).result()
    print(result)  # noqa: T201 - what it is for
    return result


def _unwrapped(module: nn.Module) -> tuple[nn.Module, dict[str, Any]]:
    """The module that is parallel, or may be, inside of what is around it; and its options."""
    module = getattr(module, "_orig_mod", module)  # torch.compile around it
    inner = getattr(module, "module", None)
    if STATE_NAME not in vars(module) and STATE_NAME in getattr(inner, "__dict__", {}):
        assert isinstance(inner, nn.Module)  # noqa: S101 - it is parallel
        module = inner  # DataParallel, or DistributedDataParallel
    state = vars(module).get(STATE_NAME)
    return module, {} if state is None else dict(state.options)
